"""The coordinator: takes requests, runs their sessions, keeps caches between turns. Any node, many at once."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup, TaskStatus

from swarm.coordinator.admission import Admission, Need
from swarm.coordinator.adoption import Adoptions
from swarm.coordinator.drafter import Drafter
from swarm.coordinator.events import Begin
from swarm.coordinator.histories import Histories
from swarm.coordinator.idle import IdleLimits, IdlePool
from swarm.coordinator.language import LanguageModel
from swarm.coordinator.meter import TokenMeter
from swarm.coordinator.pace import Company, Speculation
from swarm.coordinator.placement import choose_ring
from swarm.coordinator.requests import NO_SPECULATION, Delta, GenerateRequest, SpeculationUsage, in_line
from swarm.coordinator.session import (
    Counters,
    Session,
    SessionLimits,
    State,
    context_limit,
    prompt_too_long,
)
from swarm.coordinator.stops import StopMatcher
from swarm.coordinator.times import Memory
from swarm.coordinator.turn import Turn
from swarm.protocol import limits
from swarm.protocol.errors import CapacityError, SessionError, SwarmError, UsageError
from swarm.protocol.ids import NodeId, SessionId
from swarm.protocol.messages import Adopted, CloseSession, Drawn, Message, Refused, RowKind
from swarm.protocol.plan import Plan
from swarm.ring.port import RingLoad, RingPort

MAX_TELLERS = 256
"""Sessions about whose end the stages are being told at once; each ends within `CoordinatorLimits.close_s`."""


@dataclass(frozen=True, slots=True)
class CoordinatorLimits:
    session: SessionLimits = field(default_factory=SessionLimits)
    idle: IdleLimits = field(default_factory=IdleLimits)
    speculation: Speculation = field(default_factory=Speculation)
    answers: int = 64
    """Written at once on this node; each is a session at every stage (see `limits.MAX_SESSIONS_PER_STAGE`)."""
    line_s: float = 1800.0
    """In line for room in the ring's KV cache; then the question is refused."""
    close_s: float = 5.0
    """For telling the stages that a session is closed; they free what they hold for a lost node by themselves."""


@dataclass(frozen=True, slots=True)
class CoordinatorStats:
    """For the snapshot."""

    running: int
    """Answers being written."""
    waiting: int
    """Of those: without a ring, or between two tries."""
    queued: int
    """Questions in line for the ring's KV cache; not among the running ones."""
    idle: int
    """Sessions kept between turns."""
    tokens_per_second: float
    replays: int
    mismatches: int
    """Replayed tokens that the ring drew differently: exactness is broken somewhere."""
    stale: int
    speculation: SpeculationUsage = NO_SPECULATION
    """Of all answers so far, those being written too."""
    ring_sessions: tuple[int, ...] = ()
    """Of `running`, those on each ring of the plan."""


class Coordinator:
    """Implements `requests.Generator` and `ring.port.RingListener`. `run` owns its tasks."""

    def __init__(
        self,
        ring: RingPort,
        limits: CoordinatorLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring = ring
        self._limits = limits or CoordinatorLimits()
        self._clock = clock
        self._model: LanguageModel | None = None
        self._drafter: Drafter | None = None
        self._speculation = NO_SPECULATION
        """Of the answers that ended."""
        self._turns: dict[SessionId, Turn] = {}
        self._idle = IdlePool(self._limits.idle)
        self._histories = Histories(self._limits.idle.seconds)
        self._counters = Counters()
        self._memory = Memory()
        self._meter = TokenMeter()
        self._adoptions = Adoptions(ring)
        self._admission = Admission()
        self._plan = ring.plan
        self._requests = 0
        self._numbers = 0
        self._sessions = 0
        self._tellers = 0
        self._tasks: TaskGroup | None = None
        self._changed = anyio.Event()
        self._closing = False
        self._stopped = anyio.Event()

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `close` or cancelled; once."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._plan = self._ring.plan
                self._ring.attach(self)
                task_status.started()
                while not self._closing:
                    await self._expire_idle()
        finally:
            self._tasks = None
            self._closing = True
            self._stopped.set()

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, give running answers `drain_s` to end, cancel the rest, tell the stages.

        Call it while the ring still sends. Takes `drain_s` and `close_s` at most.
        """
        if self._tasks is None:
            return
        self._closing = True
        with anyio.move_on_after(drain_s):
            while self._turns:
                await self._changed.wait()
        for turn in tuple(self._turns.values()):
            turn.cancel(SessionError("this node is leaving", action="Ask another node."))
        while self._turns:
            await self._changed.wait()
        self._close_kept(self._idle.clear())
        self._notify()
        await self._stopped.wait()

    def set_model(self, model: LanguageModel | None) -> None:
        """The tokenizer of the swarm's model has been loaded, or there is none any more."""
        if model is not None and self._model is not None and model.manifest != self._model.manifest:
            self._histories.clear()
        self._model = model
        self._notify()

    def set_drafter(self, drafter: Drafter | None) -> None:
        """The draft model of the swarm's model is there, or not any more; counts from the next answer on."""
        self._drafter = drafter
        self._memory.new_draft()

    def stats(self) -> CoordinatorStats:
        return CoordinatorStats(
            running=len(self._turns),
            waiting=sum(turn.session.state is State.WAITING for turn in self._turns.values()),
            queued=self._admission.waiting,
            idle=len(self._idle),
            tokens_per_second=self._meter.rate(self._clock()),
            replays=self._counters.replays,
            mismatches=self._counters.mismatches,
            stale=self._counters.stale,
            speculation=sum((turn.session.speculation for turn in self._turns.values()), self._speculation),
            ring_sessions=self._ring_sessions(),
        )

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """See `requests.Generator`."""
        _check(request)
        started = self._clock()
        if self._closing or self._tasks is None:
            raise SessionError("this node takes no questions now", found="it is starting or leaving")
        if self._requests >= self._limits.answers:
            raise CapacityError(
                "too many answers at once on this node",
                expected=f"at most {self._limits.answers}",
                action="Try again in a moment, or ask another node.",
            )
        self._requests += 1
        self._numbers += 1
        number = self._numbers
        try:
            model = await self._wait_for_model()
            prompt = await self._encode(request, model)
            self._admission.join(number, Need(len(prompt), request.max_tokens), started)
            async with contextlib.aclosing(self._wait_in_line(number)) as places:
                async for place in places:
                    yield Delta(place=place)
            turn = self._open_turn(request, model, prompt, started)
            finished = False
            try:
                async for delta in turn.results:
                    finished = delta.finish is not None
                    yield delta
            finally:
                turn.cancel()
                turn.results.close()
            if not finished:
                raise turn.error or SessionError("the answer was broken off", found="this node stops")
        finally:
            self._requests -= 1
            self._admission.leave(number, self._clock())
            self._notify()

    async def _encode(self, request: GenerateRequest, model: LanguageModel) -> tuple[int, ...]:
        """The prompt's ids. Raises for one that no ring could answer."""
        messages = [(message.role, message.content) for message in request.messages]

        def encode() -> tuple[int, ...]:
            return tuple(model.tokenizer.encode(model.tokenizer.render_chat(messages)))

        prompt = await anyio.to_thread.run_sync(encode, abandon_on_cancel=True)
        if not prompt:
            raise UsageError("an empty prompt", expected="at least one token")
        limit = context_limit(model.context_tokens, self._plan)
        if len(prompt) >= limit:
            raise prompt_too_long(len(prompt), limit)
        self._admission.resize(_capacity(self._plan), model.context_tokens, self._clock())
        return prompt

    async def _wait_in_line(self, number: int) -> AsyncGenerator[int, None]:
        """The place in line, whenever it is another, and 0 at its end; nothing where there is no line."""
        told, deadline = 0, self._clock() + self._limits.line_s
        while (place := self._admission.place(number)) and not self._closing:
            if place != told:
                told = place
                yield place
            now = self._clock()
            if now >= deadline:
                raise SessionError(
                    "no room for this answer in time",
                    expected=f"room in the ring's KV cache within {self._limits.line_s:.0f} s",
                    found=in_line(place),
                    action="Ask again later, or add a PC.",
                )
            change = min(self._admission.next_change(now) or deadline, deadline)
            with anyio.move_on_after(max(0.0, change - now)):
                await self._changed.wait()
            self._admission.advance(self._clock())
        if told:
            yield 0

    def _open_turn(
        self, request: GenerateRequest, model: LanguageModel, prompt: tuple[int, ...], started: float
    ) -> Turn:
        if self._closing or self._tasks is None:
            raise SessionError("this node is leaving", action="Ask another node.")
        drafter = self._drafter if self._drafter is not None and self._drafter.available else None
        begin = Begin(
            prompt=prompt,
            model=model.manifest,
            context_tokens=model.context_tokens,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            stop_tokens=frozenset() if request.ignore_stop_tokens else model.tokenizer.stop_tokens,
            kinds=self._histories.kinds(prompt, started),
            draft_model=drafter is not None,
        )
        session = self._idle.take(prompt, begin.kinds) or self._new_session()
        # Of the answer only what is asked for is counted: a kept cache is worth more than a long answer's last part.
        self._make_room(session.plan, len(prompt) + (request.max_tokens or 0))
        text, stops = model.tokenizer.stream(), StopMatcher(request.stop)
        turn = Turn(self, session, begin, text, stops, self._clock, started, drafter)
        self._turns[session.id] = turn
        self._tasks.start_soon(turn.run, name=f"session {session.id}")
        return turn

    async def _wait_for_model(self) -> LanguageModel:
        wait_s = self._limits.session.wait_s
        with anyio.move_on_after(wait_s):
            while True:
                model = self._model
                if model is not None and (not self._plan.stages or self._plan.model == model.manifest):
                    return model
                await self._changed.wait()
        raise SessionError(
            "the swarm's model is not known here yet",
            expected=f"its tokenizer within {wait_s:.0f} s",
            action="See the progress on the dashboard and ask again.",
        )

    def _new_session(self) -> Session:
        self._sessions += 1
        name = SessionId(f"{self._ring.node[:8]}-{self._sessions:x}-{secrets.token_hex(4)}")
        settings = self._limits
        return Session(
            name, self._ring.node, self._place(), settings.session, self._counters, settings.speculation, self._memory
        )

    def _place(self) -> Plan:
        """The plan's ring for one more session; it stays there while the ring lasts."""
        if len(self._plan.rings) < 2:
            return self._plan.ring(0) if self._plan.stages else self._plan
        return self._plan.ring(choose_ring(self._plan, self._ring.node, self._ring_sessions(), self._ring.loads()))

    def _ring_sessions(self) -> tuple[int, ...]:
        """Answers being written on each ring of the plan in force."""
        plans = [turn.plan for turn in self._turns.values()]
        rings = Counter(plan.stages[0].node for plan in plans if self._plan.has_ring(plan))
        return tuple(rings[stages[0].node] for stages in self._plan.rings)

    # --- what the ring tells ----------------------------------------------------------------------------------------

    def plan_changed(self, plan: Plan) -> None:
        if plan.epoch == self._plan.epoch:
            return
        # The stages' caches went with their ring. To rebuild an idle session's would cost more than a prefill.
        for session in self._idle.keep(plan):
            self._forget_drafts(session.id)
        self._plan = plan
        self._adoptions.plan_changed()
        self._admission.resize(_capacity(plan), self._admission.context, self._clock())
        for turn in self._turns.values():
            if not plan.has_ring(turn.plan):
                turn.post_plan(self._place())
        self._notify()

    def drawn(self, message: Drawn) -> None:
        self._post(message)

    def adopted(self, message: Adopted) -> None:
        self._adoptions.answered(message)

    def refused(self, message: Refused) -> None:
        turn = self._turns.get(message.session)
        if turn is not None and message.epoch == turn.plan.epoch:
            # It may be a full KV cache: what is only kept gives way to what is being written.
            self._close_kept(self._idle.shrink(0, turn.plan))
            self._admission.full(self._clock())
            if message.attempt == turn.session.attempt and not message.fatal:
                # It begins anew, and holds nothing while it waits: two that each held a part would wait for each other.
                self._tell_closing(message.session, _nodes(turn.plan))
        self._post(message)

    def _post(self, message: Drawn | Refused) -> None:
        turn = self._turns.get(message.session)
        if turn is not None:
            turn.post(message)
            return
        self._counters.stale += 1
        ours = message.session.startswith(f"{self._ring.node[:8]}-")
        rings = [self._plan.ring(index) for index in range(len(self._plan.rings))]
        if ours and not self._idle.holds(message.session):
            # It was closed with a segment under way, which a stage has taken for a new beginning.
            for ring in (ring for ring in rings if ring.epoch == message.epoch):
                self.close_session(message.session, _nodes(ring))

    # --- what turns tell --------------------------------------------------------------------------------------------

    async def send(self, to: NodeId, message: Message) -> None:
        await self._ring.send(to, message)

    async def adopt(self, session: Session, begin: Begin) -> int:
        if len(session.log):  # it goes on behind its own cache
            return 0
        decoded = begin.kinds.find(RowKind.DECODE)
        prefilled = begin.prompt if decoded < 0 else begin.prompt[:decoded]
        try:
            return await self._adoptions.ask(session.id, session.plan, prefilled)
        except BaseException:
            self.close_session(session.id, _nodes(session.plan))
            raise

    def company(self, turn: Turn) -> Company:
        stages = turn.plan.stages
        here = sum(other.plan.stages == stages for other in self._turns.values()) - 1
        loads = zip(self._plan.rings, self._ring.loads(), strict=False)
        load = next((load for ring, load in loads if ring == stages), RingLoad())
        return Company(here + load.sessions, load.transit_ms / 1e3)

    def emitted(self, tokens: int) -> None:
        self._meter.add(tokens, self._clock())

    def turn_over(self, turn: Turn) -> None:
        session = turn.session
        del self._turns[session.id]
        self._speculation += session.speculation
        now = self._clock()
        if len(session.log):
            self._histories.remember(session.log, now)
        if session.state is State.IDLE and len(session.log) and self._plan.has_ring(session.plan):
            self._close_kept(self._idle.put(session, now))
            if self._plan.kv_tokens:
                self._close_kept(self._idle.shrink(int(self._plan.kv_tokens * self._limits.idle.share), session.plan))
        else:
            self._forget_drafts(session.id)
        self._notify()

    def close_session(self, session: SessionId, nodes: tuple[NodeId, ...]) -> None:
        self._forget_drafts(session)
        self._tell_closing(session, nodes)

    def _tell_closing(self, session: SessionId, nodes: tuple[NodeId, ...]) -> None:
        if self._tasks is not None and self._tellers < MAX_TELLERS:
            self._tellers += 1
            self._tasks.start_soon(self._tell_closed, session, nodes, name=f"close {session}")

    # --- housekeeping -----------------------------------------------------------------------------------------------

    async def _expire_idle(self) -> None:
        expiry = self._idle.next_expiry()
        with anyio.move_on_after(None if expiry is None else max(0.0, expiry - self._clock())):
            await self._changed.wait()
        self._close_kept(self._idle.expire(self._clock()))

    def _make_room(self, plan: Plan, tokens: int) -> None:
        """Kept sessions on the ring of `plan` give way where those running there and `tokens` more would not fit."""
        if plan.kv_tokens:
            turns = [turn for turn in self._turns.values() if turn.plan.stages == plan.stages]
            running = sum(len(turn.session.log) for turn in turns)
            self._close_kept(self._idle.shrink(plan.kv_tokens - running - tokens, plan))

    def _close_kept(self, sessions: list[Session]) -> None:
        for session in sessions:
            self.close_session(session.id, _nodes(session.plan))

    def _forget_drafts(self, session: SessionId) -> None:
        if self._drafter is not None:
            self._drafter.close_session(session)

    async def _tell_closed(self, session: SessionId, nodes: tuple[NodeId, ...]) -> None:
        async def tell(node: NodeId) -> None:
            # A node that cannot be reached frees what it holds when it is planned out.
            with contextlib.suppress(SwarmError):
                await self._ring.send(node, CloseSession(session))

        try:
            with anyio.move_on_after(self._limits.close_s):
                async with anyio.create_task_group() as tasks:
                    for node in nodes:
                        tasks.start_soon(tell, node)
        finally:
            self._tellers -= 1

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _nodes(plan: Plan) -> tuple[NodeId, ...]:
    return tuple(stage.node for stage in plan.stages)


def _capacity(plan: Plan) -> int:
    """Positions of KV cache of all rings together; 0 where the plan does not say."""
    return plan.kv_tokens * max(1, len(plan.rings))


def _check(request: GenerateRequest) -> None:
    """Raise `UsageError` for a request that makes no sense."""
    if not request.messages:
        raise UsageError("no messages", expected="at least one")
    characters = sum(len(message.content) for message in request.messages)
    if characters > limits.MAX_PROMPT_CHARS:
        raise UsageError(
            "the prompt is too long", expected=f"at most {limits.MAX_PROMPT_CHARS} characters", found=str(characters)
        )
    if request.max_tokens is not None and request.max_tokens < 1:
        raise UsageError("max_tokens out of range", expected="1 or more", found=str(request.max_tokens))
    if len(request.stop) > limits.MAX_STOP_STRINGS:
        raise UsageError(
            "too many stop strings", expected=f"at most {limits.MAX_STOP_STRINGS}", found=str(len(request.stop))
        )
    for stop in request.stop:
        if not 0 < len(stop) <= limits.MAX_STOP_CHARS:
            raise UsageError(
                "bad stop string", expected=f"1 to {limits.MAX_STOP_CHARS} characters", found=repr(stop)[:40]
            )
