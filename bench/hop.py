"""Our own cost of a hop: what passing a token on takes beyond computing it and beyond the wire.

Two processes, a core each, the real link (TLS, handshake) and the real stage worker on loopback; the engine takes a
known time. A token's round trip (coordinator, stage 0, stage 1, coordinator: two hops) less both forwards, less a
round trip of the same bytes over a plain TCP connection between processes that wait as long.

``python -m bench.hop [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import numpy as np

from bench.report import cores, first_in_line, on_core, pin, report, spread
from swarm.engine.base import Output
from swarm.engine.timed import HIDDEN_SIZE, StageTimes, TimedEngine
from swarm.protocol.codec import encode
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.messages import Drawn, Message, RowKind, Segment
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.sampling import GREEDY
from swarm.ring.handshake import Credentials
from swarm.ring.identity import load_or_create
from swarm.ring.mesh import Mesh
from swarm.ring.websocket import LinkServer, dial
from swarm.ring.worker import StageWorker

FORWARD_MS = 4.0
HIDDEN = 1536
"""Floats in a row that travels, as in Qwen2.5-Coder-1.5B."""

_SECRET = b"bench".ljust(32, b"-")
_HOPS = 2


class WideEngine(TimedEngine):
    """The timed engine with rows of a real width, whose drawn token is how many microseconds the forward took."""

    def __init__(self, stage: int) -> None:
        self.took_us = 0
        super().__init__(stage == 0, stage == 1, 4096, StageTimes(FORWARD_MS), sleep=self._wait)

    def check(self, segment: Segment) -> None:
        super().check(_resize(segment, HIDDEN_SIZE))

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        began = time.perf_counter()
        outputs = super().run([_resize(segment, HIDDEN_SIZE) for segment in batch])
        found = [_widen(output) for output in outputs]
        self.took_us = round((time.perf_counter() - began) * 1e6)
        return [replace(output, drawn=(self.took_us,)) if output.drawn else output for output in found]

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)


class Node:
    """A stage and its links, without discovery, membership and forming. Implements `mesh.MeshListener`."""

    def __init__(self, node: NodeId, plan: Plan, engine: WideEngine) -> None:
        self.mesh = Mesh(node, self)
        self.engine = engine
        self.worker = StageWorker(node, plan, engine, self.send)
        self.drawn: asyncio.Queue[Drawn] = asyncio.Queue()
        self._node = node

    async def send(self, to: NodeId, message: Message) -> None:
        if to == self._node:
            await self.received(to, message)
        else:
            await self.mesh.send(to, message)

    async def received(self, node: NodeId, message: Message) -> None:
        if isinstance(message, Segment):
            await self.worker.deliver(message)
        elif isinstance(message, Drawn):
            self.drawn.put_nowait(message)

    def link_up(self, node: NodeId, name: str, dialled: str) -> None:
        pass

    def link_down(self, node: NodeId, reason: str) -> None:
        pass

    def heard(self, node: NodeId, round_trip_ms: float | None) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hop", description=__doc__)
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="two rounds of ten tokens, nothing kept")
    arguments = parser.parse_args()
    quick = arguments.quick
    rounds, tokens = (2, 10) if quick else (20, 64)
    near, far = cores()[0], cores()[-1]
    ours, raw = on_core(near, measure, far, rounds, tokens, arguments.first)
    hops = [(a - b) / _HOPS for a, b in zip(ours, raw, strict=True)]
    print(f"per token beyond the forwards: ring {spread(ours)} ms, plain TCP {spread(raw)} ms")
    print(f"a hop: {spread(hops)} ms")
    figures = {
        "hop_ms": statistics.median(hops),
        "hop_min_ms": min(hops),
        "ring_token_ms": statistics.median(ours),
        "tcp_token_ms": statistics.median(raw),
    }
    settings = {
        "rounds": rounds,
        "tokens": tokens,
        "forward_ms": FORWARD_MS,
        "hidden": HIDDEN,
        "first": arguments.first,
    }
    report("hop", figures, settings, keep=not quick)


def measure(far_core: int, rounds: int, tokens: int, first: bool) -> tuple[list[float], list[float]]:
    """Of each round, the median milliseconds of a token beyond the forwards: (through the ring, over plain TCP)."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as home:
        process = context.Process(target=_far, args=(theirs, far_core, str(Path(home, "far"))))
        process.start()
        try:
            assert process.pid is not None
            turn = partial(first_in_line, first, [process.pid])
            return asyncio.run(_near(pipe, Path(home, "near"), rounds, tokens, turn))
        finally:
            pipe.close()
            process.join(20)
            process.kill()


async def _near(
    pipe: Connection, home: Path, rounds: int, tokens: int, turn: Callable[[], AbstractContextManager[None]]
) -> tuple[list[float], list[float]]:
    own = _credentials(home, "near")
    pipe.send(own.node)
    far_node, link_port, echo_port = await anyio.to_thread.run_sync(pipe.recv)
    node = Node(own.node, _plan(own.node, far_node), WideEngine(0))
    ours, raw = [], []
    async with anyio.create_task_group() as group:
        group.start_soon(node.mesh.serve, await dial(f"127.0.0.1:{link_port}", own, expected=far_node), "far")
        group.start_soon(node.worker.run)
        ring = _RingTokens(node, own.node)
        echo = await anyio.to_thread.run_sync(_Echo, echo_port, ring.bytes_out, ring.bytes_back)
        await ring.run(tokens)
        for _ in range(rounds):
            with turn():
                ours.append(statistics.median(await ring.run(tokens)))
                raw.append(statistics.median(await anyio.to_thread.run_sync(echo.run, tokens)))
        group.cancel_scope.cancel()
    return ours, raw


class _RingTokens:
    """A session that decodes through the ring."""

    def __init__(self, node: Node, coordinator: NodeId) -> None:
        self._node = node
        session = SessionId(f"{coordinator[:8]}-1-00000000")
        self._first = Segment(session, coordinator, _epoch(coordinator), 0, 0, RowKind.DECODE, (7,), 1, GREEDY)
        self._position = 0
        travels = replace(self._first, start=500, hidden=np.zeros((1, HIDDEN), np.float32))
        self.bytes_out = sum(len(frame) for frame in encode(travels))
        self.bytes_back = sum(len(frame) for frame in encode(Drawn(session, _epoch(coordinator), 0, 501, (4100,))))

    async def run(self, tokens: int) -> list[float]:
        found = []
        for _ in range(tokens):
            began = time.perf_counter()
            await self._node.send(self._first.coordinator, replace(self._first, start=self._position))
            drawn = await self._node.drawn.get()
            took = (time.perf_counter() - began) * 1000
            found.append(took - (self._node.engine.took_us + drawn.tokens[0]) / 1000)
            self._position += 1
        return found


class _Echo:
    """The same bytes over plain TCP, with a wait at either end as long as a forward."""

    def __init__(self, port: int, bytes_out: int, bytes_back: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(bytes_out.to_bytes(4, "big") + bytes_back.to_bytes(4, "big"))
        self._out, self._back = bytes(bytes_out), bytes_back

    def run(self, tokens: int) -> list[float]:
        found = []
        for _ in range(tokens):
            began = time.perf_counter()
            time.sleep(FORWARD_MS / 1000)
            waited = time.perf_counter() - began
            self._socket.sendall(self._out)
            answer = _receive(self._socket, self._back)
            took = time.perf_counter() - began
            found.append((took - waited) * 1000 - int.from_bytes(answer[:4], "big") / 1000)
        return found


def _far(pipe: Connection, core: int, home: str) -> None:
    pin(core)
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_answer, args=(listening,), daemon=True).start()
    asyncio.run(_serve(pipe, Path(home), listening.getsockname()[1]))


def _answer(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sizes = _receive(connection, 8)
    out, back = int.from_bytes(sizes[:4], "big"), int.from_bytes(sizes[4:], "big")
    with contextlib.suppress(OSError):
        while _receive(connection, out):
            began = time.perf_counter()
            time.sleep(FORWARD_MS / 1000)
            took_us = round((time.perf_counter() - began) * 1e6)
            connection.sendall(took_us.to_bytes(4, "big").ljust(back, b"\0"))


async def _serve(pipe: Connection, home: Path, echo_port: int) -> None:
    own = _credentials(home, "far")
    near = pipe.recv()
    node = Node(own.node, _plan(near, own.node), WideEngine(1))
    server = LinkServer(own, node.mesh.serve)
    await server.start(0, "127.0.0.1")
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(node.worker.run)
            pipe.send((own.node, server.port, echo_port))
            with contextlib.suppress(EOFError):
                await anyio.to_thread.run_sync(pipe.recv)  # until the other side closes it
            group.cancel_scope.cancel()
    finally:
        await server.close()


def _receive(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or none where the connection ended."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def _credentials(home: Path, name: str) -> Credentials:
    home.mkdir()
    return Credentials(load_or_create(home), name, "bench", _SECRET)


def _plan(first: NodeId, last: NodeId) -> Plan:
    stages = (Stage(first, "near", 0, 1, "CPU", 0), Stage(last, "far", 1, 2, "CPU", 0))
    return Plan(_epoch(first), None, stages, kv_tokens=4096)


def _epoch(proposer: NodeId) -> Epoch:
    return Epoch(1, proposer)


def _resize(segment: Segment, width: int) -> Segment:
    hidden = segment.hidden
    if hidden is None or hidden.shape[1] != HIDDEN:
        return segment
    return replace(segment, hidden=hidden[:, :width])


def _widen(output: Output) -> Output:
    if output.hidden is None:
        return output
    hidden = np.zeros((len(output.hidden), HIDDEN), np.float32)
    hidden[:, : output.hidden.shape[1]] = output.hidden
    return Output(hidden=hidden)


if __name__ == "__main__":
    main()
