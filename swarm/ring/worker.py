"""The stage worker: batches the segments that wait, runs them off the event loop, passes the results on."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias

import anyio

from swarm.engine.base import Engine, Output
from swarm.protocol import limits
from swarm.protocol.errors import CapacityError, DeadlineError, DeviceError, LinkClosedError, SessionError, SwarmError
from swarm.protocol.ids import NodeId, SessionId
from swarm.protocol.messages import Adopt, Adopted, Drawn, Message, Refused, RowKind, Segment
from swarm.protocol.plan import Plan

Send: TypeAlias = Callable[[NodeId, Message], Awaitable[None]]

PREFILL_ROWS = 256
"""Of prefill in one forward beside decode rows: bounds what a long prompt adds to everybody's step."""

RESTED_S = 5.0
"""A session's cache may be given up for others after so long without a segment."""

_BLOCK_SLACK = 32
"""Positions a session may take beyond its rows: it takes whole blocks."""

_WINDOW = 64
"""Forwards over which step times are taken."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    step_ms: float
    """Median time of a forward with decode rows; 0 before the first."""
    rows_per_second: float
    waiting: int


NO_STATS = WorkerStats(0.0, 0.0, 0)


class SegmentQueue:
    """What waits at a stage, and in which order it runs. Pure.

    Segments of one session stay in order. Of those that are first in their session, decode rows go before prefill.
    """

    def __init__(self) -> None:
        self._waiting: deque[Segment] = deque()
        self._attempts: dict[SessionId, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def sessions(self) -> set[SessionId]:
        """Those of which something waits."""
        return {segment.session for segment in self._waiting}

    def push(self, segment: Segment) -> None:
        """Queue `segment`; a newer attempt drops what waits of older ones, an older one is dropped itself."""
        newest = self._attempts.get(segment.session, -1)
        if segment.attempt < newest:
            return
        if segment.attempt > newest:
            self.forget(segment.session)
            self._attempts[segment.session] = segment.attempt
        self._waiting.append(segment)

    def forget(self, session: SessionId) -> None:
        """Drop what waits of `session`."""
        self._attempts.pop(session, None)
        if any(segment.session == session for segment in self._waiting):
            self._waiting = deque(segment for segment in self._waiting if segment.session != session)

    def take(self, max_rows: int) -> list[Segment]:
        """The next batch, at most one segment of each session; empty only where nothing waits."""
        heads: dict[SessionId, Segment] = {}
        for segment in self._waiting:
            heads.setdefault(segment.session, segment)
        batch: list[Segment] = []
        rows = prefill = 0
        for segment in sorted(heads.values(), key=lambda s: s.kind is RowKind.PREFILL):
            count = len(segment.tokens)
            extra = count if segment.kind is RowKind.PREFILL else 0
            if (batch and rows + count > max_rows) or (prefill and extra and prefill + extra > PREFILL_ROWS):
                continue
            batch.append(segment)
            rows += count
            prefill += extra
        taken = {id(segment) for segment in batch}
        self._waiting = deque(segment for segment in self._waiting if id(segment) not in taken)
        return batch


class StageWorker:
    """Runs one stage of one plan until it is cancelled. `run` owns its thread and tasks; the engine is its owner's."""

    def __init__(self, node: NodeId, plan: Plan, engine: Engine, send: Send) -> None:
        self._node = node
        self._plan = plan
        self._engine = engine
        self._send = send
        self._queue = SegmentQueue()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._over = False
        self._adoptions: deque[Adopt] = deque()
        self._closing: set[SessionId] = set()
        self._owners: dict[SessionId, NodeId] = {}
        self._used: dict[SessionId, float] = {}
        """When each session last sent something."""
        self._ran: dict[SessionId, tuple[int, int]] = {}
        """Attempt and number of the segment that each session's cache ends with."""
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._rows = 0
        self._counted = time.monotonic()
        self._running: asyncio.Future[list[Output]] | None = None
        self.broken = ""
        """Why the device runs nothing any more; empty while it does."""
        following = plan.after(node)
        self._next = following.node if following else None

    @property
    def plan(self) -> Plan:
        return self._plan

    def stats(self) -> WorkerStats:
        """Since the last call of this."""
        now = time.monotonic()
        elapsed, self._counted = now - self._counted, now
        rate, self._rows = self._rows / max(elapsed, 1e-3), 0
        return WorkerStats(statistics.median(self._steps) if self._steps else 0.0, rate, len(self._queue))

    def expected_sender(self, coordinator: NodeId) -> NodeId:
        """Who may hand us rows of a session of `coordinator`: itself at the first stage, else the stage before."""
        nodes = [stage.node for stage in self._plan.stages]
        index = nodes.index(self._node)
        return nodes[index - 1] if index else coordinator

    async def deliver(self, segment: Segment) -> None:
        """Queue a segment; waits while the queue is full, which keeps the sender's link unread (back-pressure)."""
        if segment.epoch != self._plan.epoch:
            await self._refuse(segment, "another epoch", fatal=False)
            return
        if self._owners.setdefault(segment.session, segment.coordinator) != segment.coordinator:
            await self._refuse(segment, "the session belongs to another node", fatal=True)
            return
        self._used[segment.session] = time.monotonic()
        if len(self._owners) > limits.MAX_SESSIONS_PER_STAGE:
            idle = self._idle({segment.session})
            if not idle:
                del self._owners[segment.session], self._used[segment.session]
                await self._refuse(segment, f"all {limits.MAX_SESSIONS_PER_STAGE} sessions are busy", fatal=False)
                return
            self._forget(idle[0])
        while len(self._queue) >= limits.MAX_QUEUED_SEGMENTS:
            if self._over:
                await self._refuse(segment, "this stage is not in force any more", fatal=False)
                return
            self._room.clear()
            await self._room.wait()
        self._queue.push(segment)
        self._arrived.set()

    async def adopt(self, message: Adopt) -> None:
        """Queue a question for what the cache holds already; a stage that is full of them holds nothing."""
        taken = self._owners.get(message.session, message.coordinator) != message.coordinator
        if taken or len(self._adoptions) >= limits.MAX_SESSIONS_PER_STAGE:
            await self._send(message.coordinator, Adopted(message.session, message.epoch, 0))
            return
        self._owners[message.session] = message.coordinator
        self._used[message.session] = time.monotonic()
        self._adoptions.append(message)
        self._arrived.set()

    def close_session(self, session: SessionId, owner: NodeId) -> None:
        """Free what the stage holds for `session` of `owner`, as soon as no forward runs."""
        if self._owners.get(session) != owner:
            return
        self._forget(session)

    def _forget(self, session: SessionId) -> None:
        self._queue.forget(session)
        self._owners.pop(session, None)
        self._used.pop(session, None)
        self._closing.add(session)
        self._arrived.set()

    def _idle(self, except_for: Set[SessionId]) -> list[SessionId]:
        """Sessions of which nothing waits, those that were unused longest first."""
        return sorted(self._used.keys() - except_for - self._queue.sessions, key=self._used.__getitem__)

    def close_coordinator(self, node: NodeId) -> None:
        """Free what the stage holds for sessions of a coordinator that is gone."""
        for session in [session for session, owner in self._owners.items() if owner == node]:
            self.close_session(session, node)

    async def run(self) -> None:
        """Serve until cancelled; then waits for the forward that runs, which is one step long."""
        self._engine.reset()
        executor = ThreadPoolExecutor(1, thread_name_prefix="stage")
        outgoing, results = anyio.create_memory_object_stream[tuple[NodeId, Message]](limits.MAX_INFLIGHT_FRAMES)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._send_results, results)
                while True:
                    await self._arrived.wait()
                    # Before the batch is taken: what arrives while something is refused must be seen.
                    self._arrived.clear()
                    self._close_sessions()
                    batch = await self._take()
                    if len(self._queue):
                        self._arrived.set()
                    if batch:
                        for to, message in await self._forward(executor, batch):
                            await outgoing.send((to, message))
                    # After the forward: it may have computed just what is asked for.
                    while self._adoptions:
                        await outgoing.send(self._adopt(self._adoptions.popleft()))
        finally:
            self._over = True
            self._room.set()
            outgoing.close()
            results.close()
            if self._running is not None:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([self._running])
            executor.shutdown(wait=False)

    async def _take(self) -> list[Segment]:
        """The next batch that the engine can run; what it cannot is refused."""
        batch: list[Segment] = []
        taken = self._queue.take(self._engine.max_rows)
        self._make_room(taken)
        for segment in taken:
            try:
                self._check(segment)
                batch.append(segment)
            except (CapacityError, SessionError) as error:
                await self._refuse(segment, str(error), fatal=isinstance(error, CapacityError))
        if len(self._queue) < limits.MAX_QUEUED_SEGMENTS:
            self._room.set()
        return batch

    def _make_room(self, batch: Sequence[Segment]) -> None:
        """Caches that nobody used for a while go before an answer that is being written is refused.

        Whoever wants one of them again replays it (vLLM's recomputation, Kwon et al. 2023, section 4.5).
        """
        busy = {segment.session for segment in batch}
        need = sum(len(segment.tokens) + _BLOCK_SLACK for segment in batch)
        if self._engine.free_tokens >= need:
            return
        for session in self._idle(busy):
            if time.monotonic() - self._used[session] < RESTED_S or self._engine.free_tokens >= need:
                return
            self._forget(session)
            self._close_sessions()

    def _check(self, segment: Segment) -> None:
        rows = len(segment.tokens)
        if not 0 <= segment.wanted <= rows or not 0 <= segment.start <= limits.MAX_CONTEXT_TOKENS - rows or not rows:
            raise SessionError(
                "a segment without sense", found=f"{rows} rows at {segment.start}, {segment.wanted} wanted"
            )
        if segment.number and self._ran.get(segment.session) != (segment.attempt, segment.number - 1):
            raise SessionError("a gap in the attempt", found=f"segment {segment.number} without the one before")
        self._engine.check(segment)

    async def _forward(self, executor: ThreadPoolExecutor, batch: Sequence[Segment]) -> list[tuple[NodeId, Message]]:
        began = time.perf_counter()
        self._running = asyncio.get_running_loop().run_in_executor(executor, self._engine.run, batch)
        try:
            outputs = await asyncio.shield(self._running)
        except SwarmError as error:
            if isinstance(error, DeviceError):
                self.broken = str(error)
            if isinstance(error, CapacityError) and len(batch) > 1:
                # Nothing was run. One that does not fit must not take the others with it.
                return [result for segment in batch for result in await self._forward(executor, [segment])]
            # Not fatal: a full cache empties again, and a session that can never fit is refused by `check`.
            return [(s.coordinator, _refusal(s, str(error), fatal=False)) for s in batch]
        if any(segment.kind is RowKind.DECODE for segment in batch):
            self._steps.append((time.perf_counter() - began) * 1000)
        self._rows += sum(len(segment.tokens) for segment in batch)
        self._ran.update((segment.session, (segment.attempt, segment.number)) for segment in batch)
        return [result for pair in zip(batch, outputs, strict=True) for result in self._result(*pair)]

    def _adopt(self, message: Adopt) -> tuple[NodeId, Message]:
        held = self._engine.adopt(message.session, message.tokens)
        if held and self._next is not None:
            return self._next, replace(message, tokens=message.tokens[:held])
        return message.coordinator, Adopted(message.session, message.epoch, held)

    def _result(self, segment: Segment, output: Output) -> list[tuple[NodeId, Message]]:
        if self._next is not None:
            return [(self._next, replace(segment, hidden=output.hidden))]
        if not output.drawn:
            return []
        position = segment.start + len(segment.tokens) - segment.wanted + 1
        drawn = Drawn(segment.session, segment.epoch, segment.attempt, position, output.drawn)
        return [(segment.coordinator, drawn)]

    async def _send_results(self, results: anyio.abc.ObjectReceiveStream[tuple[NodeId, Message]]) -> None:
        async for to, message in results:
            try:
                await self._send(to, message)
            except (LinkClosedError, DeadlineError) as error:
                # A lost coordinator needs nothing any more. A lost next stage is a new epoch soon.
                if isinstance(message, Segment):
                    await self._refuse(message, f"the next stage is gone: {error}", fatal=False)

    async def _refuse(self, segment: Segment, reason: str, *, fatal: bool) -> None:
        try:
            await self._send(segment.coordinator, _refusal(segment, reason, fatal))
        except (LinkClosedError, DeadlineError):
            return

    def _close_sessions(self) -> None:
        for session in self._closing:
            self._engine.close_session(session)
            self._ran.pop(session, None)
        self._closing.clear()


def _refusal(segment: Segment, reason: str, fatal: bool) -> Refused:
    return Refused(segment.session, segment.epoch, segment.attempt, reason[: limits.MAX_TEXT_CHARS], fatal)
