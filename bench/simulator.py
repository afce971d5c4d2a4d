"""A ring on a virtual clock: the real sessions, the real stage queues and real or timed engines, without a network.

Pure and repeatable: the same world gives the same answer to the last token and microsecond. What is real: `Session`
(windows, verification, pace), `StepScheduler` (order and batches), `DraftBook`, the engines. What stands for the rest:

- a PC is one `Core`; a forward and a draft that run at once share it evenly, as two threads do;
- a link delivers whole messages in order after a fixed delay, several may be under way;
- a forward costs what the caller's table says for its rows, of the draft model too.

With timed engines it predicts speeds (`bench.simulated`). With real ones it is a deterministic driver of the real
arithmetic, where each answer must be what plain decoding gives (`bench.exactness`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from bench.clock import Core, RowCosts, World
from bench.engines import Over
from swarm.coordinator.draft_book import DraftBook, Job
from swarm.coordinator.events import (
    AskDraft,
    Begin,
    CloseEverywhere,
    Drafted,
    Effect,
    Emit,
    Event,
    Fail,
    Finish,
    SendSegment,
    Tick,
)
from swarm.coordinator.pace import Company, Speculation
from swarm.coordinator.session import Counters, Session, SessionLimits
from swarm.coordinator.times import Memory
from swarm.engine.base import Engine, Output
from swarm.protocol.errors import CapacityError, SessionError
from swarm.protocol.ids import BlobId, Epoch, NodeId, SessionId
from swarm.protocol.messages import Drawn, Refused, RowKind, Segment
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.sampling import GREEDY, SamplingParams
from swarm.ring.schedule import StepScheduler

MODEL = BlobId("b" * 64)

CONTEXT_TOKENS = 1 << 20


@dataclass(slots=True)
class Load:
    """What a stage has run."""

    forwards: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    busy_s: float = 0.0


class SimulatedStage:
    """A stage's loop as `ring.worker.StageWorker` has it, without threads: take, check, run, pass on."""

    def __init__(self, ring: Ring, index: int, engine: Engine, costs: RowCosts) -> None:
        self.load = Load()
        self._ring = ring
        self._index = index
        self._engine = engine
        self._costs = costs
        self._queue = StepScheduler(ring.count, first=index == 0)
        self._ran: dict[SessionId, tuple[int, int, int]] = {}
        """Attempt, number and end of the segment that each session's cache ends with."""
        self._running = False

    def deliver(self, segment: Segment) -> None:
        self._queue.push(segment, self._ring.world.now)
        self._wake()

    def close_session(self, session: SessionId) -> None:
        self._queue.forget(session)
        self._ran.pop(session, None)
        self._engine.close_session(session)

    def _take(self) -> Iterator[Segment]:
        for segment in self._queue.take(self._engine.max_rows, self._ring.world.now):
            try:
                attempt, number, end = self._ran.get(segment.session, (-1, -1, -1))
                behind = (attempt, end) == (segment.attempt, segment.start) and 0 <= segment.number - number <= 1
                if segment.number and not behind:
                    raise SessionError("a gap in the attempt")
                self._engine.check(segment)
                yield segment
            except (CapacityError, SessionError) as error:
                fatal = isinstance(error, CapacityError)
                refused = Refused(segment.session, segment.epoch, segment.attempt, str(error), fatal)
                self._ring.answer(self._index, segment, refused)

    def _wake(self) -> None:
        """Run what is due, or come back when it is."""
        due, now = self._queue.due(), self._ring.world.now
        if self._running or due is None:
            return
        if due > now:
            self._ring.world.after(due - now, self._wake)
        else:
            self._run()

    def _run(self) -> None:
        batch = list(self._take())
        if not batch:
            self._queue.ran(batch, 0.0, self._ring.world.now)
            self._wake()
            return
        self._running = True
        outputs = self._engine.run(batch)
        self._ran.update((s.session, (s.attempt, s.number, s.start + len(s.tokens))) for s in batch)
        rows = sum(len(segment.tokens) for segment in batch)
        began = self._ring.world.now

        def done() -> None:
            self._running = False
            took_s = self._ring.world.now - began
            self._count(batch, took_s)
            self._queue.ran(batch, took_s * 1000, self._ring.world.now)
            for behind, (segment, output) in zip(itertools.count(len(batch) - 1, -1), zip(batch, outputs, strict=True)):
                if output.hidden is not None:
                    self._ring.pass_on(self._index, replace(segment, hidden=output.hidden, following=behind))
                elif output.drawn:
                    position = segment.start + len(segment.tokens) - segment.wanted + 1
                    drawn = Drawn(segment.session, segment.epoch, segment.attempt, position, output.drawn)
                    self._ring.answer(self._index, segment, drawn)
            self._wake()

        self._ring.cores[self._index].run(self._costs.of(rows) / 1000, done)

    def _count(self, batch: Sequence[Segment], seconds: float) -> None:
        self.load.forwards += 1
        self.load.busy_s += seconds
        for segment in batch:
            if segment.kind is RowKind.PREFILL:
                self.load.prefill_rows += len(segment.tokens)
            else:
                self.load.decode_rows += len(segment.tokens)


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model that every PC has."""

    make: Callable[[], Engine]
    costs: RowCosts


class SimulatedDraft:
    """A draft model's loop as `coordinator.draft_model.DraftModel` has it, on its coordinator's core."""

    def __init__(self, world: World, core: Core, engine: Engine, costs: RowCosts) -> None:
        self._world = world
        self._core = core
        self._engine = engine
        self._costs = costs
        self._book = DraftBook()
        self._waiting: dict[Job, tuple[float, Callable[[Drafted], None]]] = {}
        self._running = False

    def ask(self, session: SessionId, ask: AskDraft, then: Callable[[Drafted], None]) -> None:
        """`then` takes the answer, unless a newer ask of the session comes before."""
        job, older = self._book.put(session, ask)
        if older is not None:
            self._waiting.pop(older)
        self._waiting[job] = self._world.now, then
        if not self._running:
            self._step()

    def close_session(self, session: SessionId) -> None:
        job = self._book.close(session)
        if job is not None:
            self._waiting.pop(job)
        self._engine.close_session(session)

    def _step(self) -> None:
        batch = self._book.step(self._engine.max_rows)
        self._running = bool(batch)
        if not batch:
            return
        outputs = self._engine.run(batch)

        def done() -> None:
            for job in self._book.ran(batch, outputs):
                asked_s, then = self._waiting.pop(job)
                seconds = self._world.now - asked_s
                then(Drafted(job.ask.attempt, job.ask.start, tuple(job.drafted), seconds, tuple(job.sources)))
            self._step()

        self._core.run(self._costs.of(sum(len(segment.tokens) for segment in batch)) / 1000, done)


class Forgetful(Over[Engine]):
    """A draft that is right as often as is wanted: an engine, each of whose tokens stays with probability `agreement`.

    Over an engine that knows the target's tokens.
    """

    def __init__(self, engine: Engine, agreement: float) -> None:
        super().__init__(engine)
        self._agreement = agreement

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        return [
            Output(drawn=tuple(self._say(token, segment) for token in output.drawn))
            for segment, output in zip(batch, self._engine.run(batch), strict=True)
        ]

    def _say(self, token: int, segment: Segment) -> int:
        """The same at every asking."""
        place = f"{segment.session} {segment.start + len(segment.tokens)} {token}"
        return token if zlib.crc32(place.encode()) / 2**32 < self._agreement else abs(token - 1)


@dataclass(frozen=True, slots=True)
class Links:
    """What lies between two PCs."""

    delay_s: float = 0.0
    """One way."""
    message_s: float = 0.0
    """Our own cost of handing a message over (`hop_ms`)."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who asks once."""

    prompt: tuple[int, ...]
    tokens: int
    sampling: SamplingParams = GREEDY
    home: int = 0
    """Index of the PC that coordinates the answer."""
    arrives_s: float = 0.0
    limits: SessionLimits = field(default_factory=SessionLimits)
    speculation: Speculation = field(default_factory=Speculation)


@dataclass(slots=True)
class Answer:
    """What a user got, and when."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Of each token."""


class Ring:
    """Stages in ring order, the PC of each, and the links between them."""

    def __init__(
        self,
        world: World,
        engines: Sequence[Engine],
        costs: Sequence[RowCosts],
        links: Links,
        draft: Draft | None = None,
    ) -> None:
        self.world = world
        self.count = len(engines)
        self.cores = [Core(world) for _ in engines]
        self.memories = [Memory() for _ in engines]
        self.drafts = [SimulatedDraft(world, core, draft.make(), draft.costs) for core in self.cores] if draft else []
        self.stages = [SimulatedStage(self, i, *pair) for i, pair in enumerate(zip(engines, costs, strict=True))]
        nodes = [NodeId(f"{index:032x}") for index in range(len(engines))]
        stages = tuple(Stage(node, node[-4:], i, i + 1, "CPU", 1) for i, node in enumerate(nodes))
        self.plan = Plan(Epoch(1, nodes[0]), MODEL, stages)
        self._links = links
        self._conversations: dict[SessionId, Conversation] = {}

    def ask(self, users: Sequence[User]) -> list[Conversation]:
        """Let all users come, and go on until each has an answer."""
        found = [Conversation(self, number, user) for number, user in enumerate(users, len(self._conversations))]
        for conversation in found:
            self._conversations[conversation.session.id] = conversation
            self.world.after(conversation.user.arrives_s, conversation.begin)
        self.world.run(until=lambda: all(conversation.over for conversation in found))
        return found

    @property
    def running(self) -> int:
        """Answers being written."""
        return sum(one.running for one in self._conversations.values())

    def transit_s(self, home: int) -> float:
        """What a token of the PC `home` spends on links on its way round."""
        places = [home, *range(self.count), home]
        away = sum(origin != target for origin, target in itertools.pairwise(places))
        return away * (self._links.delay_s + self._links.message_s)

    def enter(self, home: int, segment: Segment) -> None:
        self._send(home, 0, partial(self.stages[0].deliver, segment))

    def pass_on(self, index: int, segment: Segment) -> None:
        self._send(index, index + 1, partial(self.stages[index + 1].deliver, segment))

    def answer(self, index: int, segment: Segment, message: Drawn | Refused) -> None:
        conversation = self._conversations[segment.session]
        self._send(index, conversation.user.home, partial(conversation.handle, message))

    def close_session(self, home: int, session: SessionId) -> None:
        if self.drafts:
            self.drafts[home].close_session(session)
        for index, stage in enumerate(self.stages):
            self._send(home, index, partial(stage.close_session, session))

    def _send(self, origin: int, target: int, arrive: Callable[[], None]) -> None:
        away = origin != target
        self.world.after(self._links.delay_s + self._links.message_s if away else 0.0, arrive)


class Conversation:
    """One user's session and its shell, as `coordinator.turn.Turn` is."""

    def __init__(self, ring: Ring, number: int, user: User) -> None:
        node = ring.plan.stages[user.home].node
        name = SessionId(f"{node[:8]}-{number:x}-00000000")
        self.user = user
        self.answer = Answer()
        self.session = Session(
            name, node, ring.plan, user.limits, Counters(), user.speculation, ring.memories[user.home]
        )
        self.over = False
        self.running = False
        self._ring = ring
        self._wakes: float | None = None

    def begin(self) -> None:
        user = self.user
        self.running = True
        drafts = bool(self._ring.drafts)
        self.handle(Begin(user.prompt, MODEL, CONTEXT_TOKENS, user.sampling, user.tokens, draft_model=drafts))

    def handle(self, event: Event) -> None:
        now = self._ring.world.now
        self.session.share_ring(Company(self._ring.running - 1, self._ring.transit_s(self.user.home)))
        for effect in self.session.handle(event, now):
            self._carry_out(effect)
        if self.over:
            return
        deadline = self.session.deadline
        if deadline is not None and (self._wakes is None or deadline < self._wakes):
            self._wakes = deadline
            self._ring.world.after(deadline - now, self._wake)

    def _wake(self) -> None:
        self._wakes = None
        if not self.over:
            self.handle(Tick())

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, SendSegment):
            self._ring.enter(self.user.home, effect.segment)
        elif isinstance(effect, Emit):
            self.answer.tokens += effect.tokens
            self.answer.times_s += [self._ring.world.now] * len(effect.tokens)
        elif isinstance(effect, AskDraft):
            self._ring.drafts[self.user.home].ask(self.session.id, effect, self.handle)
        elif isinstance(effect, CloseEverywhere):
            self._ring.close_session(self.user.home, self.session.id)
        elif isinstance(effect, Fail):
            raise effect.error
        elif isinstance(effect, Finish):
            self.over, self.running = True, False
            self._ring.close_session(self.user.home, self.session.id)
