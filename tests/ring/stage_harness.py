"""One stage worker with what is around it: an engine that can be held, and a post box for what it sends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import anyio

from swarm.engine.base import Output
from swarm.engine.timed import StageTimes, TimedEngine
from swarm.protocol.errors import SwarmError
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.messages import Adopt, Message, RowKind, Segment
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.sampling import GREEDY
from swarm.ring.worker import StageWorker

FIRST, LAST, ASKER, STRANGER = (NodeId(digit * 32) for digit in "abcd")
EPOCH = Epoch(3, FIRST)
PLAN = Plan(EPOCH, None, (Stage(FIRST, "first", 0, 2, "CPU", 1), Stage(LAST, "last", 2, 4, "CPU", 1)))
ALONE = Plan(EPOCH, None, (Stage(FIRST, "first", 0, 4, "CPU", 1),))
WAIT_S = 20.0


def segment(
    session: int, start: int = 0, rows: int = 2, *, wanted: int = 1, kind: RowKind | None = None, attempt: int = 0
) -> Segment:
    """Rows of ids 1, 2, …; several are prefill, one is decoding."""
    kind = kind or (RowKind.PREFILL if rows > 1 else RowKind.DECODE)
    name = SessionId(f"cccccccc-{session:x}-00000000")
    tokens = tuple(range(start + 1, start + rows + 1))
    return Segment(name, ASKER, EPOCH, attempt, start, kind, tokens, wanted, GREEDY)


def adopt(session: int, tokens: int, coordinator: NodeId = ASKER) -> Adopt:
    """A question for the first so many of `session`'s rows."""
    return Adopt(segment(session).session, coordinator, EPOCH, segment(session, rows=tokens).tokens)


class HeldEngine(TimedEngine):
    """A timed engine that waits in its forward for `gate`, and remembers its batches."""

    def __init__(self, *, first: bool = True, last: bool = True, kv_tokens: int = 4096) -> None:
        super().__init__(first, last, kv_tokens, StageTimes(0.0), sleep=lambda _: None)
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[Segment]] = []
        self.closed: list[SessionId] = []
        self.began = threading.Event()
        self.ended = 0
        self.error: SwarmError | None = None

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        self.batches.append(list(batch))
        self.began.set()
        assert self.gate.wait(WAIT_S)
        self.ended += 1
        if self.error is not None:
            raise self.error
        return super().run(batch)

    def close_session(self, session: SessionId) -> None:
        self.closed.append(session)
        super().close_session(session)

    async def entered(self) -> None:
        """Until a forward runs."""
        assert await anyio.to_thread.run_sync(self.began.wait, WAIT_S)
        self.began.clear()


class PostBox:
    """The worker's `Send`."""

    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, Message]] = []
        self.gone: dict[NodeId, SwarmError] = {}
        self.held: dict[NodeId, anyio.Event] = {}
        self.open = anyio.Event()
        self.open.set()
        self._changed = anyio.Event()

    async def send(self, to: NodeId, message: Message) -> None:
        await self.open.wait()
        if to in self.held:
            await self.held[to].wait()
        if to in self.gone:
            raise self.gone[to]
        self.sent.append((to, message))
        self._changed.set()
        self._changed = anyio.Event()

    async def wait(self, count: int) -> list[tuple[NodeId, Message]]:
        """Until `count` messages were sent; all of them."""
        with anyio.fail_after(WAIT_S):
            while len(self.sent) < count:
                await self._changed.wait()
        return self.sent


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds."""
    with anyio.fail_after(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in an engine's thread
            await anyio.sleep(0.001)


@contextlib.asynccontextmanager
async def serving(
    engine: HeldEngine, box: PostBox, node: NodeId = FIRST, plan: Plan = PLAN
) -> AsyncIterator[StageWorker]:
    """A worker that runs inside the ``with``."""
    worker = StageWorker(node, plan, engine, box.send)
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run)
        try:
            yield worker
        finally:
            engine.gate.set()
            group.cancel_scope.cancel()


def with_hidden(asked: Segment) -> Segment:
    """As the stage before hands it on."""
    outputs = TimedEngine(True, False, 4096, StageTimes(0.0), sleep=lambda _: None).run([asked])
    return replace(asked, hidden=outputs[0].hidden)
