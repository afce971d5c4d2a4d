"""The outbox: order for each destination, bounds, and nobody waits for another."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio
import pytest

from swarm.protocol.errors import DeadlineError, LinkClosedError, SwarmError
from swarm.protocol.ids import NodeId, SessionId
from swarm.protocol.messages import CloseSession, Message
from swarm.ring.outbox import Outbox

pytestmark = pytest.mark.anyio

NEAR, SLOW = NodeId("a" * 32), NodeId("b" * 32)


def letter(number: int) -> CloseSession:
    return CloseSession(SessionId(f"aaaaaaaa-{number:x}-00000000"))


class Network:
    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, Message]] = []
        self.lost: list[tuple[NodeId, Message, str]] = []
        self.held: dict[NodeId, anyio.Event] = {}
        self.gone: dict[NodeId, SwarmError] = {}

    async def send(self, to: NodeId, message: Message) -> None:
        if to in self.held:
            await self.held[to].wait()
        if to in self.gone:
            raise self.gone[to]
        self.sent.append((to, message))

    def note(self, to: NodeId, message: Message, reason: str) -> None:
        self.lost.append((to, message, reason))


@contextlib.asynccontextmanager
async def running(network: Network, limit: int = 4) -> AsyncIterator[Outbox]:
    outbox = Outbox(network.send, network.note, limit)
    async with anyio.create_task_group() as group:
        group.start_soon(outbox.run)
        await anyio.wait_all_tasks_blocked()
        yield outbox
        group.cancel_scope.cancel()


async def test_messages_to_one_node_stay_in_order() -> None:
    network = Network()
    async with running(network) as outbox:
        for number in range(4):
            assert outbox.post(NEAR, letter(number))
        await anyio.wait_all_tasks_blocked()
    assert network.sent == [(NEAR, letter(number)) for number in range(4)]


async def test_what_is_posted_before_it_runs_is_sent() -> None:
    network = Network()
    outbox = Outbox(network.send, network.note)
    outbox.post(NEAR, letter(1))
    async with anyio.create_task_group() as group:
        group.start_soon(outbox.run)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert network.sent == [(NEAR, letter(1))]


async def test_nobody_waits_for_a_slow_one() -> None:
    network = Network()
    network.held[SLOW] = anyio.Event()
    async with running(network) as outbox:
        outbox.post(SLOW, letter(1))
        await anyio.wait_all_tasks_blocked()
        for number in range(3):
            outbox.post(NEAR, letter(number))
        await anyio.wait_all_tasks_blocked()
        assert [to for to, _ in network.sent] == [NEAR] * 3
        network.held[SLOW].set()
        await anyio.wait_all_tasks_blocked()
    assert network.sent[-1] == (SLOW, letter(1))


async def test_a_full_queue_takes_no_more_and_who_waits_for_room_gets_it() -> None:
    network = Network()
    network.held[SLOW] = anyio.Event()
    waited = anyio.Event()

    async with running(network, limit=2) as outbox, anyio.create_task_group() as group:

        async def wait() -> None:
            await outbox.wait_for_room(SLOW)
            waited.set()

        outbox.post(SLOW, letter(0))
        await anyio.wait_all_tasks_blocked()
        assert outbox.post(SLOW, letter(1))
        assert outbox.post(SLOW, letter(2))
        assert not outbox.post(SLOW, letter(3))
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not waited.is_set()
        network.held[SLOW].set()
        await anyio.wait_all_tasks_blocked()
        assert waited.is_set()
    assert network.sent == [(SLOW, letter(number)) for number in range(3)]


@pytest.mark.parametrize("error", [LinkClosedError("cut"), DeadlineError("slow")])
async def test_every_message_to_a_lost_node_is_told_of_and_a_new_link_begins_anew(error: SwarmError) -> None:
    network = Network()
    network.gone[SLOW] = error
    async with running(network) as outbox:
        outbox.post(SLOW, letter(1))
        outbox.post(SLOW, letter(2))
        await anyio.wait_all_tasks_blocked()
        assert [(to, message) for to, message, _ in network.lost] == [(SLOW, letter(1)), (SLOW, letter(2))]
        assert str(error) in network.lost[0][2]
        del network.gone[SLOW]
        outbox.post(SLOW, letter(3))
        await anyio.wait_all_tasks_blocked()
    assert network.sent == [(SLOW, letter(3))]


async def test_who_waits_for_room_goes_on_when_the_node_is_lost() -> None:
    network = Network()
    network.held[SLOW] = anyio.Event()
    network.gone[SLOW] = LinkClosedError("cut")
    async with running(network, limit=1) as outbox, anyio.create_task_group() as group:
        outbox.post(SLOW, letter(0))
        await anyio.wait_all_tasks_blocked()
        outbox.post(SLOW, letter(1))
        group.start_soon(outbox.wait_for_room, SLOW)
        await anyio.wait_all_tasks_blocked()
        network.held[SLOW].set()
    assert len(network.lost) == 2
