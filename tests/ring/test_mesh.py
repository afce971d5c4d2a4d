"""One link to each peer: which of two stays, what a slow or lost peer does, and what others notice of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from swarm.protocol.errors import LinkClosedError
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.messages import CloseSession, Message, Phase, Prepared, Progress, RowKind, Segment
from swarm.protocol.sampling import GREEDY
from swarm.ring.link import Link
from swarm.ring.memory_link import Network
from swarm.ring.mesh import MAX_OUTBOX, Mesh

pytestmark = pytest.mark.anyio

A, B, C = NodeId("a" * 32), NodeId("b" * 32), NodeId("c" * 32)
DEADLINE_S = 20.0


@dataclass
class Ear:
    """A `MeshListener` that notes what it is told. While `busy`, `received` does not return."""

    news: list[tuple[str, NodeId]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    trips: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    busy: bool = False
    changed: anyio.Event = field(default_factory=anyio.Event)

    def link_up(self, node: NodeId, name: str, dialled: str) -> None:
        self._note("up", node)

    def link_down(self, node: NodeId, reason: str) -> None:
        self.reasons.append(reason)
        self._note("down", node)

    def heard(self, node: NodeId, round_trip_ms: float | None) -> None:
        if round_trip_ms is not None:
            self.trips.append(round_trip_ms)
            self._stir()

    async def received(self, node: NodeId, message: Message) -> None:
        self.messages.append(message)
        self._stir()
        while self.busy:
            await self.changed.wait()

    def _note(self, what: str, node: NodeId) -> None:
        self.news.append((what, node))
        self._stir()

    def _stir(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def go_on(self) -> None:
        self.busy = False
        self._stir()

    async def until_messages(self, count: int) -> None:
        with anyio.fail_after(DEADLINE_S):
            while len(self.messages) < count:
                await self.changed.wait()


@dataclass
class Side:
    mesh: Mesh
    ear: Ear


def side(node: NodeId) -> Side:
    ear = Ear()
    return Side(Mesh(node, ear), ear)


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network() as network:
        yield network


@pytest.fixture
async def tasks() -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


def connect(tasks: TaskGroup, network: Network, dialler: Side, other: Side) -> tuple[Link, Link]:
    """`dialler` opens a link to `other`; both serve it from the next turn of the loop on."""
    ours, theirs = network.pair(dialler.mesh._me, other.mesh._me)
    tasks.start_soon(dialler.mesh.serve, ours, "memory")
    tasks.start_soon(other.mesh.serve, theirs)
    return ours, theirs


def numbered(number: int) -> Prepared:
    return Prepared(Epoch(number, A))


def rows(start: int) -> Segment:
    """256 KB."""
    values = np.zeros((64, 1024), "<f4")
    session = SessionId("a" * 8 + "-1-" + "b" * 8)
    return Segment(session, A, Epoch(1, A), 0, start, RowKind.PREFILL, tuple(range(64)), 0, GREEDY, values)


async def test_messages_come_with_their_sender(network: Network, tasks: TaskGroup) -> None:
    a, b = side(A), side(B)
    connect(tasks, network, a, b)
    await wait_all_tasks_blocked()
    a.mesh.post(B, numbered(1))
    await b.mesh.send(A, numbered(2))
    await a.ear.until_messages(1)
    await b.ear.until_messages(1)
    assert (a.ear.messages, b.ear.messages) == ([numbered(2)], [numbered(1)])
    assert (a.ear.news, b.ear.news) == ([("up", B)], [("up", A)])


@pytest.mark.parametrize("first", ["lower", "higher"])
async def test_of_two_links_dialled_at_once_both_keep_the_lower_ids(
    network: Network, tasks: TaskGroup, first: str
) -> None:
    a, b = side(A), side(B)
    if first == "lower":
        kept = connect(tasks, network, a, b)
        connect(tasks, network, b, a)
    else:
        connect(tasks, network, b, a)
        kept = connect(tasks, network, a, b)
    await wait_all_tasks_blocked()
    assert (a.mesh.link(B), b.mesh.link(A)) == kept
    assert (a.ear.news[-1], b.ear.news[-1]) == (("up", B), ("up", A))
    await a.mesh.send(B, numbered(1))
    await b.mesh.send(A, numbered(2))
    await a.ear.until_messages(1)
    await b.ear.until_messages(1)


async def test_of_two_links_the_other_end_may_see_them_in_another_order(network: Network, tasks: TaskGroup) -> None:
    a, b = side(A), side(B)
    ours, theirs = network.pair(A, B)
    back_theirs, back_ours = network.pair(B, A)
    tasks.start_soon(a.mesh.serve, ours, "memory")
    tasks.start_soon(b.mesh.serve, back_theirs, "memory")
    await wait_all_tasks_blocked()
    tasks.start_soon(a.mesh.serve, back_ours)
    tasks.start_soon(b.mesh.serve, theirs)
    await wait_all_tasks_blocked()
    assert (a.mesh.link(B), b.mesh.link(A)) == (ours, theirs)
    assert back_ours.closed
    assert back_theirs.closed
    assert a.ear.news == [("up", B)]
    assert b.ear.news == [("up", A), ("down", A), ("up", A)]


async def test_what_was_sent_on_the_link_that_went_is_made_good(network: Network, tasks: TaskGroup) -> None:
    a, b = side(A), side(B)
    connect(tasks, network, b, a)
    await wait_all_tasks_blocked()
    b.mesh.post(A, numbered(1))  # it may be queued on the old link, where it is lost
    connect(tasks, network, a, b)
    await wait_all_tasks_blocked()
    assert b.ear.news == [("up", A), ("down", A), ("up", A)]
    assert a.ear.news == [("up", B), ("down", B), ("up", B)]
    b.mesh.post(A, numbered(2))
    with anyio.fail_after(DEADLINE_S):
        while numbered(2) not in a.ear.messages:
            await a.ear.changed.wait()


async def test_a_peer_that_dials_again_has_lost_the_older_link(network: Network, tasks: TaskGroup) -> None:
    a, b = side(A), side(B)
    old, _ = connect(tasks, network, a, b)
    await wait_all_tasks_blocked()
    new, _ = connect(tasks, network, a, b)
    await wait_all_tasks_blocked()
    assert old.closed
    assert a.mesh.link(B) is new
    assert b.ear.news == [("up", A), ("down", A), ("up", A)]
    await a.mesh.send(B, numbered(3))
    await b.ear.until_messages(1)


async def test_a_lost_link_is_told_once_and_another_takes_its_place(network: Network, tasks: TaskGroup) -> None:
    a, b = side(A), side(B)
    ours, _ = connect(tasks, network, a, b)
    await wait_all_tasks_blocked()
    ours.abort("pulled the plug")
    await wait_all_tasks_blocked()
    assert b.ear.news == [("up", A), ("down", A)]
    assert a.mesh.nodes == b.mesh.nodes == []
    connect(tasks, network, b, a)
    await wait_all_tasks_blocked()
    assert b.ear.news[2:] == [("up", A)]
    assert b.mesh.nodes == [A]


async def test_heartbeats_measure_the_round_trip(tasks: TaskGroup) -> None:
    async with Network(delay_s=0.03) as network:
        a, b = side(A), side(B)
        connect(tasks, network, a, b)
        await wait_all_tasks_blocked()
        tasks.start_soon(a.mesh.run_heartbeats)
        with anyio.fail_after(DEADLINE_S):
            while not a.ear.trips:
                await a.ear.changed.wait()
        assert a.ear.trips[0] >= 60
        assert not b.ear.trips  # it asked nothing
        assert not a.ear.messages  # pings and pongs are the mesh's own


async def test_a_peer_that_does_not_read_loses_its_link_and_nobody_else(network: Network, tasks: TaskGroup) -> None:
    a, b, c = side(A), side(B), side(C)
    b.ear.busy = True
    ours, _ = connect(tasks, network, a, b)
    connect(tasks, network, a, c)
    await wait_all_tasks_blocked()
    posted = 0
    long = "x" * 4000
    while ours.closed is None:
        assert posted < 2000, "the outbox has no bound"
        a.mesh.post_all(Progress(A, Phase.FETCH, long, posted, 2000, 1.0))
        posted += 1
        for _ in range(10):
            await checkpoint()
    assert "does not read" in ours.closed
    assert posted > MAX_OUTBOX
    await c.ear.until_messages(posted)
    assert a.mesh.nodes == [C]


async def test_while_a_message_is_worked_on_the_link_is_not_read(network: Network, tasks: TaskGroup) -> None:
    a, b = side(A), side(B)
    b.ear.busy = True
    connect(tasks, network, a, b)
    await wait_all_tasks_blocked()
    sent = 0

    async def pump() -> None:
        nonlocal sent
        for start in range(200):
            await a.mesh.send(B, rows(start))
            sent += 1

    tasks.start_soon(pump)
    await wait_all_tasks_blocked()
    assert 0 < sent < 100, "a peer that works slowly makes nobody's memory grow"
    assert len(b.ear.messages) == 1
    b.ear.go_on()
    await b.ear.until_messages(200)
    assert [message.start for message in b.ear.messages if isinstance(message, Segment)] == list(range(200))


async def test_without_a_link(network: Network) -> None:
    a = side(A)
    a.mesh.post(B, numbered(1))
    with pytest.raises(LinkClosedError, match="no link"):
        await a.mesh.send(B, numbered(1))
    assert a.mesh.link(B) is None


async def test_goodbye_comes_after_what_was_posted(network: Network, tasks: TaskGroup) -> None:
    a, b, c = side(A), side(B), side(C)
    connect(tasks, network, a, b)
    connect(tasks, network, c, a)
    await wait_all_tasks_blocked()
    for number in range(10):
        a.mesh.post_all(CloseSession(SessionId(f"{'a' * 8}-{number}-{'b' * 8}")))
    with anyio.fail_after(DEADLINE_S):
        await a.mesh.close("it was stopped")
    await wait_all_tasks_blocked()
    for other in (b, c):
        assert len(other.ear.messages) == 10
        assert "it was stopped" in other.ear.reasons[0]
        assert other.mesh.nodes == []
