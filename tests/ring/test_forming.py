"""One node's part in forming the ring: every rule on its own. Many nodes together: `test_swarm_simulation`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.protocol.errors import ProtocolError
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.limits import PREPARE_TIMEOUT_S
from swarm.protocol.messages import Commit, Member, MemberState, Message, Prepare, Prepared, PrepareFailed
from swarm.protocol.plan import NO_PLAN, Plan, Stage
from swarm.ring.events import (
    AcquireFailed,
    AcquireModel,
    Activate,
    Broadcast,
    CancelPrepare,
    FormingEffect,
    FormingEvent,
    KeepEpoch,
    LearnModel,
    LocalPrepared,
    LocalPrepareFailed,
    LocalStageBroken,
    MembershipChanged,
    ModelKnown,
    Notice,
    PlanReceived,
    PreparedReceived,
    PrepareFailedReceived,
    PrepareReceived,
    ProgressHeard,
    Send,
    StartPrepare,
    Tick,
)
from swarm.ring.exclusion import EXCLUDE_S, STRIKE_WINDOW_S
from swarm.ring.fit import ModelShape
from swarm.ring.forming import (
    ACQUIRE_AGAIN_S,
    ASK_AGAIN_S,
    LOOK_AROUND_S,
    REPEAT_S,
    REPORT_S,
    SETTLE_MAX_S,
    SETTLE_S,
    SUPERSEDE_S,
    WITHDRAWN_S,
    Forming,
)

MB = 10**6
MANIFEST = BlobId("a" * 64)
SHAPE = ModelShape(MANIFEST, (10 * MB,) * 24, 0, 0, False, (100,) * 24, 64, 4096)


def node(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def member(number: int, **more: object) -> Member:
    alive = MemberState.ALIVE
    record = Member(node(number), f"PC-{number}", 1, 1, alive, (), 1000 * MB, "CPU", 1e9, MANIFEST, "smol", "")
    return replace(record, **more)  # type: ignore[arg-type]


def plan(number: int, proposer: int, *stages: int, model: BlobId = MANIFEST) -> Plan:
    """24 layers in equal parts."""
    size = 24 // max(1, len(stages))
    row = tuple(Stage(node(n), f"PC-{n}", i * size, (i + 1) * size, "CPU", MB) for i, n in enumerate(stages))
    return Plan(Epoch(number, node(proposer)), model, row, kv_tokens=4 * 4096)


class Part:
    """A `Forming` with a clock; by default of node 1, which leads."""

    def __init__(self, me: int = 1, members: tuple[int, ...] = (1, 2, 3), **more: object) -> None:
        self.now = 50.0
        self.me = me
        self.machine = Forming(node(me))
        self.members: dict[int, Member] = {number: member(number, **more) for number in members}
        self.take(ModelKnown(SHAPE))
        self.change()

    def take(self, event: FormingEvent, after: float = 0.0) -> list[FormingEffect]:
        self.now += after
        effects = self.machine.handle(event, self.now)
        self.machine.validate_state()
        return effects

    def change(self, *records: Member) -> list[FormingEffect]:
        for record in records:
            self.members[int(record.node, 16)] = record
        return self.take(MembershipChanged(tuple(self.members[number] for number in sorted(self.members))))

    def run(self, seconds: float) -> list[FormingEffect]:
        return [effect for _ in range(round(seconds / 0.25)) for effect in self.take(Tick(), after=0.25)]

    def settle(self) -> list[FormingEffect]:
        return self.run(LOOK_AROUND_S + SETTLE_S)

    def prepare(self) -> Plan:
        """Let the leader propose; its plan."""
        self.settle()
        preparing = self.machine.preparing
        assert preparing is not None
        return preparing

    def all_ready(self) -> list[FormingEffect]:
        preparing = self.machine.preparing
        assert preparing is not None
        effects: list[FormingEffect] = []
        for stage in preparing.stages:
            if stage.node == node(self.me):
                effects += self.take(LocalPrepared(preparing.epoch))
            else:
                effects += self.take(PreparedReceived(stage.node, preparing.epoch))
        return effects

    def serve(self) -> Plan:
        self.prepare()
        self.all_ready()
        self.run(SETTLE_MAX_S)
        assert self.machine.preparing is None
        return self.machine.plan


def broadcasts(effects: list[FormingEffect], kind: type[Message]) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, kind)]


def sent(effects: list[FormingEffect], to: int) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Send) and e.to == node(to)]


def notices(effects: list[FormingEffect]) -> list[str]:
    return [e.text for e in effects if isinstance(e, Notice)]


def of(effects: list[FormingEffect], kind: type[FormingEffect]) -> list[FormingEffect]:
    return [e for e in effects if isinstance(e, kind)]


# --- proposing ------------------------------------------------------------------------------------------------------


def test_the_leader_looks_around_then_proposes_to_everybody() -> None:
    part = Part()
    assert part.run(LOOK_AROUND_S - 0.5) == []
    effects = part.run(1)
    (prepare,) = broadcasts(effects, Prepare)
    assert isinstance(prepare, Prepare)
    assert [(s.node, s.start, s.end) for s in prepare.plan.stages] == [
        (node(1), 0, 8),
        (node(2), 8, 16),
        (node(3), 16, 24),
    ]
    assert prepare.plan.epoch == Epoch(1, node(1))
    assert effects == [KeepEpoch(1), Broadcast(prepare), StartPrepare(prepare.plan)]


def test_nobody_else_proposes() -> None:
    assert Part(me=2).run(30) == []


def test_a_suspect_leader_leads_and_a_leaving_one_does_not() -> None:
    part = Part(me=2)
    part.change(member(1, state=MemberState.SUSPECT))
    assert part.settle() == []
    part.change(member(1, state=MemberState.LEAVING))
    assert len(broadcasts(part.run(SETTLE_S), Prepare)) == 1


def test_the_epoch_is_above_all_that_were_seen_and_kept() -> None:
    part = Part()
    part.machine = Forming(node(1), last_epoch=41)
    part.take(ModelKnown(SHAPE))
    part.change()
    assert part.prepare().epoch == Epoch(42, node(1))
    part.take(PrepareReceived(node(3), plan(90, 3, 2)))
    part.run(SETTLE_S)
    assert part.machine.preparing is not None
    assert part.machine.preparing.epoch == Epoch(91, node(1))


def test_changes_in_quick_succession_are_one_and_cannot_delay_for_ever() -> None:
    part = Part(members=(1,))
    part.serve()
    for number in range(2, 8):
        assert broadcasts(part.change(member(number)), Prepare) == []
        assert broadcasts(part.run(SETTLE_S - 0.25), Prepare) == []
    effects = part.run(SETTLE_S)
    assert len(broadcasts(effects, Prepare)) == 1

    part = Part(members=(1,))
    part.serve()
    waited = 0.0
    while part.machine.preparing is None:
        part.change(member(2, version=int(waited * 10) + 2))
        part.run(0.25)
        waited += 0.25
        assert waited < SETTLE_MAX_S + 1


def test_the_old_plan_serves_until_all_are_ready_then_everybody_is_told() -> None:
    part = Part()
    prepared = part.prepare()
    assert part.take(LocalPrepared(prepared.epoch)) == []
    assert part.take(PreparedReceived(node(2), prepared.epoch)) == []
    assert part.machine.plan == NO_PLAN
    assert part.take(PreparedReceived(node(3), prepared.epoch)) == [
        Broadcast(Commit(prepared)),
        Activate(prepared, loaded=True),
    ]
    assert part.machine.plan == prepared


def test_answers_to_other_epochs_do_not_count() -> None:
    part = Part()
    prepared = part.prepare()
    part.take(LocalPrepared(prepared.epoch))
    part.take(PreparedReceived(node(2), prepared.epoch))
    assert part.take(PreparedReceived(node(3), Epoch(prepared.epoch.number, node(2)))) == []
    assert part.take(PreparedReceived(node(9), prepared.epoch)) == []
    assert part.machine.plan == NO_PLAN


def test_a_proposal_is_repeated_until_it_is_committed() -> None:
    part = Part()
    prepared = part.prepare()
    assert broadcasts(part.run(3 * REPEAT_S), Prepare) == [Prepare(prepared)] * 3
    part.all_ready()
    assert broadcasts(part.run(3 * REPEAT_S), Prepare) == []


def test_a_model_that_does_not_fit_is_committed_as_what_is_missing() -> None:
    part = Part(memory_bytes=50 * MB)
    effects = part.settle()
    (commit,) = broadcasts(effects, Commit)
    assert isinstance(commit, Commit)
    assert commit.plan.stages == ()
    assert commit.plan.missing_bytes > 0
    assert Activate(commit.plan, loaded=True) in effects
    assert broadcasts(part.run(30), Commit) == [], "once"
    part.change(member(4))
    part.run(SETTLE_S)
    assert part.machine.preparing is not None


# --- when a change matters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        member(2, memory_bytes=1100 * MB, version=2),
        member(2, speed=1.15e9, version=2),
        member(2, round_trip_ms=1.5, version=2),
        member(2, state=MemberState.SUSPECT),
        member(2, name="renamed", version=2),
        member(4, speed=1e7),
        member(4, state=MemberState.DEAD),
        member(4, state=MemberState.LEAVING),
    ],
)
def test_what_does_not_change_the_plan_enough_changes_nothing(change: Member) -> None:
    part = Part()
    part.serve()
    part.change(change)
    assert part.run(10) == []


@pytest.mark.parametrize(
    "change",
    [
        member(2, state=MemberState.DEAD),
        member(2, state=MemberState.LEFT),
        member(2, state=MemberState.LEAVING),
        member(2, memory_bytes=MB, version=2),
        member(2, incarnation=2),
        member(2, speed=5e9, version=2),
        member(2, round_trip_ms=200.0, version=2),
        member(4),
    ],
)
def test_what_changes_the_plan_makes_a_new_epoch(change: Member) -> None:
    part = Part()
    old = part.serve()
    part.change(change)
    effects = part.run(SETTLE_S)
    (prepare,) = broadcasts(effects, Prepare)
    assert isinstance(prepare, Prepare)
    assert prepare.plan.epoch.number == old.epoch.number + 1
    assert part.machine.plan == old
    assert (prepare.plan.stage_of(node(2)) is None) == (
        change.state is not MemberState.ALIVE or change.memory_bytes == MB
    )
    assert len(prepare.plan.rings) == (2 if change.round_trip_ms > 100 else 1)


def test_drift_counts_from_what_the_plan_was_made_of() -> None:
    part = Part()
    old = part.serve()
    for step in range(1, 11):
        part.change(member(2, speed=1e9 * 1.1**step, version=step + 1))
        part.run(2)
    assert part.machine.preparing is not None
    assert part.machine.preparing.epoch > old.epoch


def test_a_node_lost_while_preparing_is_replaced_at_once() -> None:
    part = Part()
    first = part.prepare()
    part.change(member(3, state=MemberState.DEAD))
    effects = part.run(SETTLE_S)
    assert CancelPrepare(first.epoch) in effects
    assert part.machine.preparing is not None
    assert {stage.node for stage in part.machine.preparing.stages} == {node(1), node(2)}


def test_a_newcomer_early_in_a_proposal_is_taken_in_and_a_late_one_waits_for_the_commit() -> None:
    part = Part()
    first = part.prepare()
    part.change(member(4))
    part.run(SETTLE_S)
    second = part.machine.preparing
    assert second is not None
    assert second.epoch > first.epoch
    assert len(second.stages) == 4
    part.run(SUPERSEDE_S)
    part.change(member(5), member(6))
    part.run(5)
    assert part.machine.preparing == second
    part.all_ready()
    assert part.machine.plan == second
    part.run(SETTLE_MAX_S)
    assert part.machine.preparing is not None
    assert len(part.machine.preparing.stages) == 6


def test_a_new_leader_goes_on_with_a_plan_that_stands() -> None:
    part = Part(me=2)
    part.take(PrepareReceived(node(1), plan(7, 1, 2, 3)))
    part.take(LocalPrepared(Epoch(7, node(1))))
    part.take(PlanReceived(node(1), plan(7, 1, 2, 3)))
    part.change(member(1, state=MemberState.DEAD))
    assert broadcasts(part.run(10), Prepare) == []


def test_a_new_leader_replaces_a_plan_that_lost_a_node() -> None:
    part = Part(me=2)
    part.take(PlanReceived(node(1), plan(7, 1, 1, 2, 3)))
    part.change(member(1, state=MemberState.DEAD))
    part.settle()
    assert part.machine.preparing is not None
    assert part.machine.preparing.epoch == Epoch(8, node(2))


def test_a_leader_no_longer_leading_finishes_what_can_be_committed() -> None:
    part = Part(me=5, members=(5, 6))
    proposed = part.prepare()
    part.change(member(2))
    part.run(2)
    part.take(LocalPrepared(proposed.epoch))
    assert Broadcast(Commit(proposed)) in part.take(PreparedReceived(node(6), proposed.epoch))


def test_a_leader_no_longer_leading_gives_up_what_cannot() -> None:
    part = Part(me=5, members=(5, 6))
    proposed = part.prepare()
    part.change(member(2), member(6, state=MemberState.DEAD))
    assert CancelPrepare(proposed.epoch) in part.run(2)
    assert part.machine.preparing is None


def test_a_leader_no_longer_leading_gives_up_what_a_stage_cannot_prepare() -> None:
    part = Part(me=5, members=(5, 6))
    proposed = part.prepare()
    part.change(member(2))
    part.run(2)
    assert CancelPrepare(proposed.epoch) in part.take(PrepareFailedReceived(node(6), proposed.epoch, "no disk"))
    assert part.machine.preparing is None


# --- nodes that cannot ----------------------------------------------------------------------------------------------


def test_who_cannot_prepare_is_left_out_for_a_while_and_named() -> None:
    part = Part()
    first = part.prepare()
    effects = part.take(PrepareFailedReceived(node(3), first.epoch, "the compiler said no"))
    assert "PC-3 is left out for now: the compiler said no" in notices(effects)
    (prepare,) = broadcasts(effects, Prepare)
    assert isinstance(prepare, Prepare)
    assert {stage.node for stage in prepare.plan.stages} == {node(1), node(2)}
    assert "without PC-3: the compiler said no" in prepare.plan.note
    part.all_ready()
    assert broadcasts(part.run(EXCLUDE_S - 5), Prepare) == []
    (again,) = set(broadcasts(part.run(10), Prepare))
    assert isinstance(again, Prepare)
    assert len(again.plan.stages) == 3


def test_the_pauses_grow() -> None:
    part = Part()
    part.prepare()
    pauses = []
    for _ in range(4):
        assert part.machine.preparing is not None
        part.take(PrepareFailedReceived(node(3), part.machine.preparing.epoch, "no"))
        part.all_ready()
        began = part.now
        while part.machine.preparing is None:
            part.run(1)
        pauses.append(part.now - began)
    assert pauses == pytest.approx([EXCLUDE_S, 2 * EXCLUDE_S, 4 * EXCLUDE_S, 8 * EXCLUDE_S], abs=2)


def test_we_may_be_the_one_that_cannot() -> None:
    part = Part()
    first = part.prepare()
    effects = part.take(LocalPrepareFailed(first.epoch, "no disk"))
    assert PrepareFailed(first.epoch, "no disk") in broadcasts(effects, PrepareFailed)
    (prepare,) = broadcasts(effects, Prepare)
    assert isinstance(prepare, Prepare)
    assert {stage.node for stage in prepare.plan.stages} == {node(2), node(3)}


def test_nobody_left_is_shown_as_such() -> None:
    part = Part(members=(1,))
    first = part.prepare()
    effects = part.take(LocalPrepareFailed(first.epoch, "no disk"))
    (commit,) = broadcasts(effects, Commit)
    assert isinstance(commit, Commit)
    assert "without PC-1: no disk" in commit.plan.note


def test_progress_keeps_a_slow_stage_and_silence_loses_it() -> None:
    part = Part()
    first = part.prepare()
    part.take(LocalPrepared(first.epoch))
    part.take(PreparedReceived(node(2), first.epoch))
    part.take(ProgressHeard(node(3)), after=PREPARE_TIMEOUT_S - 10)
    part.run(20)
    assert part.machine.preparing == first
    part.take(Tick(), after=PREPARE_TIMEOUT_S)
    assert part.machine.preparing is not None
    assert {stage.node for stage in part.machine.preparing.stages} == {node(1), node(2)}
    assert "no progress for 30 minutes" in part.machine.preparing.note


def test_failures_elsewhere_are_told_once() -> None:
    part = Part(me=2)
    event = PrepareFailedReceived(node(3), Epoch(4, node(1)), "no disk")
    assert notices(part.take(event)) == ["PC-3 cannot run its part: no disk"]
    assert part.take(event) == []


def test_a_stage_that_lost_its_part_is_given_it_again_and_left_out_the_second_time() -> None:
    part = Part()
    old = part.serve()
    report = PrepareFailedReceived(node(3), old.epoch, "not loaded")
    (prepare,) = broadcasts(part.take(report), Prepare)
    assert isinstance(prepare, Prepare)
    assert prepare.plan.stages == old.stages
    assert prepare.plan.epoch > old.epoch
    assert part.take(report) == [], "one report is enough"
    part.all_ready()
    part.run(STRIKE_WINDOW_S / 2)
    part.take(PrepareFailedReceived(node(3), part.machine.plan.epoch, "device lost"))
    assert part.machine.preparing is not None
    assert {stage.node for stage in part.machine.preparing.stages} == {node(1), node(2)}


def test_two_losses_far_apart_are_not_a_pattern() -> None:
    part = Part()
    for _ in range(2):
        part.serve() if part.machine.plan == NO_PLAN else part.all_ready()
        part.run(STRIKE_WINDOW_S + 1)
        part.take(PrepareFailedReceived(node(3), part.machine.plan.epoch, "not loaded"))
        assert part.machine.preparing is not None
        assert len(part.machine.preparing.stages) == 3


# --- taking part ----------------------------------------------------------------------------------------------------


def test_a_stage_prepares_answers_and_switches_on_commit() -> None:
    part = Part(me=2)
    offered = plan(3, 1, 1, 2, 3)
    assert part.take(PrepareReceived(node(1), offered)) == [StartPrepare(offered)]
    assert sent(part.take(LocalPrepared(offered.epoch)), 1) == [Prepared(offered.epoch)]
    assert part.take(PlanReceived(node(1), offered)) == [Activate(offered, loaded=True)]
    assert part.machine.plan == offered
    assert part.machine.loaded


def test_a_spare_watches_and_switches_on_commit() -> None:
    part = Part(me=2)
    offered = plan(3, 1, 1, 3)
    assert part.take(PrepareReceived(node(1), offered)) == []
    assert part.machine.preparing == offered
    assert part.take(PlanReceived(node(1), offered)) == [Activate(offered, loaded=True)]
    assert part.machine.preparing is None


def test_a_repeated_prepare_is_answered_again() -> None:
    part = Part(me=2)
    offered = plan(3, 1, 1, 2)
    part.take(PrepareReceived(node(1), offered))
    assert part.take(PrepareReceived(node(1), offered)) == []
    part.take(LocalPrepared(offered.epoch))
    assert sent(part.take(PrepareReceived(node(1), offered)), 1) == [Prepared(offered.epoch)]


def test_a_repeated_prepare_that_failed_fails_again_without_another_try() -> None:
    part = Part(me=2)
    offered = plan(3, 1, 1, 2)
    part.take(PrepareReceived(node(1), offered))
    effects = part.take(LocalPrepareFailed(offered.epoch, "no disk"))
    assert effects == [Broadcast(PrepareFailed(offered.epoch, "no disk"))]
    assert part.take(PrepareReceived(node(1), offered)) == [Send(node(1), PrepareFailed(offered.epoch, "no disk"))]
    newer = plan(4, 1, 1, 2)
    assert part.take(PrepareReceived(node(1), newer)) == [StartPrepare(newer)]


def test_a_newer_prepare_replaces_an_older_and_never_the_other_way_round() -> None:
    part = Part(me=2)
    older, newer = plan(3, 1, 1, 2), plan(4, 1, 2, 3)
    part.take(PrepareReceived(node(1), older))
    assert part.take(PrepareReceived(node(1), newer)) == [CancelPrepare(older.epoch), StartPrepare(newer)]
    assert part.take(PrepareReceived(node(1), older)) == []
    assert part.machine.preparing == newer
    assert part.take(LocalPrepared(older.epoch)) == [], "finished too late"


def test_a_prepare_older_than_the_plan_in_force_is_answered_with_that() -> None:
    part = Part(me=2)
    part.take(PlanReceived(node(3), plan(9, 3, 3)))
    assert part.take(PrepareReceived(node(1), plan(3, 1, 1, 2))) == [Send(node(1), Commit(plan(9, 3, 3)))]


def test_a_prepare_older_than_our_own_is_answered_with_that() -> None:
    part = Part(me=2, members=(2, 3))
    part.machine = Forming(node(2), last_epoch=5)
    part.take(ModelKnown(SHAPE))
    part.change()
    ours = part.prepare()
    assert part.take(PrepareReceived(node(1), plan(3, 1, 1, 2))) == [Send(node(1), Prepare(ours))]
    assert part.machine.preparing == ours


def test_a_foreign_prepare_newer_than_our_proposal_ends_it_and_we_outbid_it() -> None:
    part = Part()
    ours = part.prepare()
    theirs = plan(8, 2, 2, 3)
    assert CancelPrepare(ours.epoch) in part.take(PrepareReceived(node(2), theirs))
    part.run(SETTLE_S)
    assert part.machine.preparing is not None
    assert part.machine.preparing.epoch == Epoch(9, node(1))


def test_a_prepare_that_is_not_repeated_is_given_up() -> None:
    part = Part(me=2)
    offered = plan(3, 1, 1, 2)
    part.take(PrepareReceived(node(1), offered))
    assert part.run(WITHDRAWN_S - 1) == []
    part.take(PrepareReceived(node(1), offered))
    assert part.run(WITHDRAWN_S - 1) == []
    assert part.run(2) == [CancelPrepare(offered.epoch)]


def test_an_older_commit_is_ignored_and_a_newer_one_ends_an_older_preparation() -> None:
    part = Part(me=2)
    part.take(PrepareReceived(node(1), plan(3, 1, 1, 2)))
    assert part.take(PlanReceived(node(3), plan(5, 3, 3))) == [
        CancelPrepare(Epoch(3, node(1))),
        Activate(plan(5, 3, 3), loaded=True),
    ]
    assert part.take(PlanReceived(node(3), plan(4, 3, 3))) == []
    assert part.take(PlanReceived(node(3), plan(5, 2, 3))) == [], "the same number of a lower proposer"
    assert part.take(PlanReceived(node(3), NO_PLAN)) == []


def test_a_commit_older_than_what_is_being_prepared_is_taken_and_the_preparation_goes_on() -> None:
    part = Part(me=2)
    newer = plan(6, 1, 1, 2)
    part.take(PrepareReceived(node(1), newer))
    part.take(PlanReceived(node(3), plan(5, 3, 3)))
    part.take(LocalPrepared(newer.epoch))
    assert part.take(PlanReceived(node(1), newer)) == [Activate(newer, loaded=True)]


def test_a_stage_of_a_plan_it_never_prepared_says_so_until_it_is_mended() -> None:
    part = Part(me=2)
    current = plan(5, 1, 1, 2)
    assert part.take(PlanReceived(node(3), current)) == [Activate(current, loaded=False)]
    assert not part.machine.loaded
    reports = sent(part.run(10), 1)
    assert len(reports) == 10 / REPORT_S
    assert {type(report) for report in reports} == {PrepareFailed}
    part.take(PrepareReceived(node(1), plan(6, 1, 1, 2)))
    assert sent(part.run(10), 1) == [], "help is on its way"


def test_a_part_that_broke_while_serving_is_reported() -> None:
    part = Part(me=2)
    part.take(PrepareReceived(node(1), plan(5, 1, 1, 2)))
    part.take(LocalPrepared(Epoch(5, node(1))))
    part.take(PlanReceived(node(1), plan(5, 1, 1, 2)))
    assert part.take(LocalStageBroken(Epoch(4, node(1)), "old news")) == []
    effects = part.take(LocalStageBroken(Epoch(5, node(1)), "device lost"))
    assert effects == [Send(node(1), PrepareFailed(Epoch(5, node(1)), "device lost"))]
    assert not part.machine.loaded


def test_our_own_part_that_broke_is_prepared_again() -> None:
    part = Part()
    old = part.serve()
    part.take(LocalStageBroken(old.epoch, "device lost"))
    assert part.machine.preparing is not None
    assert part.machine.preparing.stages == old.stages


# --- what peers may not send ----------------------------------------------------------------------------------------


def test_a_prepare_under_somebody_elses_epoch_is_refused() -> None:
    with pytest.raises(ProtocolError, match="bad prepare"):
        Part(me=2).take(PrepareReceived(node(3), plan(3, 1, 1, 2)))


def test_plans_that_make_no_sense_are_refused_and_change_nothing() -> None:
    part = Part(me=2)
    gap = replace(plan(3, 1, 1, 2), stages=plan(3, 1, 1, 2).stages[1:])
    for event in (PrepareReceived(node(1), gap), PlanReceived(node(1), gap)):
        with pytest.raises(ProtocolError, match="bad plan"):
            part.take(event)
    assert part.machine.plan == NO_PLAN
    assert part.machine.preparing is None
    part.machine.validate_state()


def test_a_long_reason_is_cut() -> None:
    part = Part(me=2)
    (text,) = notices(part.take(PrepareFailedReceived(node(3), Epoch(4, node(1)), "x" * 4000)))
    assert len(text) < 300


# --- the model ------------------------------------------------------------------------------------------------------


def test_the_leader_acquires_what_nobody_has_once() -> None:
    part = Part(model=None, model_name="")
    assert of(part.settle(), AcquireModel) == [AcquireModel("")]
    part.change(member(1, model=None, model_name="smol"))
    assert of(part.run(120), AcquireModel) == []
    part.change(member(1))
    part.run(SETTLE_S)
    assert part.machine.preparing is not None


def test_others_do_not_acquire() -> None:
    assert Part(me=2, model=None, model_name="").run(30) == []


def test_who_asked_for_a_model_acquires_it_without_leading() -> None:
    part = Part(me=2, model=None, model_name="")
    part.change(member(2, model=None, model_name="", wanted="big.gguf"))
    assert part.settle() == [AcquireModel("big.gguf")]


def test_a_failed_acquisition_is_told_and_tried_again_with_growing_pauses() -> None:
    part = Part(model=None, model_name="")
    part.settle()
    for attempt in range(3):
        (text,) = notices(part.take(AcquireFailed("no network.")))
        assert text.startswith("The model could not be had: no network.")
        pause = ACQUIRE_AGAIN_S * 2**attempt
        assert of(part.run(pause - 1), AcquireModel) == []
        assert of(part.run(2), AcquireModel) == [AcquireModel("")]


def test_a_manifest_the_leader_lacks_is_asked_of_the_holders() -> None:
    part = Part(model=None, model_name="")
    other = BlobId("b" * 64)
    part.change(member(3, model=other, model_name="big"))
    assert of(part.settle(), LearnModel) == [LearnModel(other, (node(3),))]
    assert len(of(part.run(2 * ASK_AGAIN_S), LearnModel)) == 2
    part.take(ModelKnown(replace(SHAPE, manifest=other)))
    part.run(SETTLE_S)
    assert part.machine.preparing is not None
    assert part.machine.preparing.model == other


def test_asking_for_another_model_than_the_swarms_is_answered_with_a_notice() -> None:
    part = Part(me=2)
    part.take(PlanReceived(node(1), plan(3, 1, 1, 3)))
    part.change(member(2, wanted="big.gguf"))
    (text,) = notices(part.settle())
    assert text.startswith("This swarm runs smol, not big.gguf.")
    part.change(member(2, wanted="big.gguf", version=2))
    assert part.settle() == []
