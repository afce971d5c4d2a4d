"""The stage worker: batches the segments that wait, runs them off the event loop, passes the results on.

Receiving, computing and sending overlap: links push into the scheduler and the outbox sends while a forward runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import anyio

from swarm.engine.base import Engine, Output
from swarm.protocol import limits
from swarm.protocol.errors import CapacityError, DeadlineError, DeviceError, LinkClosedError, SessionError, SwarmError
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.messages import Adopt, Adopted, CloseSession, Drawn, Message, Refused, RowKind, Segment
from swarm.protocol.plan import Plan
from swarm.ring.beginnings import Beginnings
from swarm.ring.outbox import Outbox, Send
from swarm.ring.schedule import StepScheduler

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


_log = logging.getLogger(__name__)

NO_STATS = WorkerStats(0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of a stage, for whoever watches."""

    began: float
    ended: float
    """Seconds, ``time.monotonic``."""
    rows: tuple[tuple[SessionId, RowKind, int], ...]
    """What each segment brought."""


class StageWorker:
    """Runs one stage of one plan until it is cancelled. `run` owns its thread and tasks; the engine is its owner's."""

    def __init__(
        self,
        node: NodeId,
        plan: Plan,
        engine: Engine,
        send: Send,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        """`on_step` is told of every forward."""
        self._node = node
        self._plan = plan
        self._engine = engine
        self._send = send
        self._on_step = on_step
        self._outbox = Outbox(send, self._unsent)
        self._queue = StepScheduler(len(plan.stages), first=plan.stages[0].node == node)
        self._capacity = limits.MAX_CONTEXT_TOKENS
        """Positions of the whole KV cache; known from the start of `run`."""
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._over = False
        self._adoptions: deque[Adopt] = deque()
        self._beginnings = Beginnings()
        self._closing: set[SessionId] = set()
        self._owners: dict[SessionId, NodeId] = {}
        self._begun: dict[SessionId, int] = {}
        """The attempt that was run last of each session, by when its first one was."""
        self._used: dict[SessionId, float] = {}
        """When each session last sent something."""
        self._ran: dict[SessionId, tuple[int, int, int]] = {}
        """Attempt, number and end of the segment that each session's cache ends with."""
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

    @property
    def sessions(self) -> Set[SessionId]:
        """Those for which the stage holds something."""
        return self._owners.keys()

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
            self._refuse(segment, "another epoch", fatal=False)
            return
        if self._owners.get(segment.session, segment.coordinator) != segment.coordinator:
            self._refuse(segment, "the session belongs to another node", fatal=True)
            return
        try:
            self._check(segment)
        except (CapacityError, SessionError) as error:
            self._refuse(segment, str(error), fatal=isinstance(error, CapacityError))
            return
        while len(self._queue) >= limits.MAX_QUEUED_SEGMENTS:
            if self._over:
                await self._refuse_at_the_end(segment)
                return
            self._room.clear()
            await self._room.wait()
        # Not before: a session that was closed meanwhile would be run, and belong to nobody.
        if not self._own(segment.session, segment.coordinator):
            self._refuse(segment, f"all {limits.MAX_SESSIONS_PER_STAGE} sessions are busy", fatal=False)
            return
        now = time.monotonic()
        self._beginnings.delivered(segment, now)
        self._queue.push(segment, now)
        self._arrived.set()

    def adopt(self, message: Adopt) -> None:
        """Queue a question for what the cache holds already; a stage that is full of them holds nothing."""
        taken = self._owners.get(message.session, message.coordinator) != message.coordinator
        full = len(self._adoptions) >= limits.MAX_SESSIONS_PER_STAGE
        if taken or full or not self._own(message.session, message.coordinator):
            self._outbox.post(message.coordinator, Adopted(message.session, message.epoch, 0))
            return
        self._adoptions.append(message)
        self._arrived.set()

    def _own(self, session: SessionId, coordinator: NodeId) -> bool:
        """Note whose `session` is, and that it is used; where too many are held, the longest unused one goes.

        False where all of them are busy.
        """
        if session not in self._owners and len(self._owners) >= limits.MAX_SESSIONS_PER_STAGE:
            idle = self._idle()
            if not idle:
                return False
            self._forget(idle[0])
        self._owners[session] = coordinator
        self._used[session] = time.monotonic()
        return True

    def close_session(self, session: SessionId, sender: NodeId) -> None:
        """Free what the stage holds for `session`, as soon as no forward runs; for its owner or the stage before us.

        The next stage is told behind the rows that are on their way to it: they would begin the session anew there.
        """
        owner = self._owners.get(session)
        if owner is None or sender not in (owner, self.expected_sender(owner)):
            return
        self._forget(session)
        if self._next is not None:
            self._outbox.post(self._next, CloseSession(session))

    def _forget(self, session: SessionId) -> None:
        self._queue.forget(session)
        self._beginnings.forget(session)
        self._adoptions = deque(message for message in self._adoptions if message.session != session)
        self._owners.pop(session, None)
        self._used.pop(session, None)
        self._begun.pop(session, None)
        self._closing.add(session)
        self._arrived.set()

    def _idle(self, except_for: Set[SessionId] = frozenset()) -> list[SessionId]:
        """Sessions of which nothing waits, those that were unused longest first."""
        busy = except_for | self._queue.sessions | {message.session for message in self._adoptions}
        return sorted(self._used.keys() - busy, key=self._used.__getitem__)

    def close_coordinator(self, node: NodeId) -> None:
        """Free what the stage holds for sessions of a coordinator that is gone."""
        for session in [session for session, owner in self._owners.items() if owner == node]:
            self.close_session(session, node)

    async def run(self) -> None:
        """Serve until cancelled; then waits for the forward that runs, which is one step long."""
        self._engine.reset()
        self._capacity = self._engine.free_tokens
        executor = ThreadPoolExecutor(1, thread_name_prefix="stage")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._outbox.run)
                while True:
                    await self._wait_until_due()
                    batch = self._take()
                    began = time.monotonic()
                    results = await self._forward(executor, batch) if batch else []
                    ended = time.monotonic()
                    self._queue.ran(batch, (ended - began) * 1000, ended)
                    if batch and self._on_step is not None:
                        rows = tuple((segment.session, segment.kind, len(segment.tokens)) for segment in batch)
                        self._on_step(Step(began, ended, rows))
                    for to, message in results:
                        await self._post(to, message)
                    self._answer_adoptions()
        finally:
            self._over = True
            self._room.set()
            if self._running is not None:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([self._running])
            executor.shutdown(wait=False)

    async def _wait_until_due(self) -> None:
        """Until the next forward should begin."""
        while True:
            self._arrived.clear()
            self._close_sessions()
            due = self._queue.due()
            now = time.monotonic()
            wakes = self._answer_adoptions() if due is None else due
            if due is not None and due <= now:
                return
            with anyio.move_on_after(None if wakes is None else wakes - now):
                await self._arrived.wait()

    def _take(self) -> list[Segment]:
        """The next batch that the engine can run; what it cannot is refused."""
        batch: list[Segment] = []
        taken = self._queue.take(self._engine.max_rows, time.monotonic())
        self._make_room(taken)
        for segment in taken:
            try:
                self._check_order(segment)
                self._engine.check(segment)
                batch.append(segment)
            except (CapacityError, SessionError) as error:
                self._refuse(segment, str(error), fatal=isinstance(error, CapacityError))
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
        """What can be said before the segment's turn comes; the engine checks it then."""
        rows, end = len(segment.tokens), segment.start + len(segment.tokens)
        if not rows or not 0 <= segment.wanted <= rows or segment.start < 0 or end > limits.MAX_CONTEXT_TOKENS:
            raise SessionError(
                "a segment without sense", found=f"{rows} rows at {segment.start}, {segment.wanted} wanted"
            )
        if end > self._capacity:
            raise CapacityError(
                "a session longer than the KV cache", expected=f"at most {self._capacity} positions", found=str(end)
            )

    def _check_order(self, segment: Segment) -> None:
        """All but the first of an attempt run directly behind the one before, of which they may be a part."""
        attempt, number, end = self._ran.get(segment.session, (-1, -1, -1))
        behind = (attempt, end) == (segment.attempt, segment.start) and segment.number - 1 <= number <= segment.number
        if segment.number and not behind:
            raise SessionError("a gap in the attempt", found=f"segment {segment.number} without the one before")

    async def _forward(self, executor: ThreadPoolExecutor, batch: Sequence[Segment]) -> list[tuple[NodeId, Message]]:
        began = time.perf_counter()
        self._running = asyncio.get_running_loop().run_in_executor(executor, self._engine.run, batch)
        try:
            outputs = await asyncio.shield(self._running)
        except SwarmError as error:
            if isinstance(error, DeviceError):
                self.broken = str(error)
            if isinstance(error, CapacityError):
                # Nothing was run.
                left = self._preempt(batch, str(error))
                return await self._forward(executor, left) if left else []
            return [(s.coordinator, _refusal(s, str(error), fatal=False)) for s in batch]
        if any(segment.kind is RowKind.DECODE for segment in batch):
            self._steps.append((time.perf_counter() - began) * 1000)
        self._rows += sum(len(segment.tokens) for segment in batch)
        self._ran.update((s.session, (s.attempt, s.number, s.start + len(s.tokens))) for s in batch)
        for segment in batch:
            self._beginnings.ran(segment, time.monotonic())
        self._begun.update({segment.session: segment.attempt for segment in batch if segment.session in self._owners})
        return self._results(batch, outputs)

    def _preempt(self, batch: Sequence[Segment], reason: str) -> list[Segment]:
        """The cache is full: the session that began last gives way; what is left of `batch`.

        So the oldest always comes to its end, and sessions of different coordinators do not take turns at pushing each
        other out (vLLM's rule, Kwon et al. 2023, section 4.5). Not fatal: a full cache empties again.
        """
        attempts = self._begun | {segment.session: segment.attempt for segment in batch}
        youngest, attempt = next(reversed(attempts.items()))
        owner = self._owners.get(youngest, batch[-1].coordinator)
        self._forget(youngest)
        self._close_sessions()
        self._outbox.post(owner, _refused(youngest, self._plan.epoch, attempt, reason, fatal=False))
        return [segment for segment in batch if segment.session != youngest]

    def _answer_adoptions(self) -> float | None:
        """After a forward that runs or waits: it may compute just what is asked for.

        When to look again, where some wait for rows of others; None where all are answered.
        """
        asked, self._adoptions = self._adoptions, deque()
        now, wakes = time.monotonic(), []
        for message in asked:
            until = self._beginnings.awaited(message.tokens, now) if self._engine.shares else None
            if until is not None:
                self._adoptions.append(message)
                wakes.append(until)
                continue
            held = self._engine.adopt(message.session, message.tokens)
            self._beginnings.asked(message.session, message.tokens, held, now)
            onward = replace(message, tokens=message.tokens[:held])
            if not held or self._next is None or not self._outbox.post(self._next, onward):
                adopted = Adopted(message.session, message.epoch, held if self._next is None else 0)
                self._outbox.post(message.coordinator, adopted)
        return min(wakes, default=None)

    def _results(self, batch: Sequence[Segment], outputs: Sequence[Output]) -> list[tuple[NodeId, Message]]:
        """What comes of a forward; of sessions that were closed while it ran, nothing."""
        done = [
            (segment, output)
            for segment, output in zip(batch, outputs, strict=True)
            if segment.session not in self._closing
        ]
        if self._next is None:
            return [(segment.coordinator, _drawn(segment, output)) for segment, output in done if output.drawn]
        return [
            (self._next, replace(segment, hidden=output.hidden, following=len(done) - number))
            for number, (segment, output) in enumerate(done, 1)
        ]

    async def _post(self, to: NodeId, message: Message) -> None:
        """Queue a result. The next stage may make us wait; a coordinator that does not read loses its sessions."""
        if to == self._next:
            await self._outbox.wait_for_room(to)
        if not self._outbox.post(to, message):
            _log.warning("%s takes no answers: its sessions are closed here", to[:8])
            self.close_coordinator(to)

    def _unsent(self, to: NodeId, message: Message, reason: str) -> None:
        """A lost coordinator needs nothing any more. A lost next stage is a new epoch soon."""
        if isinstance(message, Segment):
            self._refuse(message, f"the next stage is gone: {reason}", fatal=False)

    def _refuse(self, segment: Segment, reason: str, *, fatal: bool) -> None:
        """Full of answers, the coordinator's queue has no room for this one either: `_post` sees to it."""
        self._outbox.post(segment.coordinator, _refusal(segment, reason, fatal))

    async def _refuse_at_the_end(self, segment: Segment) -> None:
        """The outbox does not run any more."""
        with contextlib.suppress(LinkClosedError, DeadlineError):
            await self._send(segment.coordinator, _refusal(segment, "this stage is not in force any more", False))

    def _close_sessions(self) -> None:
        for session in self._closing:
            self._engine.close_session(session)
            self._ran.pop(session, None)
        self._closing.clear()

    def validate_state(self) -> None:
        """Assert the invariants; for tests and debugging."""
        self._queue.validate_state()
        self._beginnings.validate_state()
        assert self._owners.keys() == self._used.keys()
        assert self._begun.keys() <= self._owners.keys()
        assert self._ran.keys() <= self._owners.keys() | self._closing
        assert self._queue.sessions <= self._owners.keys()
        assert {message.session for message in self._adoptions} <= self._owners.keys()


def _drawn(segment: Segment, output: Output) -> Drawn:
    position = segment.start + len(segment.tokens) - segment.wanted + 1
    return Drawn(segment.session, segment.epoch, segment.attempt, position, output.drawn)


def _refusal(segment: Segment, reason: str, fatal: bool) -> Refused:
    return _refused(segment.session, segment.epoch, segment.attempt, reason, fatal)


def _refused(session: SessionId, epoch: Epoch, attempt: int, reason: str, fatal: bool) -> Refused:
    return Refused(session, epoch, attempt, reason[: limits.MAX_TEXT_CHARS], fatal)
