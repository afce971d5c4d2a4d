"""The link itself (lanes, bounds, endings) over in-process channels, and the network that makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import anyio
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked

from swarm.protocol.codec import encode
from swarm.protocol.errors import HandshakeError, LinkClosedError
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.limits import MAX_INFLIGHT_FRAMES
from swarm.protocol.messages import Goodbye, Members, Message, Ping, Pong, Prepared, RowKind, Segment, Welcome
from swarm.protocol.plan import NO_PLAN
from swarm.protocol.sampling import GREEDY
from swarm.ring import link as link_module
from swarm.ring.link import FramedLink, Link
from swarm.ring.memory_link import BUFFER_BYTES, Network

pytestmark = pytest.mark.anyio

A, B, C = NodeId("a" * 32), NodeId("b" * 32), NodeId("c" * 32)
EPOCH = Epoch(1, A)


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network() as network:
        yield network


def segment(start: int, rows: int = 64, hidden: int = 1024) -> Segment:
    values = np.full((rows, hidden), start, dtype="<f4")
    return Segment(
        SessionId("a" * 8 + "-1-" + "b" * 8), A, EPOCH, 0, start, RowKind.PREFILL, tuple(range(rows)), 0, GREEDY, values
    )


async def receive_all(link: Link) -> tuple[list[Message], str]:
    """Everything until the link closes, and the reason."""
    messages = []
    while True:
        try:
            messages.append(await link.receive())
        except LinkClosedError as error:
            return messages, str(error)


async def fill(link: Link) -> int:
    """Send segments until `send` waits; how many were accepted."""
    accepted = 0

    async def pump() -> None:
        nonlocal accepted
        while True:
            await link.send(segment(accepted))
            accepted += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    return accepted


async def test_messages_arrive_as_they_were_sent(network: Network) -> None:
    a, b = network.pair(A, B)
    assert (a.peer, b.peer) == (B, A)
    sent = segment(7)
    await a.send(sent)
    await b.send(Pong(9))
    got = await b.receive()
    assert isinstance(got, Segment)
    assert got.tokens == sent.tokens
    assert got.hidden is not None
    np.testing.assert_array_equal(got.hidden, sent.hidden)
    assert await a.receive() == Pong(9)


async def test_one_lane_keeps_its_order(network: Network) -> None:
    a, b = network.pair(A, B)
    for start in range(20):
        await a.send(segment(start, rows=1, hidden=8))
    assert [(await b.receive()).start for _ in range(20)] == list(range(20))  # type: ignore[union-attr]


async def test_a_slow_reader_makes_the_sender_wait(network: Network) -> None:
    a, b = network.pair(A, B)
    accepted = await fill(a)
    bytes_each = 64 * 1024 * 4
    queued = MAX_INFLIGHT_FRAMES // 2  # a header and a tensor each
    assert queued <= accepted <= queued + BUFFER_BYTES // bytes_each + 2
    # Nothing is lost, and the send that was cancelled while it waited left nothing behind.
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(a.close, "done")
        messages, _ = await receive_all(b)
    assert [m.start for m in messages] == list(range(accepted))  # type: ignore[union-attr]


@pytest.mark.parametrize("control", [Ping(1), Prepared(EPOCH), Members((), NO_PLAN)])
async def test_control_overtakes_hidden_rows(network: Network, control: Message) -> None:
    a, b = network.pair(A, B)
    accepted = await fill(a)
    with anyio.fail_after(5):
        await a.send(control)  # at once, though the other lane is full
    before = 0
    while await b.receive() != control:
        before += 1
    assert before <= BUFFER_BYTES // (64 * 1024 * 4) + 2 < accepted


async def test_the_control_lane_is_bounded_too(network: Network) -> None:
    a, _ = network.pair(A, B)
    await fill(a)
    accepted = 0
    with anyio.move_on_after(0.2):
        while True:
            await a.send(Ping(accepted))
            accepted += 1
    assert accepted == MAX_INFLIGHT_FRAMES


async def test_a_message_over_our_own_limits_harms_nothing(network: Network) -> None:
    a, b = network.pair(A, B)
    with pytest.raises(ValueError, match="cannot be sent"):
        await a.send(Segment(SessionId(""), A, EPOCH, 0, 0, RowKind.DECODE, (), 0, GREEDY, np.zeros(2, "f8")))
    await a.send(Ping(1))
    assert await b.receive() == Ping(1)


@pytest.mark.parametrize("retry", [True, False])
async def test_close_sends_what_is_queued_and_says_why(network: Network, retry: bool) -> None:
    a, b = network.pair(A, B)
    for start in range(5):
        await a.send(segment(start))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(a.close, "going home", retry=retry))
        messages, reason = await receive_all(b)
    assert len(messages) == 5
    assert "going home" in reason
    assert (b.retry, b.closed is not None, a.closed) == (retry, True, "going home")
    for link in (a, b):
        with pytest.raises(LinkClosedError, match="going home"):
            await link.send(Ping(1))
        with pytest.raises(LinkClosedError, match="going home"):
            await link.receive()
    await a.close("again")
    assert a.closed == "going home"


async def test_close_wakes_our_own_reader_and_waiting_senders(network: Network) -> None:
    a, b = network.pair(A, B)
    await fill(a)
    reasons = []

    async def read() -> None:
        reasons.append((await receive_all(a))[1])

    async def write() -> None:
        with pytest.raises(LinkClosedError, match="bye"):
            await a.send(segment(0))
        reasons.append("send")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        await wait_all_tasks_blocked()
        tasks.start_soon(a.close, "bye")
        tasks.start_soon(receive_all, b)
    assert sorted(reasons) == ["bye", "send"]


async def test_abort_is_noticed_at_once(network: Network) -> None:
    a, b = network.pair(A, B)
    reasons = []

    async def read(link: Link) -> None:
        reasons.append((await receive_all(link))[1])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, a)
        tasks.start_soon(read, b)
        await wait_all_tasks_blocked()
        a.abort("crash")
    assert sorted(reasons) == ["connection lost", "crash"]


async def test_a_peer_that_takes_nothing_is_dropped(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "LINK_SEND_TIMEOUT_S", 0.1)
    a, _ = network.pair(A, B)

    async def pump() -> None:
        while True:
            await a.send(segment(0))

    with pytest.raises(LinkClosedError, match=r"took no data for 0\.1 s"):
        await pump()


async def test_close_does_not_wait_for_ever(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = network.pair(A, B)
    await fill(a)
    monkeypatch.setattr(link_module, "LINK_SEND_TIMEOUT_S", 0.1)
    with anyio.fail_after(5):
        await a.close("bye")


async def test_a_cancelled_close_still_ends_the_link(network: Network) -> None:
    a, b = network.pair(A, B)
    await fill(a)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(a.close, "bye")
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    _, reason = await receive_all(b)
    assert "bye" in reason


@pytest.mark.parametrize(
    "frames",
    [[b"\xff"], [b""], [b"\x00" * 300_000], encode(Welcome(b"late")), [*encode(segment(0))[:1], b"short"]],
)
async def test_who_breaks_the_protocol_is_told_and_dropped(network: Network, frames: list[bytes]) -> None:
    a, b = network.pair(A, B)
    c, b_of_c = network.pair(C, B)
    assert isinstance(a, FramedLink)
    for frame in frames:
        await a._channel.write(frame)
    with pytest.raises(LinkClosedError, match="broke the protocol"):
        await b.receive()
    goodbye = link_module.Decoder().feed(await a._channel.read())
    assert isinstance(goodbye, Goodbye)
    assert goodbye.retry
    await c.send(Ping(1))
    assert await b_of_c.receive() == Ping(1)


async def test_frames_come_out_when_their_delay_is_over(network: Network) -> None:
    network.set_delay(A, B, 0.15)
    a, b = network.pair(A, B)
    clock = asyncio.get_running_loop()
    sent_at = clock.time()
    await a.send(Ping(1))
    await a.send(Ping(2))
    await wait_all_tasks_blocked()
    network.set_delay(A, B, 0.0)
    await a.send(Ping(3))
    assert [await b.receive() for _ in range(3)] == [Ping(1), Ping(2), Ping(3)]
    assert clock.time() - sent_at >= 0.15


async def test_a_partition_holds_frames_until_it_heals(network: Network) -> None:
    a, b = network.pair(A, B)
    a_c, c = network.pair(A, C)
    network.partition({A}, {B})
    await a.send(Ping(1))
    await a_c.send(Ping(2))
    assert await c.receive() == Ping(2)
    got: list[Message] = []

    async def read() -> None:
        got.append(await b.receive())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await wait_all_tasks_blocked()
        assert got == []
        network.heal()
    assert got == [Ping(1)]


async def test_drop_breaks_the_links_of_a_pair_or_of_a_node(network: Network) -> None:
    (ab, _), (ac, _), (bc, _) = network.pair(A, B), network.pair(A, C), network.pair(B, C)
    network.drop(A, B)
    assert (ab.closed, ac.closed, bc.closed) == ("connection lost", None, None)
    network.drop(C)
    assert ac.closed
    assert bc.closed
    with pytest.raises(LinkClosedError):
        await ac.receive()


async def test_dialling(network: Network) -> None:
    accepted: list[Link] = []

    async def on_link(link: Link) -> None:
        accepted.append(link)
        await receive_all(link)

    network.listen(B, "bob", "bob:1", on_link)
    ours = await network.dial(A, "alice", "bob:1", B)
    await ours.send(Ping(1))
    await wait_all_tasks_blocked()
    assert (ours.peer, ours.peer_name, ours.peer_address) == (B, "bob", "bob:1")
    assert (accepted[0].peer, accepted[0].peer_name) == (A, "alice")
    for attempt, error in (
        ((A, "alice", "nobody:1"), LinkClosedError),
        ((A, "alice", "bob:1", C), HandshakeError),
        ((B, "bob", "bob:1"), HandshakeError),
    ):
        with pytest.raises(error):
            await network.dial(*attempt)
    network.partition({A}, {B})
    with pytest.raises(LinkClosedError):
        await network.dial(A, "alice", "bob:1")
    network.heal()
    network.silence(B)
    with pytest.raises(LinkClosedError):
        await network.dial(A, "alice", "bob:1")
