"""One answer being written: the asynchronous shell around a session, from events to text."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from swarm.coordinator.drafter import Draft, Drafter
from swarm.coordinator.events import (
    AskDraft,
    Begin,
    CloseEverywhere,
    Drafted,
    Effect,
    Emit,
    End,
    Fail,
    Finish,
    LinkLost,
    PlanChanged,
    SendSegment,
    Tick,
)
from swarm.coordinator.language import TextPieces
from swarm.coordinator.pace import Company
from swarm.coordinator.requests import Delta, FinishReason, Usage
from swarm.coordinator.session import Session
from swarm.coordinator.stops import StopMatcher
from swarm.protocol.errors import DeadlineError, SwarmError
from swarm.protocol.ids import NodeId, SessionId
from swarm.protocol.messages import Drawn, Message, Refused
from swarm.protocol.plan import Plan

READER_BUFFER = 64
"""Deltas that wait for a reader; beyond them the session pauses, and so does its use of the ring."""

READER_TIMEOUT_S = 600.0
"""A reader that takes nothing for this long, while its buffer is full, loses its answer."""

INBOX = 64
"""Messages waiting for one session; honest stages send no more than a window of them."""


class TurnOwner(Protocol):
    """The coordinator, as its turns see it. All but `send` and `adopt` return at once."""

    async def send(self, to: NodeId, message: Message) -> None:
        """As `RingPort.send`."""

    async def adopt(self, session: Session, begin: Begin) -> int:
        """Positions of a new session's prompt that the stages hold already; takes a moment."""

    def company(self, turn: Turn) -> Company:
        """Who runs on the ring beside this turn's session, here and elsewhere."""

    def emitted(self, tokens: int) -> None:
        """So many tokens were drawn."""

    def close_session(self, session: SessionId, nodes: tuple[NodeId, ...]) -> None:
        """Tell `nodes` to free what they hold for `session`."""

    def turn_over(self, turn: Turn) -> None:
        """The session takes no more messages through this turn; told once."""


class Turn:
    """Runs one turn of a session as one task. `results` ends after the last delta, or with `error` set."""

    def __init__(
        self,
        owner: TurnOwner,
        session: Session,
        begin: Begin,
        text: TextPieces,
        stops: StopMatcher,
        clock: Callable[[], float],
        started: float,
        drafter: Drafter | None = None,
    ) -> None:
        """`started`: when the request came in, for the time to first token; `drafter` where `begin.draft_model`."""
        self.session = session
        self.error: Exception | None = None
        self._owner = owner
        self._begin = begin
        self._text = text
        self._stops = stops
        self._clock = clock
        self._times = [started]
        self._send, self.results = anyio.create_memory_object_stream[Delta](READER_BUFFER)
        self._inbox: deque[Drawn | Refused] = deque()
        self._drafter = drafter
        self._drafting = anyio.CancelScope()
        self._drafted: Drafted | None = None
        self._new_plan: Plan | None = None
        self._wake = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._over = False

    @property
    def plan(self) -> Plan:
        """What the session runs on, or will once it has read its news."""
        return self._new_plan or self.session.plan

    def post(self, message: Drawn | Refused) -> None:
        """A message for the session; beyond `INBOX` it is dropped, which the session's deadlines mend."""
        if len(self._inbox) < INBOX:
            self._inbox.append(message)
        self._wake.set()

    def post_plan(self, plan: Plan) -> None:
        self._new_plan = plan
        self._wake.set()

    def cancel(self, error: SwarmError | None = None) -> None:
        """Stop at once, sending nothing more; the reader gets `error`. Does nothing where the turn is over."""
        if not self._over:
            self.error = error
            self._scope.cancel()

    async def run(self) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    await self._write(tasks)
                    tasks.cancel_scope.cancel()
        finally:
            self._release()
            self._send.close()

    async def _write(self, tasks: TaskGroup) -> None:
        try:
            held = await self._owner.adopt(self.session, self._begin)
            self.session.share_ring(self._owner.company(self))
            effects = self.session.handle(replace(self._begin, held=held), self._clock())
            while not await self._carry_out(effects, tasks):
                effects = await self._next_effects()
        except anyio.BrokenResourceError:
            pass  # the reader is gone; `_release` cancels the session
        except Exception as error:
            # The reader raises it where it can be seen; other answers go on.
            self.error = error

    async def _next_effects(self) -> list[Effect]:
        if not self._inbox and self._new_plan is None and self._drafted is None:
            self._wake.clear()
            deadline = self.session.deadline
            with anyio.move_on_after(None if deadline is None else max(0.0, deadline - self._clock())):
                await self._wake.wait()
        if self.session.speculates:
            self.session.share_ring(self._owner.company(self))
        now = self._clock()
        effects: list[Effect] = []
        while self._inbox:
            effects += self.session.handle(self._inbox.popleft(), now)
        if self._drafted is not None:
            drafted, self._drafted = self._drafted, None
            effects += self.session.handle(drafted, now)
        if self._new_plan is not None:
            plan, self._new_plan = self._new_plan, None
            effects += self.session.handle(PlanChanged(plan), now)
        return effects + self.session.handle(Tick(), now)

    async def _carry_out(self, effects: list[Effect], tasks: TaskGroup) -> bool:
        """True when the turn is over. A reader that is slow holds up the next round, and so the session."""
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, SendSegment):
                queue.extend(await self._send_segment(effect))
            elif isinstance(effect, AskDraft):
                self._drafting.cancel()
                self._drafting, self._drafted = anyio.CancelScope(), None
                tasks.start_soon(self._draft, effect, self._drafting, name=f"draft {self.session.id}")
            elif isinstance(effect, Emit):
                await asyncio.sleep(0)  # the stage wants the rows of all its sessions before anybody reads text
                await self._emit(effect.tokens)
                if self._stops.found:
                    queue.extend(self.session.handle(End(FinishReason.STOP), self._clock()))
            elif isinstance(effect, CloseEverywhere):
                self._owner.close_session(self.session.id, effect.nodes)
            elif isinstance(effect, Finish):
                await self._finish(effect.reason)
                return True
            elif isinstance(effect, Fail):
                self.error = effect.error
                return True
        return False

    async def _send_segment(self, effect: SendSegment) -> list[Effect]:
        segment = effect.segment
        if self._new_plan is not None or segment.attempt != self.session.attempt:
            return []
        try:
            await self._owner.send(effect.to, segment)
        except SwarmError as error:
            return self.session.handle(LinkLost(segment.attempt, str(error)), self._clock())
        return []

    async def _draft(self, ask: AskDraft, scope: anyio.CancelScope) -> None:
        assert self._drafter is not None
        began = self._clock()
        with scope:
            try:
                draft = await self._drafter.draft(self.session.id, ask)
            except SwarmError:
                draft = Draft()  # the session goes on without it
            if not scope.cancel_called:
                self._drafted = Drafted(ask.attempt, ask.start, draft.tokens, self._clock() - began, draft.sources)
                self._wake.set()

    async def _emit(self, tokens: tuple[int, ...]) -> None:
        self._times += [self._clock()] * len(tokens)
        self._owner.emitted(len(tokens))
        text = "".join(self._text.push(token) for token in tokens)
        await self._hand_over(Delta(self._stops.push(text), tokens))

    async def _finish(self, reason: FinishReason) -> None:
        tail = self._stops.push(self._text.flush()) + self._stops.flush()
        if self._stops.found:
            reason = FinishReason.STOP
        # Before the reader knows: its next question may come at once and wants this session's cache.
        self._release()
        await self._hand_over(Delta(tail, finish=reason, usage=self._usage()))

    async def _hand_over(self, delta: Delta) -> None:
        with contextlib.suppress(anyio.WouldBlock):
            self._send.send_nowait(delta)
            return
        try:
            with anyio.fail_after(READER_TIMEOUT_S):
                await self._send.send(delta)
        except TimeoutError:
            raise DeadlineError("nobody reads this answer", expected=f"within {READER_TIMEOUT_S:.0f} s") from None

    def _release(self) -> None:
        if self._over:
            return
        self._over = True
        for effect in self.session.handle(End(FinishReason.CANCELLED), self._clock()):
            if isinstance(effect, CloseEverywhere):
                self._owner.close_session(self.session.id, effect.nodes)
        self._owner.turn_over(self)

    def _usage(self) -> Usage:
        times = self._times
        after_first = len(times) - 2
        return Usage(
            prompt_tokens=len(self._begin.prompt),
            completion_tokens=len(times) - 1,
            reused_tokens=self.session.reused,
            first_token_ms=(times[1] - times[0]) * 1e3 if len(times) > 1 else 0.0,
            token_ms=(times[-1] - times[1]) * 1e3 / after_first if after_first > 0 else 0.0,
            speculation=self.session.speculation,
        )
