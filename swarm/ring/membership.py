"""Who is in the swarm: memberlist's terms on a full mesh of links; sans-I/O.

Every node keeps one record per member, written by that member alone: of two records the higher (incarnation, version)
wins. Others may add a judgement to a record, suspect or dead; a node that hears itself judged raises its version, and
the newer record sweeps the judgement away. Dead is dead until then, and a restart is the same node with a higher
incarnation, never a ghost beside itself.

Three ways for a record to travel: a node's own goes to all its links at once; news of others goes to a few random
links, who pass it on; every `SYNC_INTERVAL_S` a view goes to one random link and mends what was lost. A view says
only what its sender hears itself, so nobody lives on hearsay of hearsay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

from swarm.protocol import limits
from swarm.protocol.errors import ProtocolError
from swarm.protocol.ids import NodeId
from swarm.protocol.messages import Member, MemberState
from swarm.ring.dialling import DialBook
from swarm.ring.events import (
    CloseLink,
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

LOST_LINK_GRACE_S = 2.0
"""From a closed link to dead. A process that ends closes its links at once; a link that broke alone is dialled again,
or refuted by way of others, well within this."""

HEARSAY_S = 2 * limits.DEAD_AFTER_S
"""A member without a link here lives this long after somebody who hears it said so; views come about every
`SYNC_INTERVAL_S`, so some ten must be missed."""

FORGET_DEAD_S = 600.0
"""Dead members are shown, and dialled now and then, for this long: a partition that heals later needs discovery."""

FORGET_LEFT_S = 60.0
"""Members that left are shown for this long; it outlasts every record of them still under way."""

SYNC_INTERVAL_S = 2.0
"""Between two views sent to a random member. 200 members: 25 KB a second out, the same in."""

GOSSIP_FANOUT = 3
"""News of others goes to so many links; with everybody passing it on, 200 nodes have it after five hops."""

FLUSH_INTERVAL_S = 0.2
"""News within this time travels together. The first after a quiet time goes at once."""

REMIND_INTERVAL_S = 1.0
"""A member that talks to us but is judged suspect or dead here is told so this often, until it refutes."""

ROUND_TRIPS_KEPT = 60
"""Round trips of a link, one a second, of which the least counts: a busy core or event loop only ever adds to one."""

ROUND_TRIPS_NEEDED = 20
"""Before that many the link counts as one of a LAN: while PCs fetch and compile, the first round trips are those of
busy cores, and a plan made of them is a worse guess than none."""

ROUND_TRIP_CHECK_S = 5.0
"""How often a node looks whether its published round trip still holds."""

ROUND_TRIP_CHANGE = 0.25
"""Share, above one millisecond, by which the round trip must have moved to be published again."""

MAX_ADDRESSES = 16
"""Of one member: a few cards, each with an IPv4 and some IPv6 addresses."""

MAX_COUNT = 2**48
"""Incarnations and versions stay below; no honest node gets here."""

_JUDGEMENT = {
    MemberState.ALIVE: 0,
    MemberState.LEAVING: 0,
    MemberState.SUSPECT: 1,
    MemberState.DEAD: 2,
    MemberState.LEFT: 3,
}
"""Of two records with one (incarnation, version) the worse judgement wins."""

LIVING = frozenset({MemberState.ALIVE, MemberState.SUSPECT, MemberState.LEAVING})


@dataclass(slots=True)
class _Link:
    heard_at: float
    closing: bool = False
    """Silent too long; we asked for it to be closed."""
    round_trips: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Peer:
    record: Member
    evidence_at: float
    """Where there is no link: since when there is none, or when somebody who hears it last said so."""
    link_lost: bool = False
    """There was a link, it closed, and no newer record came since."""
    ended_at: float = 0.0
    """Dead or left since."""
    reminded_at: float = 0.0


class Membership:
    """One node's view. `handle` is the only way in; effects are carried out by the shell, in order."""

    def __init__(self, me: Member, random: Random) -> None:
        self._me = me
        self._random = random
        self._peers: dict[NodeId, _Peer] = {}
        self._links: dict[NodeId, _Link] = {}
        self._dials = DialBook(me.node, random)
        self._news: set[NodeId] = set()
        self._changed = False
        self._flushed_at = float("-inf")
        self._synced_at = float("-inf")
        self._round_trip_checked_at = float("-inf")
        self._last_claim_at = float("-inf")
        self._full_told = False
        self._effects: list[MembershipEffect] = []

    @property
    def me(self) -> Member:
        """Our own record."""
        return self._me

    @property
    def members(self) -> tuple[Member, ...]:
        records = [self._me, *(peer.record for peer in self._peers.values())]
        return tuple(sorted(records, key=lambda record: record.node))

    @property
    def linked(self) -> frozenset[NodeId]:
        return frozenset(self._links)

    def round_trip_ms(self, node: NodeId) -> float | None:
        """Least of the last few to `node`; None where there is no link or no pong yet."""
        link = self._links.get(node)
        return min(link.round_trips) if link and link.round_trips else None

    def handle(self, event: MembershipEvent, now: float) -> list[MembershipEffect]:
        """`now` in seconds of any clock that only goes forward. Raises `ProtocolError` for a record from a peer that
        makes no sense, with nothing changed."""
        self._take(event, now)
        if (self._news or self._changed) and now - self._flushed_at >= FLUSH_INTERVAL_S:
            self._flush(now)
        effects, self._effects = self._effects, []
        return effects

    def _take(self, event: MembershipEvent, now: float) -> None:
        match event:
            case Heard():
                self._heard(event, now)
            case MembersReceived():
                self._members_received(event, now)
            case Tick():
                self._tick(now)
            case LinkUp():
                self._link_up(event, now)
            case LinkDown():
                self._link_down(event, now)
            case DialFailed():
                if event.answered is not None and event.answered in self._links:
                    self._dials.connected(event.answered, event.address)
                else:
                    self._dials.failed(event.address, event.node, event.retry, now)
            case PeerFound():
                if event.node != self._me.node and event.address not in self._me.addresses:
                    self._dials.found(event.address, event.node, now)
            case PeerLost():
                self._dials.lost(event.address)
            case LocalChange():
                self._local_change(event)

    # --- links ------------------------------------------------------------------------------------------------------

    def _link_up(self, event: LinkUp, now: float) -> None:
        if event.node == self._me.node:
            self._claimed("Another PC uses this node's id")
            return
        self._links[event.node] = _Link(now)
        self._dials.connected(event.node, event.address)
        peer = self._peers.get(event.node)
        known = peer is not None and peer.record.state is MemberState.ALIVE
        self._effects.append(Share((event.node,), (self._me,) if known else self._view()))

    def _link_down(self, event: LinkDown, now: float) -> None:
        if self._links.pop(event.node, None) is None:
            return
        self._dials.disconnected(event.node, now)
        peer = self._peers.get(event.node)
        if peer is None or peer.record.state not in LIVING:
            return
        peer.evidence_at, peer.link_lost = now, True
        self._judge(peer, MemberState.SUSPECT, now)

    def _heard(self, event: Heard, now: float) -> None:
        link = self._links.get(event.node)
        if link is None:
            return
        link.heard_at = now
        if event.round_trip_ms is not None:
            link.round_trips.append(event.round_trip_ms)
            del link.round_trips[:-ROUND_TRIPS_KEPT]

    # --- records ----------------------------------------------------------------------------------------------------

    def _members_received(self, event: MembersReceived, now: float) -> None:
        for record in event.members:
            peer = self._peers.get(record.node)
            if peer is None or peer.record is not record:
                _check(record)
        self._heard(Heard(event.sender), now)
        for record in event.members:
            if record.node == self._me.node:
                self._about_me(record, now)
            else:
                self._about(record, event.sender, now)

    def _about(self, record: Member, sender: NodeId, now: float) -> None:
        peer = self._peers.get(record.node)
        if peer is None:
            self._meet(record, now)
            return
        current = peer.record
        if record is current and record.state is MemberState.ALIVE:
            peer.evidence_at = now
            return
        newer, same = _age(record) > _age(current), _age(record) == _age(current)
        worse = same and _JUDGEMENT[record.state] > _JUDGEMENT[current.state]
        judged = record.state in (MemberState.SUSPECT, MemberState.DEAD)
        if (newer or worse) and judged and self._hears(record.node, now):
            # Our own ears say otherwise. Only the member itself can say so to everybody: let it know.
            self._effects.append(Share((record.node,), (record,)))
        elif newer:
            self._renew(peer, record, now)
        elif worse:
            self._judge(peer, record.state, now)
        elif same and _JUDGEMENT[record.state] == _JUDGEMENT[current.state] == 0:
            peer.evidence_at = now

    def _meet(self, record: Member, now: float) -> None:
        if record.state not in LIVING:
            return
        if len(self._peers) + 1 >= limits.MAX_MEMBERS:
            if not self._full_told:
                text = f"The swarm is full: {limits.MAX_MEMBERS} PCs. {record.name} and further ones are left out."
                self._effects.append(Notice(text))
            self._full_told = True
            return
        self._peers[record.node] = _Peer(record, evidence_at=now)
        self._dials.met(record.node, record.addresses, now)
        self._news.add(record.node)

    def _renew(self, peer: _Peer, record: Member, now: float) -> None:
        if peer.record.addresses != record.addresses or peer.record.state not in LIVING:
            self._dials.met(record.node, record.addresses, now)
        peer.record = record
        peer.evidence_at, peer.link_lost = now, False
        if record.state not in LIVING:
            peer.ended_at = now
        self._news.add(record.node)

    def _judge(self, peer: _Peer, state: MemberState, now: float) -> None:
        peer.record = replace(peer.record, state=state)
        if state not in LIVING:
            peer.ended_at = now
        self._news.add(peer.record.node)

    def _about_me(self, record: Member, now: float) -> None:
        mine, theirs = _age(self._me), _age(record)
        if theirs < mine or self._me.state is MemberState.LEFT:
            return
        same = (record.name, record.addresses) == (self._me.name, self._me.addresses)
        if theirs == mine and same and _JUDGEMENT[record.state] == 0:
            return
        if not same and record.incarnation == self._me.incarnation and record.name != self._me.name:
            self._claimed(f"{record.name} uses this node's id")
        if theirs > mine:
            # Our count was lost, or a copy of us runs. Two copies would outbid each other for ever: not too fast.
            if now - self._last_claim_at < REMIND_INTERVAL_S:
                return
            self._last_claim_at = now
            if record.incarnation > self._me.incarnation:
                self._effects.append(KeepIncarnation(record.incarnation))
        self._me = replace(self._me, incarnation=record.incarnation, version=record.version)
        self._publish()

    def _claimed(self, what: str) -> None:
        text = f"{what}. Was a home folder copied? Give each PC its own --home, or delete the identity in one of them."
        self._effects.append(Notice(text))

    def _local_change(self, event: LocalChange) -> None:
        mine = self._me
        wanted = replace(
            event.record,
            node=mine.node,
            incarnation=mine.incarnation,
            version=mine.version,
            round_trip_ms=mine.round_trip_ms,
        )
        if wanted != mine:
            self._me = wanted
            self._publish()

    def _publish(self) -> None:
        """A newer record of ourselves, to everybody at once."""
        self._me = replace(self._me, version=self._me.version + 1)
        self._changed = True
        if self._links:
            self._effects.append(Share(tuple(self._links), (self._me,)))

    # --- time -------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for node, peer in list(self._peers.items()):
            state = peer.record.state
            hears = self._hears(node, now)
            if hears and state is MemberState.ALIVE:
                continue
            if state in LIVING:
                self._watch(node, peer, now)
            elif now - peer.ended_at >= (FORGET_LEFT_S if state is MemberState.LEFT else FORGET_DEAD_S):
                self._forget(node)
            if hears and peer.record.state in (MemberState.SUSPECT, MemberState.DEAD):
                self._remind(node, peer, now)
        for node, link in self._links.items():
            silence = now - link.heard_at
            if silence >= limits.DEAD_AFTER_S and not link.closing:
                link.closing = True
                self._effects.append(CloseLink(node, f"silent for {silence:.0f} s"))
        self._measure(now)
        self._sync(now)
        left = {node for node, peer in self._peers.items() if peer.record.state is MemberState.LEFT}
        self._effects += self._dials.due(now, self._links.keys() | left)

    def _forget(self, node: NodeId) -> None:
        del self._peers[node]
        self._dials.forgotten(node)
        self._changed = True

    def _watch(self, node: NodeId, peer: _Peer, now: float) -> None:
        """Suspect and dead by silence on a link, or by the lack of one."""
        link = self._links.get(node)
        if link is not None:
            silence, suspect_after, dead_after = now - link.heard_at, limits.SUSPECT_AFTER_S, limits.DEAD_AFTER_S
        elif peer.link_lost:
            silence, suspect_after, dead_after = now - peer.evidence_at, 0.0, LOST_LINK_GRACE_S
        else:
            silence, suspect_after, dead_after = now - peer.evidence_at, limits.DEAD_AFTER_S, HEARSAY_S
        if silence >= dead_after:
            self._judge(peer, MemberState.DEAD, now)
        elif silence >= suspect_after and peer.record.state is not MemberState.SUSPECT:
            self._judge(peer, MemberState.SUSPECT, now)

    def _hears(self, node: NodeId, now: float) -> bool:
        link = self._links.get(node)
        return link is not None and now - link.heard_at < limits.SUSPECT_AFTER_S

    def _remind(self, node: NodeId, peer: _Peer, now: float) -> None:
        if now - peer.reminded_at >= REMIND_INTERVAL_S:
            peer.reminded_at = now
            self._effects.append(Share((node,), (peer.record,)))

    def _measure(self, now: float) -> None:
        if now - self._round_trip_checked_at < ROUND_TRIP_CHECK_S:
            return
        self._round_trip_checked_at = now
        known = [min(link.round_trips) for link in self._links.values() if len(link.round_trips) >= ROUND_TRIPS_NEEDED]
        if not known:
            return
        old, new = self._me.round_trip_ms, median(known)
        if old == 0 or abs(new - old) > max(1.0, ROUND_TRIP_CHANGE * old):
            self._me = replace(self._me, round_trip_ms=round(new, 3))
            self._publish()

    def _sync(self, now: float) -> None:
        if self._links and now - self._synced_at >= SYNC_INTERVAL_S:
            self._synced_at = now
            self._effects.append(Share((self._random.choice(list(self._links)),), self._view()))

    def _view(self) -> tuple[Member, ...]:
        """What we can vouch for: ourselves, whom we hear, and who is suspect or gone."""
        return (
            self._me,
            *(
                peer.record
                for node, peer in self._peers.items()
                if node in self._links or _JUDGEMENT[peer.record.state] > 0
            ),
        )

    def _flush(self, now: float) -> None:
        self._flushed_at, self._changed = now, False
        news = [self._peers[node].record for node in sorted(self._news) if node in self._peers]
        self._news.clear()
        targets = self._random.sample(list(self._links), min(GOSSIP_FANOUT, len(self._links)))
        if news and targets:
            self._effects.append(Share(tuple(targets), tuple(news)))
        self._effects.append(MembershipChanged(self.members))

    def validate_state(self) -> None:
        """Raises ``AssertionError`` where the state contradicts itself; for tests."""
        me = self._me.node
        assert me not in self._peers, "a peer with our own id"
        assert me not in self._links, "a link to ourselves"
        assert len(self._peers) < limits.MAX_MEMBERS, "more members than allowed"
        assert self._me.state not in (MemberState.SUSPECT, MemberState.DEAD), "we judged ourselves"
        assert not self._effects, "effects left behind"
        for node, peer in self._peers.items():
            assert peer.record.node == node, "a record under another's id"
        self._dials.validate_state()


def _age(record: Member) -> tuple[int, int]:
    return record.incarnation, record.version


def _check(record: Member) -> None:
    problem = ""
    if not 0 <= record.incarnation < MAX_COUNT or not 0 <= record.version < MAX_COUNT:
        problem = f"incarnation {record.incarnation}, version {record.version}"
    elif not 0 < len(record.name) <= limits.MAX_NAME_CHARS:
        problem = f"a name of {len(record.name)} characters"
    elif len(record.addresses) > MAX_ADDRESSES:
        problem = f"{len(record.addresses)} addresses"
    elif record.memory_bytes < 0 or record.speed < 0 or record.round_trip_ms < 0:
        problem = "a negative size"
    if problem:
        raise ProtocolError("bad member record", expected="what a node says of itself", found=problem)
