"""Links inside one process, through the real codec, with delay, loss and partition: for tests and simulation.

A `Network` stands for the LAN. Frames carry a release time on the event loop's clock, so the order of events depends on
the delays alone. As with TCP, nothing is lost or reordered on a link that is up: a partition holds frames back until it
heals, and only `drop` breaks links.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType

import anyio
from anyio.abc import TaskGroup

from swarm.protocol.codec import Buffer
from swarm.protocol.errors import HandshakeError, LinkClosedError
from swarm.protocol.ids import NodeId
from swarm.ring.handshake import Peer
from swarm.ring.link import FramedLink, Link

BUFFER_BYTES = 1024 * 1024
"""Frames on the way to one reader before a writer waits, as a socket's buffers hold."""


class _Pipe:
    """One direction of a connection."""

    def __init__(self, delay: Callable[[], float], cut: Callable[[], bool]) -> None:
        self._delay = delay
        self._cut = cut
        self._frames: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._last_release = 0.0
        self._closed = False
        self._changed = asyncio.Event()

    async def put(self, frame: Buffer) -> None:
        while self._bytes >= BUFFER_BYTES and not self._closed:
            await self._next_change()
        if self._closed:
            raise LinkClosedError("connection lost")
        release = max(self._last_release, asyncio.get_running_loop().time() + self._delay())
        self._last_release = release
        # Bytes, as off a socket: what the sender does to its tensors later must not show.
        self._frames.append((release, bytes(frame)))
        self._bytes += len(frame)
        self.changed()

    async def get(self) -> bytes:
        loop = asyncio.get_running_loop()
        while True:
            if self._frames and not self._cut():
                wait = self._frames[0][0] - loop.time()
                if wait <= 0:
                    _, frame = self._frames.popleft()
                    self._bytes -= len(frame)
                    self.changed()
                    return frame
                with anyio.move_on_after(wait):
                    await self._next_change()
                continue
            if self._closed:
                raise LinkClosedError("connection lost")
            await self._next_change()

    def close(self, *, lose: bool) -> None:
        """No more frames; with `lose`, those on the way are gone too."""
        self._closed = True
        if lose:
            self._frames.clear()
            self._bytes = 0
        self.changed()

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()


class MemoryChannel:
    """One end of a connection; a `link.Channel`."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def write(self, frame: Buffer) -> None:
        await self._outgoing.put(frame)

    async def read(self) -> Buffer:
        return await self._incoming.get()

    async def aclose(self) -> None:
        self._outgoing.close(lose=False)

    def abort(self) -> None:
        self._outgoing.close(lose=False)
        self._incoming.close(lose=True)


@dataclass(frozen=True, slots=True)
class _Host:
    peer: Peer
    address: str
    accept: Callable[[Link], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Wire:
    """A connection of two nodes and the links at its ends."""

    nodes: frozenset[NodeId]
    pipes: tuple[_Pipe, _Pipe]
    links: tuple[FramedLink, FramedLink]


class Network:
    """A LAN in memory. Use as ``async with``; at its end every link is aborted.

    Two ways in: `pair` for two links, or `listen` and `dial`, which look like `websocket.LinkServer` and
    `websocket.dial` to a ring.
    """

    def __init__(self, *, delay_s: float = 0.0) -> None:
        """`delay_s`: one way, for pairs that `set_delay` says nothing of."""
        self._default_delay = delay_s
        self._delays: dict[frozenset[NodeId], float] = {}
        self._cuts: set[frozenset[NodeId]] = set()
        self._wires: list[_Wire] = []
        self._hosts: dict[str, _Host] = {}
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Network:
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        for wire in self._wires:
            for link in wire.links:
                link.abort("the network is gone")
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        return await self._stack.__aexit__(kind, error, trace)

    def set_delay(self, a: NodeId, b: NodeId, delay_s: float) -> None:
        """One way, both ways alike, for frames sent from now on."""
        self._delays[frozenset((a, b))] = delay_s

    def partition(self, one: Iterable[NodeId], other: Iterable[NodeId]) -> None:
        """Nothing passes between the two sides until `heal`: frames wait, dialling fails."""
        others = tuple(other)
        self._cuts |= {frozenset((a, b)) for a in one for b in others}

    def heal(self) -> None:
        """All partitions end; what waited is delivered."""
        self._cuts.clear()
        for wire in self._wires:
            for pipe in wire.pipes:
                pipe.changed()

    def drop(self, a: NodeId, b: NodeId | None = None) -> None:
        """Break the links between two nodes; or all of one node's, as when its PC dies."""
        for wire in list(self._wires):
            if a in wire.nodes and (b is None or b in wire.nodes):
                self._wires.remove(wire)
                for pipe in wire.pipes:
                    pipe.close(lose=True)
                for link in wire.links:
                    link.abort("connection lost")

    def listen(self, node: NodeId, name: str, address: str, accept: Callable[[Link], Awaitable[None]]) -> None:
        """From now on `dial` reaches this node; `accept` runs in the network's task group, once for each link."""
        self._hosts[address] = _Host(_peer(node, name), address, accept)

    def silence(self, node: NodeId) -> None:
        """`dial` no longer reaches this node."""
        self._hosts = {address: host for address, host in self._hosts.items() if host.peer.node != node}

    async def dial(self, node: NodeId, name: str, address: str, expected: NodeId | None = None) -> Link:
        """A link from `node` to whoever listens at `address`. Raises as `websocket.dial`."""
        host = self._hosts.get(address)
        if host is None or frozenset((node, host.peer.node)) in self._cuts:
            raise LinkClosedError(f"cannot reach {address}")
        if expected not in (None, host.peer.node):
            raise HandshakeError(
                "another node answers at this address", expected=str(expected), found=f"{host.peer.node}"
            )
        if host.peer.node == node:
            raise HandshakeError("a node dialled itself", found=node)
        ours, theirs = self._connect(_peer(node, name), "memory", host.peer, address)
        assert self._tasks is not None
        self._tasks.start_soon(_serve, host.accept, theirs, name="accepted link")
        return ours

    def pair(self, a: NodeId, b: NodeId) -> tuple[Link, Link]:
        """Two ends of a new link: of `a`, whose peer is `b`, and of `b`."""
        return self._connect(_peer(a, f"node {a[:4]}"), "memory", _peer(b, f"node {b[:4]}"), "memory")

    def _connect(self, a: Peer, a_address: str, b: Peer, b_address: str) -> tuple[FramedLink, FramedLink]:
        nodes = frozenset((a.node, b.node))

        def delay() -> float:
            return self._delays.get(nodes, self._default_delay)

        def cut() -> bool:
            return nodes in self._cuts

        there, back = _Pipe(delay, cut), _Pipe(delay, cut)
        ours = FramedLink(MemoryChannel(back, there), b, b_address)
        theirs = FramedLink(MemoryChannel(there, back), a, a_address)
        self._wires = [wire for wire in self._wires if wire.links[0].closed is None or wire.links[1].closed is None]
        self._wires.append(_Wire(nodes, (there, back), (ours, theirs)))
        ours.start()
        theirs.start()
        return ours, theirs


async def _serve(accept: Callable[[Link], Awaitable[None]], link: FramedLink) -> None:
    try:
        await accept(link)
    finally:
        link.abort("closed")


def _peer(node: NodeId, name: str) -> Peer:
    return Peer(node, name, hashlib.sha256(node.encode()).digest())
