"""A ring in one process: real stage workers and coordinators, each a node of its own, and links that take a while."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from swarm.coordinator.coordinator import Coordinator, CoordinatorLimits
from swarm.coordinator.draft_model import DraftModel
from swarm.coordinator.language import LanguageModel
from swarm.engine.kinds import ExactEngine
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.messages import Adopt, Adopted, CloseSession, Drawn, Message, Refused, Segment
from swarm.protocol.plan import Plan, Stage
from swarm.ring.port import RingListener, RingLoad
from swarm.ring.worker import StageWorker

MODEL = BlobId("b" * 64)
EPOCH = Epoch(1, NodeId("0" * 32))

LATE_S = 0.02
"""A message is at most so long under way."""

UNDER_WAY = 64
"""Messages on one link; then the sender waits."""

REST_S = 120.0
"""For what people left behind to be put away."""


class Port:
    """One node's door to the others. Implements `ring.port.RingPort`."""

    def __init__(self, office: Office, node: NodeId) -> None:
        self.listener: RingListener | None = None
        self._office = office
        self._node = node

    @property
    def node(self) -> NodeId:
        return self._node

    @property
    def plan(self) -> Plan:
        return self._office.plan

    def loads(self) -> tuple[RingLoad, ...]:
        running = {node: one.stats().running for node, one in self._office.coordinators.items() if node != self._node}
        return (RingLoad(sum(running.values()), transit_ms=LATE_S * 1000),)

    async def send(self, to: NodeId, message: Message) -> None:
        await self._office.send(self._node, to, message)

    def attach(self, listener: RingListener) -> None:
        self.listener = listener


class Office:
    """`coordinators[node(i)]` sits beside stage i, or at a PC without one. Made by `open_office`."""

    def __init__(
        self,
        engines: Sequence[ExactEngine],
        coordinators: Sequence[CoordinatorLimits],
        kv_tokens: int,
        random: Random,
        tasks: TaskGroup,
    ) -> None:
        nodes = [node(index) for index in range(len(engines))]
        stages = tuple(Stage(one, one[:8], i, i + 1, "CPU", 1) for i, one in enumerate(nodes))
        self.plan = Plan(EPOCH, MODEL, stages, kv_tokens)
        self.engines = engines
        self.steps = Steps()
        self.ports = {node(index): Port(self, node(index)) for index in range(len(coordinators))}
        self.coordinators = {
            one: Coordinator(port, limits) for (one, port), limits in zip(self.ports.items(), coordinators, strict=True)
        }
        self.workers = {
            one: StageWorker(one, self.plan, engine, self._sender(one), self.steps.count if index == 0 else None)
            for index, (one, engine) in enumerate(zip(nodes, engines, strict=True))
        }
        self._random = random
        self._tasks = tasks
        self._links: dict[tuple[NodeId, NodeId], MemoryObjectSendStream[Message]] = {}

    async def send(self, sender: NodeId, to: NodeId, message: Message) -> None:
        """In order from one node to another."""
        if sender == to:
            await self._deliver(sender, to, message)
            return
        if (sender, to) not in self._links:
            self._links[sender, to], arriving = anyio.create_memory_object_stream[Message](UNDER_WAY)
            self._tasks.start_soon(self._carry, sender, to, arriving)
        await self._links[sender, to].send(message)

    def validate_state(self) -> None:
        """Of all books."""
        for engine in self.engines:
            engine.validate_state()
        for worker in self.workers.values():
            worker.validate_state()

    async def rest(self) -> None:
        """Until the stages hold nothing but what coordinators keep. Raises ``TimeoutError``: something was left."""
        kept = sum(one.stats().idle for one in self.coordinators.values())
        await _until(lambda: all(len(worker.sessions) <= kept for worker in self.workers.values()))

    async def close(self, free_tokens: Sequence[int]) -> None:
        """All leave. Raises ``TimeoutError`` where a stage then has not as much free as it had, `free_tokens`."""
        for coordinator in self.coordinators.values():
            await coordinator.close()
        await _until(lambda: [engine.free_tokens for engine in self.engines] == list(free_tokens))
        await self.rest()

    def _sender(self, sender: NodeId) -> Callable[[NodeId, Message], object]:
        async def send(to: NodeId, message: Message) -> None:
            await self.send(sender, to, message)

        return send

    async def _carry(self, sender: NodeId, to: NodeId, arriving: MemoryObjectReceiveStream[Message]) -> None:
        async for message in arriving:
            await anyio.sleep(self._random.uniform(0.0, LATE_S))
            await self._deliver(sender, to, message)

    async def _deliver(self, sender: NodeId, to: NodeId, message: Message) -> None:
        if isinstance(message, Segment):
            await self.workers[to].deliver(message)
        elif isinstance(message, CloseSession):
            self.workers[to].close_session(message.session, sender)
        elif isinstance(message, Adopt):
            self.workers[to].adopt(message)
        elif (listener := self.ports[to].listener) is not None:
            if isinstance(message, Drawn):
                listener.drawn(message)
            elif isinstance(message, Adopted):
                listener.adopted(message)
            elif isinstance(message, Refused):
                listener.refused(message)


class Steps:
    """Forwards of the first stage: the time by which people come and go, whatever the speed of the PC."""

    def __init__(self) -> None:
        self.number = 0
        self._changed = anyio.Event()

    def count(self, _: object = None) -> None:
        self.number += 1
        self.look()

    def look(self) -> None:
        """Something that `until` waits for may be so."""
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


@contextlib.asynccontextmanager
async def open_office(
    engines: Sequence[ExactEngine],
    coordinators: Sequence[CoordinatorLimits],
    kv_tokens: int,
    model: LanguageModel,
    random: Random,
    draft: DraftModel | None = None,
) -> AsyncIterator[Office]:
    """Everybody at work inside the ``with``. `kv_tokens`: what coordinators believe that a stage holds; 0: unknown."""
    async with anyio.create_task_group() as tasks:
        office = Office(engines, coordinators, kv_tokens, random, tasks)
        for worker in office.workers.values():
            tasks.start_soon(worker.run)
        if draft is not None:
            await tasks.start(draft.run)
        for coordinator in office.coordinators.values():
            coordinator.set_model(model)
            coordinator.set_drafter(draft)
            await tasks.start(coordinator.run)
        yield office
        tasks.cancel_scope.cancel()


def node(index: int) -> NodeId:
    return NodeId(f"{index + 1:08x}".ljust(32, "0"))


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(REST_S):
        while not condition():  # noqa: ASYNC110 - a stage puts away between two forwards and tells nobody
            await anyio.sleep(0.01)
