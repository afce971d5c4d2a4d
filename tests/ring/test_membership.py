"""One node's view of who is in the swarm: every rule on its own. Many nodes together: `test_swarm_simulation`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol import limits
from swarm.protocol.errors import ProtocolError
from swarm.protocol.ids import NodeId
from swarm.protocol.messages import Member, MemberState
from swarm.ring.dialling import ANSWER_S, BACKOFF_MAX_S, DIAL_GRACE_S, HOPELESS_S, MAX_PENDING
from swarm.ring.events import (
    CloseLink,
    Dial,
    DialFailed,
    Heard,
    KeepIncarnation,
    LinkDown,
    LinkUp,
    LocalChange,
    MembershipChanged,
    MembershipEffect,
    MembershipEvent,
    MembersReceived,
    Notice,
    PeerFound,
    PeerLost,
    Share,
    Tick,
)
from swarm.ring.membership import (
    FLUSH_INTERVAL_S,
    FORGET_DEAD_S,
    FORGET_LEFT_S,
    GOSSIP_FANOUT,
    HEARSAY_S,
    LOST_LINK_GRACE_S,
    ROUND_TRIP_CHECK_S,
    ROUND_TRIPS_KEPT,
    ROUND_TRIPS_NEEDED,
    SYNC_INTERVAL_S,
    Membership,
)

ALIVE, SUSPECT, DEAD, LEFT, LEAVING = (
    MemberState.ALIVE,
    MemberState.SUSPECT,
    MemberState.DEAD,
    MemberState.LEFT,
    MemberState.LEAVING,
)


def node(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def member(number: int, state: MemberState = ALIVE, incarnation: int = 1, version: int = 1, **more: object) -> Member:
    record = Member(
        node(number),
        f"PC-{number}",
        incarnation,
        version,
        state,
        (f"10.0.0.{number}:7420",),
        memory_bytes=8_000_000_000,
        device="CPU",
        speed=1e10,
        model=None,
        model_name="",
        wanted="",
    )
    return replace(record, **more)  # type: ignore[arg-type]


class View:
    """A `Membership` of node 5 with a clock."""

    def __init__(self, me: int = 5) -> None:
        self.now = 100.0
        self.machine = Membership(member(me), random.Random(1))
        self.effects: list[MembershipEffect] = []

    def take(self, event: MembershipEvent, after: float = 0.0) -> list[MembershipEffect]:
        self.now += after
        effects = self.machine.handle(event, self.now)
        self.machine.validate_state()
        self.effects += effects
        return effects

    def hear(self, *records: Member, sender: int) -> list[MembershipEffect]:
        return self.take(MembersReceived(node(sender), records))

    def join(self, number: int, **more: object) -> None:
        self.take(LinkUp(node(number)))
        self.hear(member(number, **more), sender=number)

    def run(self, seconds: float, *talking: int) -> list[MembershipEffect]:
        """Ticks, with frames from `talking` nodes on their links."""
        effects: list[MembershipEffect] = []
        for _ in range(round(seconds / 0.25)):
            for number in talking:
                effects += self.take(Heard(node(number)))
            effects += self.take(Tick(), after=0.25)
        return effects

    def state(self, number: int) -> MemberState | None:
        found = [record.state for record in self.machine.members if record.node == node(number)]
        return found[0] if found else None


def dials(effects: list[MembershipEffect]) -> list[Dial]:
    return [effect for effect in effects if isinstance(effect, Dial)]


def shares(effects: list[MembershipEffect], to: int) -> list[Member]:
    return [record for e in effects if isinstance(e, Share) and node(to) in e.to for record in e.members]


def notices(effects: list[MembershipEffect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Notice)]


# --- meeting --------------------------------------------------------------------------------------------------------


def test_a_node_alone_knows_itself() -> None:
    view = View()
    assert view.machine.members == (member(5),)
    assert view.run(30) == []


def test_a_new_link_is_told_the_whole_view_and_a_known_one_only_ourselves() -> None:
    view = View()
    view.join(1)
    assert shares(view.take(LinkUp(node(2))), 2) == [member(5), member(1)]
    view.hear(member(3), sender=1)
    assert shares(view.take(LinkUp(node(3))), 3) == [member(5)]


def test_whom_we_only_heard_of_is_not_in_our_view() -> None:
    view = View()
    view.join(1)
    view.hear(member(2), sender=1)
    assert shares(view.take(LinkUp(node(3))), 3) == [member(5), member(1)]


def test_a_member_is_announced_once() -> None:
    view = View()
    view.take(LinkUp(node(1)))
    assert MembershipChanged((member(1), member(5))) in view.hear(member(1), sender=1)
    view.now += 1
    assert view.hear(member(1), sender=1) == []


def test_news_in_quick_succession_travels_together() -> None:
    view = View()
    view.join(1)
    effects = [e for n in (2, 3, 4) for e in view.hear(member(n), sender=1)]
    assert effects == []
    effects = view.take(Tick(), after=FLUSH_INTERVAL_S)
    assert [e.members for e in effects if isinstance(e, MembershipChanged)] == [
        tuple(member(n) for n in (1, 2, 3, 4, 5))
    ]


def test_news_of_others_goes_to_a_few_links() -> None:
    view = View()
    for number in range(10, 20):
        view.join(number)
    view.run(1, *range(10, 20))
    (share,) = [e for e in view.hear(member(30), sender=10) if isinstance(e, Share)]
    assert share.members == (member(30),)
    assert len(set(share.to)) == GOSSIP_FANOUT


def test_our_own_record_goes_to_every_link_at_once() -> None:
    view = View()
    view.join(1)
    view.join(2)
    effects = view.take(LocalChange(member(5, memory_bytes=1)))
    assert shares(effects, 1) == shares(effects, 2) == [member(5, memory_bytes=1, version=2)]
    assert view.take(LocalChange(member(5, memory_bytes=1))) == []


def test_a_local_change_cannot_touch_identity() -> None:
    view = View()
    view.take(LocalChange(member(9, incarnation=7, version=9, round_trip_ms=4.0)))
    mine = view.machine.me
    assert (mine.node, mine.incarnation, mine.version, mine.round_trip_ms) == (node(5), 1, 2, 0.0)
    assert mine.name == "PC-9"


def test_the_view_goes_to_a_random_member_now_and_then() -> None:
    view = View()
    view.join(1)
    view.run(1, 1)
    assert len([r for r in shares(view.run(10 * SYNC_INTERVAL_S, 1), 1) if r.node == node(5)]) == 10


# --- which record wins ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "heard", "wins"),
    [
        (member(1, version=3), member(1, version=4, memory_bytes=1), True),
        (member(1, version=3), member(1, version=2, memory_bytes=1), False),
        (member(1, version=3), member(1, incarnation=2, version=1), True),
        (member(1, incarnation=2), member(1, incarnation=1, version=99), False),
        (member(1), member(1, SUSPECT), True),
        (member(1), member(1, DEAD), True),
        (member(1, SUSPECT), member(1), False),
        (member(1, SUSPECT), member(1, version=2), True),
        (member(1, LEAVING), member(1, DEAD), True),
        (member(1, LEAVING), member(1, version=2, state=LEFT), True),
    ],
)
def test_the_newer_record_wins_and_a_judgement_of_the_same_one(known: Member, heard: Member, wins: bool) -> None:
    view = View()
    view.join(2)
    view.hear(replace(known, state=ALIVE), known, sender=2)
    view.hear(heard, sender=2)
    assert view.machine.members[0] == (heard if wins else known)


@given(st.permutations([(i, v, s) for i in (1, 2) for v in (1, 2) for s in (ALIVE, SUSPECT, DEAD)]))
def test_records_end_the_same_whatever_their_order(order: list[tuple[int, int, MemberState]]) -> None:
    view = View()
    view.join(2)
    view.hear(member(1, incarnation=0, version=0), sender=2)
    for incarnation, version, state in order:
        view.hear(member(1, state, incarnation, version), sender=2)
    assert view.machine.members[0] == member(1, DEAD, 2, 2)


def test_the_dead_and_the_left_are_not_introduced() -> None:
    view = View()
    view.join(1)
    view.hear(member(2, DEAD), member(3, LEFT), sender=1)
    assert (view.state(2), view.state(3)) == (None, None)


# --- crashes, silence, refutation -----------------------------------------------------------------------------------


def test_a_closed_link_makes_suspect_at_once_and_dead_soon_after() -> None:
    view = View()
    view.join(1)
    view.run(1, 1)
    assert any(isinstance(e, MembershipChanged) for e in view.take(LinkDown(node(1))))
    assert view.state(1) is SUSPECT
    view.run(LOST_LINK_GRACE_S - 0.5)
    assert view.state(1) is SUSPECT
    view.run(0.5)
    assert view.state(1) is DEAD


def test_a_link_that_comes_back_is_told_of_the_suspicion_and_refutes() -> None:
    view = View()
    view.join(1)
    view.take(LinkDown(node(1)))
    assert member(1, SUSPECT) in shares(view.take(LinkUp(node(1)), after=0.3), 1)
    view.hear(member(1, version=2), sender=1)
    view.run(20, 1)
    assert view.state(1) is ALIVE


def test_silence_makes_suspect_then_dead_and_the_link_is_closed() -> None:
    view = View()
    view.join(1)
    view.run(limits.SUSPECT_AFTER_S - 0.25)
    assert view.state(1) is ALIVE
    view.run(0.25)
    assert view.state(1) is SUSPECT
    effects = view.run(limits.DEAD_AFTER_S - limits.SUSPECT_AFTER_S)
    assert view.state(1) is DEAD
    assert [e.node for e in effects if isinstance(e, CloseLink)] == [node(1)]


def test_a_silent_link_is_closed_whoever_said_first_that_its_end_is_dead() -> None:
    view = View()
    view.join(1)
    view.join(2)
    view.run(limits.SUSPECT_AFTER_S + 1, 2)
    view.hear(member(1, DEAD), sender=2)
    effects = view.run(limits.DEAD_AFTER_S, 2)
    assert [e.node for e in effects if isinstance(e, CloseLink)] == [node(1)]


def test_a_link_whose_end_never_says_who_it_is_is_closed() -> None:
    view = View()
    view.take(LinkUp(node(1)))
    effects = view.run(limits.DEAD_AFTER_S)
    assert [e.node for e in effects if isinstance(e, CloseLink)] == [node(1)]


def test_a_member_that_talks_again_is_reminded_until_it_refutes() -> None:
    view = View()
    view.join(1)
    view.run(limits.SUSPECT_AFTER_S)
    assert view.state(1) is SUSPECT
    assert shares(view.run(3, 1), 1).count(member(1, SUSPECT)) >= 3
    view.hear(member(1, version=2), sender=1)
    assert view.state(1) is ALIVE


def test_we_refute_what_is_said_of_us() -> None:
    for rumour in (SUSPECT, DEAD):
        view = View()
        view.join(1)
        assert shares(view.hear(member(5, rumour), sender=1), 1) == [member(5, version=2)]
        assert view.hear(member(5, rumour), sender=1) == [], "the old rumour is beaten already"


def test_a_leaving_node_refutes_as_leaving() -> None:
    view = View()
    view.join(1)
    view.take(LocalChange(member(5, LEAVING)))
    view.hear(member(5, DEAD, version=2), sender=1)
    assert view.machine.me == member(5, LEAVING, version=3)


def test_a_node_that_left_does_not_come_back() -> None:
    view = View()
    view.join(1)
    view.take(LocalChange(member(5, LEFT)))
    assert view.hear(member(5, DEAD, version=2), sender=1) == []


def test_a_rumour_about_somebody_we_hear_is_passed_to_it_and_not_believed() -> None:
    view = View()
    view.join(1)
    view.join(2)
    effects = view.hear(member(1, DEAD), sender=2)
    assert view.state(1) is ALIVE
    assert shares(effects, 1) == [member(1, DEAD)]
    assert shares(effects, 2) == []


def test_a_rumour_about_somebody_silent_is_believed() -> None:
    view = View()
    view.join(1)
    view.join(2)
    view.run(limits.SUSPECT_AFTER_S, 2)
    view.hear(member(1, DEAD), sender=2)
    assert view.state(1) is DEAD


def test_refuted_by_way_of_others_a_member_lives_without_a_link() -> None:
    view = View()
    view.join(1)
    view.join(2)
    view.take(LinkDown(node(1)))
    view.hear(member(1, version=2), sender=2)
    for _ in range(20):
        view.run(2, 2)
        view.hear(member(1, version=2), sender=2)
    assert view.state(1) is ALIVE
    view.run(HEARSAY_S, 2)
    assert view.state(1) is DEAD, "nobody says any more that they hear it"


def test_a_restart_is_the_same_member_with_a_higher_incarnation() -> None:
    view = View()
    view.join(1)
    view.take(LinkDown(node(1)))
    view.run(5)
    assert view.state(1) is DEAD
    view.join(1, incarnation=2)
    assert view.machine.members == (member(1, incarnation=2), member(5))


def test_leaving_and_left_are_announced_and_the_closed_link_changes_nothing() -> None:
    view = View()
    view.join(1)
    view.hear(member(1, LEAVING, version=2), sender=1)
    assert view.state(1) is LEAVING
    view.hear(member(1, LEFT, version=3), sender=1)
    view.take(LinkDown(node(1)))
    view.run(10)
    assert view.state(1) is LEFT


@pytest.mark.parametrize(("state", "seconds"), [(LEFT, FORGET_LEFT_S), (DEAD, FORGET_DEAD_S)])
def test_who_is_gone_is_forgotten_after_a_time(state: MemberState, seconds: float) -> None:
    view = View()
    view.join(2)
    view.hear(member(1), sender=2)
    view.hear(member(1, state, version=2), sender=2)
    view.run(seconds - 1, 2)
    assert view.state(1) is state
    effects = view.run(2, 2)
    assert view.state(1) is None
    assert any(isinstance(e, MembershipChanged) for e in effects)


# --- identity -------------------------------------------------------------------------------------------------------


def test_a_lost_count_is_caught_up() -> None:
    view = View()
    view.join(1)
    effects = view.hear(member(5, incarnation=7, version=3), sender=1)
    assert KeepIncarnation(7) in effects
    assert (view.machine.me.incarnation, view.machine.me.version) == (7, 4)
    assert notices(effects) == []


def test_a_second_pc_with_our_id_is_reported() -> None:
    view = View()
    view.join(1)
    clone = member(5, version=2, name="copy", addresses=("10.0.0.77:7420",))
    assert "copy uses this node's id" in notices(view.hear(clone, sender=1))[0]
    assert "Another PC uses this node's id" in notices(view.take(LinkUp(node(5))))[0]


def test_two_copies_do_not_outbid_each_other_at_full_speed() -> None:
    view = View()
    view.join(1)
    for _ in range(50):
        view.hear(replace(view.machine.me, version=view.machine.me.version + 1, name="copy"), sender=1)
        view.now += 0.01
    assert view.machine.me.version < 5


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_a_full_swarm_says_so_once() -> None:
    view = View(me=5000)
    view.take(LinkUp(node(1)))
    effects = view.hear(*(member(n) for n in range(1, limits.MAX_MEMBERS + 20)), sender=1)
    assert len(view.machine.members) == limits.MAX_MEMBERS
    assert len(notices(effects)) == 1


@pytest.mark.parametrize(
    "record",
    [
        member(1, version=-1),
        member(1, incarnation=2**60),
        member(1, name=""),
        member(1, name="x" * 65),
        member(1, addresses=("a:1",) * 17),
        member(1, memory_bytes=-1),
        member(1, speed=-1.0),
        member(1, round_trip_ms=-1.0),
    ],
)
def test_records_that_make_no_sense_change_nothing(record: Member) -> None:
    view = View()
    view.take(LinkUp(node(2)))
    with pytest.raises(ProtocolError, match="bad member record"):
        view.machine.handle(MembersReceived(node(2), (member(2), record)), view.now)
    assert view.machine.members == (member(5),)
    view.machine.validate_state()


# --- dialling -------------------------------------------------------------------------------------------------------


def test_the_lower_id_dials_at_once_and_the_higher_after_a_grace() -> None:
    view = View()
    view.join(2)
    view.hear(member(9), member(1), sender=2)
    assert dials(view.take(Tick())) == [Dial("10.0.0.9:7420", node(9))]
    assert dials(view.run(DIAL_GRACE_S - 0.25, 2)) == []
    assert dials(view.run(0.25, 2)) == [Dial("10.0.0.1:7420", node(1))]


def test_nobody_with_a_link_is_dialled_and_a_lost_one_is() -> None:
    view = View()
    view.join(9)
    assert dials(view.run(20, 9)) == []
    view.take(LinkDown(node(9)))
    assert dials(view.take(Tick())) == [Dial("10.0.0.9:7420", node(9))]


def test_failures_back_off_up_to_a_bound() -> None:
    view = View()
    view.take(PeerFound("10.0.0.50:7420"))
    gaps, last = [], view.now
    for _ in range(1200):
        for dial in dials(view.take(Tick(), after=0.25)):
            gaps.append(view.now - last)
            last = view.now
            view.take(DialFailed(dial.address, dial.node))
    assert gaps[1] <= 1.0
    assert max(gaps) <= 1.5 * BACKOFF_MAX_S + 0.25
    assert min(gaps[8:]) >= 0.5 * BACKOFF_MAX_S


def test_a_hopeless_address_is_left_alone_for_long() -> None:
    view = View()
    view.take(PeerFound("10.0.0.50:7420"))
    (dial,) = dials(view.take(Tick()))
    view.take(DialFailed(dial.address, dial.node, retry=False))
    assert dials(view.run(HOPELESS_S / 2 - 1)) == []
    assert dials(view.run(HOPELESS_S * 1.5)) != []


def test_a_dial_nobody_answers_counts_as_failed() -> None:
    view = View()
    view.take(PeerFound("10.0.0.50:7420"))
    assert len(dials(view.run(ANSWER_S - 1))) == 1
    assert len(dials(view.run(5))) == 1


def test_addresses_of_a_member_take_turns_with_what_discovery_saw() -> None:
    view = View()
    view.join(2)
    view.take(PeerFound("192.168.0.9:7420", node(9)))
    view.hear(member(9, addresses=("a:1", "b:2")), sender=2)
    tried = []
    for _ in range(40):
        for dial in dials(view.run(0.25, 2)):
            tried.append(dial.address)
            view.take(DialFailed(dial.address, dial.node))
    assert tried[:4] == ["a:1", "b:2", "192.168.0.9:7420", "a:1"]


def test_an_address_that_answers_is_not_dialled_again_while_its_link_stands() -> None:
    view = View()
    view.take(PeerFound("10.0.0.50:7420"))
    view.take(Tick())
    view.take(LinkUp(node(9), "10.0.0.50:7420"))
    assert dials(view.run(60, 9)) == []
    view.take(LinkDown(node(9)))
    assert dials(view.run(5)) == [Dial("10.0.0.50:7420", node(9))]


def test_an_address_that_a_member_calls_its_own_is_not_dialled_beside_it() -> None:
    view = View()
    view.join(9)
    view.take(PeerFound("10.0.0.9:7420"))
    assert dials(view.run(60, 9)) == []


def test_an_address_that_turns_out_to_be_a_linked_members_is_left_alone() -> None:
    view = View()
    view.join(9)
    view.take(PeerFound("office-pc:7420"))
    (dial,) = dials(view.run(0.25, 9))
    view.take(DialFailed(dial.address, dial.node, answered=node(9)))
    assert dials(view.run(60, 9)) == []
    view.take(LinkDown(node(9)))
    assert {dial.node for dial in dials(view.run(5))} == {node(9)}


def test_what_discovery_lost_is_not_dialled() -> None:
    view = View()
    view.take(PeerFound("10.0.0.50:7420"))
    view.take(PeerLost("10.0.0.50:7420"))
    assert dials(view.run(5)) == []


def test_we_do_not_dial_ourselves() -> None:
    view = View()
    view.take(PeerFound("10.0.0.5:7420"))
    view.take(PeerFound("192.168.0.5:7420", node(5)))
    assert dials(view.run(20)) == []


def test_who_left_is_not_dialled_and_who_died_is() -> None:
    view = View()
    view.join(2)
    view.hear(member(8), member(9), sender=2)
    view.hear(member(8, LEFT, version=2), member(9, DEAD), sender=2)
    assert {dial.node for dial in dials(view.run(30, 2))} == {node(9)}


def test_dials_under_way_and_found_addresses_are_bounded() -> None:
    view = View()
    for number in range(limits.MAX_DISCOVERED_PEERS + 50):
        view.take(PeerFound(f"host{number}:1"))
    assert len(dials(view.take(Tick()))) == MAX_PENDING
    assert dials(view.take(Tick(), after=1)) == []


# --- round trips ----------------------------------------------------------------------------------------------------


def test_the_median_round_trip_is_published_when_it_moves() -> None:
    view = View()
    for number in (1, 2, 3):
        view.join(number)
        for _ in range(ROUND_TRIPS_NEEDED - 1):
            view.take(Heard(node(number), 0.4 if number < 3 else 50.0))
    view.run(ROUND_TRIP_CHECK_S, 1, 2, 3)
    assert view.machine.me.round_trip_ms == 0.0, "too few to know"
    for number in (1, 2, 3):
        view.take(Heard(node(number), 0.4 if number < 3 else 50.0))
    view.run(ROUND_TRIP_CHECK_S, 1, 2, 3)
    assert view.machine.me.round_trip_ms == 0.4
    version = view.machine.me.version
    for _ in range(ROUND_TRIPS_KEPT):
        view.take(Heard(node(1), 1.1))
    view.run(ROUND_TRIP_CHECK_S, 1, 2, 3)
    assert view.machine.me.version == version, "a millisecond is noise"
    for _ in range(ROUND_TRIPS_KEPT):
        view.take(Heard(node(1), 30.0))
    view.run(ROUND_TRIP_CHECK_S, 1, 2, 3)
    assert view.machine.me.round_trip_ms == 30.0


def test_of_a_links_round_trips_the_least_counts() -> None:
    view = View()
    view.join(1)
    assert view.machine.round_trip_ms(node(1)) is None
    for value in (9.0, 0.5, 30.0):
        view.take(Heard(node(1), value))
    assert view.machine.round_trip_ms(node(1)) == 0.5
