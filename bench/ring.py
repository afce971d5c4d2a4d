"""A ring of real nodes, a process and a core each, without discovery and forming, so that a benchmark sets the rest.

Real: the links (TLS, handshake) over loopback, each through a `DelayProxy`; the stage workers; a coordinator and a
draft model on every node. The plan and the way of drafting are given. One node without links is "one PC".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from bench import models
from bench.costs import stage_engine
from bench.proxy import DelayProxy
from bench.report import pin
from swarm.coordinator.coordinator import Coordinator, CoordinatorLimits
from swarm.coordinator.draft_model import DraftModel
from swarm.coordinator.idle import IdleLimits
from swarm.coordinator.language import LanguageModel
from swarm.coordinator.pace import Speculation
from swarm.coordinator.requests import ChatMessage, GenerateRequest, SpeculationUsage
from swarm.engine.base import Engine
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.ids import Epoch, NodeId
from swarm.protocol.messages import Adopt, Adopted, CloseSession, Drawn, Message, Refused, Segment
from swarm.protocol.plan import NO_PLAN, Plan, Stage
from swarm.ring.handshake import Credentials
from swarm.ring.identity import load_or_create
from swarm.ring.mesh import Mesh
from swarm.ring.port import RingListener, RingLoad
from swarm.ring.stage import warm_up
from swarm.ring.websocket import LinkServer, dial
from swarm.ring.worker import StageWorker

KV_TOKENS = 8192
STARTING_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 600.0

_KEEP_NOTHING = IdleLimits(sessions=0)
_SECRET = b"bench".ljust(32, b"-")


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    tokens: int
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer as it came. Times are those of the machine's monotonic clock."""

    asked_s: float
    tokens: tuple[int, ...]
    times_s: tuple[float, ...]
    """Of each token; those of one window come together."""
    use: SpeculationUsage

    @property
    def rate(self) -> float:
        """Tokens per second of decode."""
        later = sum(time_s > self.times_s[0] for time_s in self.times_s)
        return later / (self.times_s[-1] - self.times_s[0])

    @property
    def ttft_ms(self) -> float:
        return (self.times_s[0] - self.asked_s) * 1000


def together(streams: Sequence[Stream]) -> float:
    """Tokens per second of all, from when the last user has a first token until the first user is done."""
    begin = max(stream.times_s[0] for stream in streams)
    end = min(stream.times_s[-1] for stream in streams)
    return sum(begin < time_s <= end for stream in streams for time_s in stream.times_s) / (end - begin)


@dataclass(frozen=True, slots=True)
class Setup:
    """What every node is told at its start."""

    target: Path
    draft: Path | None
    cores: tuple[int, ...]
    """One for each node; the model is divided by cost."""


# --- the side that asks -----------------------------------------------------------------------------------------------


class BenchRing:
    """The nodes, from outside."""

    def __init__(self, pipes: Sequence[Connection], proxies: Sequence[DelayProxy], processes: Sequence[int]) -> None:
        self.processes = processes
        self._pipes = pipes
        self._proxies = proxies

    def set_delay(self, seconds: float) -> None:
        """One way, between any two nodes."""
        for proxy in self._proxies:
            proxy.delay_s = seconds

    async def ask(self, questions: Sequence[Question]) -> list[Stream]:
        """All at once, the first from the first node, the second from the second, and so on around."""

        async def one(number: int, asked: list[Question]) -> list[Stream]:
            self._pipes[number].send((asked, len(questions) - len(asked)))
            streams: list[Stream] = await _receive(self._pipes[number], ANSWER_TIMEOUT_S)
            return streams

        count = len(self._pipes)
        shares = [list(questions[number::count]) for number in range(count)]
        found = await asyncio.gather(*(one(number, share) for number, share in enumerate(shares) if share))
        return [found[number % count][number // count] for number in range(len(questions))]


@contextlib.asynccontextmanager
async def bench_ring(setup: Setup) -> AsyncIterator[BenchRing]:
    """Start the nodes; end them at the end."""
    context = multiprocessing.get_context("spawn")
    async with contextlib.AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pipes, processes = [], []
        for number in range(len(setup.cores)):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_node, args=(theirs, setup, number, home / str(number)))
            process.start()
            stack.callback(_end, pipe, process)
            pipes.append(pipe)
            processes.append(process.pid or 0)
        told = [await _receive(pipe, STARTING_TIMEOUT_S) for pipe in pipes]
        plan = _plan([node for node, _, _ in told], [layers for _, _, layers in told])
        dials: list[list[tuple[NodeId, int]]] = [[] for _ in pipes]
        proxies = []
        for (one, _), (_, (node, port, _)) in itertools.combinations(enumerate(told), 2):
            proxy = await stack.enter_async_context(DelayProxy(port))
            proxies.append(proxy)
            dials[one].append((node, proxy.port))
        for pipe, targets in zip(pipes, dials, strict=True):
            pipe.send((plan, targets))
        for pipe in pipes:
            await _receive(pipe, STARTING_TIMEOUT_S)
        yield BenchRing(pipes, proxies, processes)


async def _receive(pipe: Connection, timeout_s: float) -> Any:
    """The next message. Raises ``TimeoutError``, or ``EOFError`` where it is gone."""
    if not await anyio.to_thread.run_sync(pipe.poll, timeout_s, abandon_on_cancel=True):
        raise TimeoutError("a node of the benchmark does not answer")
    return pipe.recv()


def _end(pipe: Connection, process: Any) -> None:
    pipe.close()
    process.join(20)
    process.kill()


def _plan(nodes: Sequence[NodeId], layers: Sequence[tuple[int, int]]) -> Plan:
    names = [f"node{number}" for number in range(len(nodes))]
    stages = [Stage(node, name, *span, "CPU", 0) for node, name, span in zip(nodes, names, layers, strict=True)]
    return Plan(Epoch(1, nodes[0]), None, tuple(stages), KV_TOKENS)


# --- a node -----------------------------------------------------------------------------------------------------------


class Node:
    """A stage, its links, and a coordinator for each way of drafting, which remembers what it measured, as that of a
    node does. Implements `RingPort` and `MeshListener`."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.plan = NO_PLAN
        self.mesh = Mesh(node, self)
        self.worker: StageWorker | None = None
        self.elsewhere = 0
        """Sessions of other nodes; nodes tell each other so in their reports."""
        self._listener: RingListener | None = None

    def join(self, plan: Plan, engine: Engine) -> StageWorker:
        self.plan = plan
        self.worker = StageWorker(self.node, plan, engine, self.send)
        return self.worker

    def loads(self) -> tuple[RingLoad, ...]:
        return (RingLoad(sessions=self.elsewhere),)

    def attach(self, listener: RingListener) -> None:
        self._listener = listener

    async def send(self, to: NodeId, message: Message) -> None:
        if to == self.node:
            await self.received(to, message)
        else:
            await self.mesh.send(to, message)

    async def received(self, node: NodeId, message: Message) -> None:
        if isinstance(message, Segment) and self.worker is not None:
            await self.worker.deliver(message)
        elif isinstance(message, CloseSession) and self.worker is not None:
            self.worker.close_session(message.session, node)
        elif isinstance(message, Adopt) and self.worker is not None:
            self.worker.adopt(message)
        elif isinstance(message, Adopted) and self._listener is not None:
            self._listener.adopted(message)
        elif isinstance(message, Drawn) and self._listener is not None:
            self._listener.drawn(message)
        elif isinstance(message, Refused) and self._listener is not None:
            self._listener.refused(message)

    def link_up(self, node: NodeId, name: str, dialled: str) -> None:
        pass

    def link_down(self, node: NodeId, reason: str) -> None:
        pass

    def heard(self, node: NodeId, round_trip_ms: float | None) -> None:
        pass


def _node(pipe: Connection, setup: Setup, number: int, home: Path) -> None:
    pin(setup.cores[number])
    home.mkdir()
    asyncio.run(_serve(pipe, setup, number, home))


async def _serve(pipe: Connection, setup: Setup, number: int, home: Path) -> None:
    own = Credentials(load_or_create(home), f"node{number}", "bench", _SECRET)
    engine, layers = stage_engine(setup.target, number, len(setup.cores), KV_TOKENS)
    small = stage_engine(setup.draft, 0, 1, KV_TOKENS, models.shortlist(setup.draft))[0] if setup.draft else None
    for one in (engine, small):
        if one is not None:
            warm_up(one)
    draft = DraftModel(small) if small else None
    language = LanguageModel(None, Tokenizer.load(setup.target), KV_TOKENS)
    node = Node(own.node)
    server = LinkServer(own, node.mesh.serve)
    await server.start(0, "127.0.0.1")
    pipe.send((own.node, server.port, layers))
    plan, dials = await anyio.to_thread.run_sync(pipe.recv)
    try:
        async with anyio.create_task_group() as group:
            for other, port in dials:
                link = await dial(f"127.0.0.1:{port}", own, expected=other)
                group.start_soon(node.mesh.serve, link, f"127.0.0.1:{port}")
            group.start_soon(node.join(plan, engine).run)
            if draft is not None:
                await group.start(draft.run)
            pipe.send("ready")
            coordinators: dict[Speculation, Coordinator] = {}
            with contextlib.suppress(EOFError):  # the other side has closed it
                while True:
                    questions, node.elsewhere = await anyio.to_thread.run_sync(pipe.recv)
                    way = questions[0].speculation
                    if way not in coordinators:
                        coordinators[way] = Coordinator(node, CoordinatorLimits(speculation=way, idle=_KEEP_NOTHING))
                        coordinators[way].set_model(language)
                        coordinators[way].set_drafter(draft)
                        await group.start(coordinators[way].run)
                    node.attach(coordinators[way])
                    pipe.send(await asyncio.gather(*(_answer(coordinators[way], one) for one in questions)))
            group.cancel_scope.cancel()
    finally:
        await server.close()


async def _answer(coordinator: Coordinator, question: Question) -> Stream:
    message = ChatMessage("user", question.prompt)
    request = GenerateRequest((message,), max_tokens=question.tokens, ignore_stop_tokens=True)
    tokens: list[int] = []
    times_s: list[float] = []
    asked_s, use = time.monotonic(), SpeculationUsage()
    async for delta in coordinator.generate(request):
        tokens += delta.tokens
        times_s += [time.monotonic()] * len(delta.tokens)
        use = delta.usage.speculation if delta.usage else use
    return Stream(asked_s, tuple(tokens), tuple(times_s), use)
