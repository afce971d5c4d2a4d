"""One session on its coordinator: a pure state machine over the token log.

::

    IDLE ──Begin──► PREFILLING ──first token──► DECODING ──end──► IDLE ──new epoch──► DONE
                        │  ▲                      │  ▲
            no ring, refused, link lost           │  │ last row of the replay
                        ▼  │ ring / retry         ▼  │
                       WAITING ◄────────────── REPLAYING          any running state ──fatal, deadline──► DONE

Decoding goes in windows: the first row that was not run yet and drafted tokens behind it. The target's draw depends on
seed and position alone, so a draft is right where it equals the drawn token, at any temperature. While a window is
verified the next may be under way, from the last drafted position on. The first draw that differs from its draft is the
correction: certain, and the first row of a new attempt. Draws behind it followed a wrong history and are not looked at.

Segments of a prompt and of a replay ask for the token after their last row. It is known there; the answer serves as an
acknowledgement, so that few segments are in flight and the coordinator knows what the stages hold. It costs one row of
the head for each chunk. In a replay the answer also proves that the ring still computes what it did:
`Counters.mismatches`.

Leaving an attempt (a rejection, a replay, a wait, the end of a turn) raises the attempt number: whatever is still under
way is stale from then on, here and at the stages. It can only change rows behind those that are known to be held, so
the new attempt begins there at once. Its segments are numbered: stages run each directly after the one before
(`messages.Segment`), so a lost one is noticed and never replaced by rows of an older attempt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from swarm.coordinator.drafting import Drafting
from swarm.coordinator.events import (
    AskDraft,
    Begin,
    CloseEverywhere,
    Drafted,
    Effect,
    Emit,
    End,
    Event,
    Fail,
    Finish,
    LinkLost,
    PlanChanged,
    SendSegment,
)
from swarm.coordinator.flights import Flight, Flights
from swarm.coordinator.pace import Company, Speculation
from swarm.coordinator.requests import FinishReason, SpeculationUsage
from swarm.coordinator.times import Memory
from swarm.coordinator.token_log import Piece, TokenLog
from swarm.protocol.errors import CapacityError, SessionError, SwarmError
from swarm.protocol.ids import NodeId, SessionId
from swarm.protocol.messages import Drawn, Refused, RowKind, Segment
from swarm.protocol.plan import Plan


class State(Enum):
    IDLE = "idle"
    """Between turns; the stages keep its cache."""
    WAITING = "waiting"
    """For a ring, or for the next try."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    REPLAYING = "replaying"
    """Rebuilding the caches from the log in the middle of an answer."""
    DONE = "done"


RUNNING = (State.PREFILLING, State.DECODING, State.REPLAYING)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Sizes and deadlines of a session."""

    chunk_rows: int = 256
    """Of a prefill chunk. Larger: faster prompts; smaller: other sessions' decode rows pass sooner."""
    sibling_rows: int = 16
    """Decode rows in one segment of a replay."""
    window: int = 8
    """Segments in flight at most, however many stages there are."""
    wait_s: float = 120.0
    """Without any ring, or without any progress over refusals and new plans."""
    answer_s: float = 60.0
    """From sending to the answer, and …"""
    answer_row_s: float = 0.25
    """… for every row in flight: a slow PC prefills some ten rows a second while others wait their turn."""
    draft_s: float = 10.0
    """For the draft model, while nothing else is under way; then the answer goes on without it."""
    backoff_s: float = 0.25
    """Before the first new try in the same epoch; doubles."""
    backoff_max_s: float = 5.0


@dataclass(slots=True)
class Counters:
    """What happened to sessions, for the screens."""

    stale: int = 0
    """Answers of an old attempt or epoch, or to nothing that was asked."""
    replays: int = 0
    mismatches: int = 0
    """Replayed positions where the ring drew another token than the first time: exactness is broken somewhere."""


class Session:
    """`handle(event, now) -> effects`. `deadline` says when the next `Tick` is due."""

    def __init__(
        self,
        session: SessionId,
        node: NodeId,
        plan: Plan,
        limits: SessionLimits,
        counters: Counters,
        speculation: Speculation,
        memory: Memory | None = None,
    ) -> None:
        """`counters` and `memory` may be shared by many sessions."""
        self.id = session
        self.node = node
        self.plan = plan
        self.limits = limits
        self.log = TokenLog()
        self.state = State.IDLE
        self.attempt = 0
        self.counters = counters
        self.deadline: float | None = None
        self.reused = 0
        """Prompt tokens of this turn that the stages held already."""
        self._turn: Begin | None = None
        self._prompt_end = 0
        self._pieces: deque[Piece] = deque()
        self._flights = Flights()
        self._memory = memory or Memory()
        times = self._memory.of(plan.stages)
        self._drafting = Drafting(speculation, len(plan.stages), limits.window, self._holds_stage(), times)
        self._silent_tries = 0
        self._refusals = 0
        self._stuck_since: float | None = None
        self._retry_at: float | None = None
        self._reason = ""

    @property
    def speculation(self) -> SpeculationUsage:
        """What drafting did in this turn so far, or in the last one."""
        return self._drafting.usage()

    @property
    def speculates(self) -> bool:
        """It wants to know who shares its ring."""
        return self._drafting.enabled

    def share_ring(self, company: Company) -> None:
        """Who runs on our ring beside us; `handle` decides by the last word."""
        self._drafting.share(company)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event. Raises ``ValueError`` for `Begin` while a turn is running."""
        if isinstance(event, Begin):
            return self._begin(event, now)
        if isinstance(event, PlanChanged):
            return self._plan_changed(event.plan, now)
        if isinstance(event, Drawn):
            return self._drawn(event, now)
        if isinstance(event, Drafted):
            return self._drafted(event, now)
        if isinstance(event, Refused):
            return self._refused(event, now)
        if isinstance(event, LinkLost):
            return self._wait(event.reason, now) if self._current(event.attempt) else []
        if isinstance(event, End):
            return self._end(event.reason) if self._turn else []
        return self._tick(now)

    # --- events -----------------------------------------------------------------------------------------------------

    def _begin(self, turn: Begin, now: float) -> list[Effect]:
        if self.state is not State.IDLE or not turn.prompt:
            raise ValueError(f"a turn of {len(turn.prompt)} tokens cannot begin in state {self.state.value}")
        self._turn = turn
        self.reused = self.log.begin(turn.prompt, turn.kinds)
        if turn.held and not self.reused:
            self.log.mark_fed(turn.held)
            self.reused = turn.held
        self._prompt_end = len(self.log)
        self._drafting.begin(turn, self.log, self.reused)
        self._progress()
        return self._start(now)

    def _plan_changed(self, plan: Plan, now: float) -> list[Effect]:
        same = (plan.epoch, plan.stages) == (self.plan.epoch, self.plan.stages)
        self.plan = plan
        if same:
            return []
        if self._turn is None:
            self.state = State.DONE
            return []
        self._silent_tries = self._refusals = 0
        self._drafting.new_ring(len(plan.stages), self._holds_stage(), self._memory.of(plan.stages))
        if plan.stages and self._stuck_since is not None and now - self._stuck_since >= self.limits.wait_s:
            return self._fail(self._stuck())
        return self._replay(now)

    def _drawn(self, answer: Drawn, now: float) -> list[Effect]:
        current = self._current(answer.attempt) and answer.epoch == self.plan.epoch
        flight = self._flights.land(answer) if current else None
        if flight is None:
            self.counters.stale += 1
            return []
        self._progress()
        if answer.position > self.log.certain:
            # The answer before was lost. Its rows were run, but what was drawn there is not known.
            self._abandon()
            return self._start(now)
        if self.state is State.DECODING:
            self._drafting.answered(flight.piece.rows, flight.sent_at, now)
        return self._verify(flight, answer, now)

    def _drafted(self, draft: Drafted, now: float) -> list[Effect]:
        current = self.state is State.DECODING and draft.attempt == self.attempt
        self._drafting.drafted(draft, current, self.log, now)
        return self._pump(now) if current else []

    def _refused(self, refusal: Refused, now: float) -> list[Effect]:
        if not self._current(refusal.attempt) or refusal.epoch != self.plan.epoch:
            self.counters.stale += 1
            return []
        if refusal.fatal:
            return self._fail(SessionError("the ring cannot run this session", found=refusal.reason))
        return self._wait(refusal.reason, now)

    def _tick(self, now: float) -> list[Effect]:
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is State.WAITING:
            retry = self._retry_at is not None and now >= self._retry_at
            stuck = self._stuck_since is not None and now - self._stuck_since >= self.limits.wait_s
            return self._replay(now) if retry and not stuck else self._fail(self._stuck())
        if not self._flights:
            self._drafting.give_up_model()
            return self._pump(now)
        self._silent_tries += 1
        if self._silent_tries > 1:
            return self._fail(SessionError("the ring does not answer", found="no answer twice in a row"))
        self._note_stuck("no answer in time", now)
        return self._replay(now)

    # --- the attempt ------------------------------------------------------------------------------------------------

    def _replay(self, now: float) -> list[Effect]:
        """Begin again from the log's first position, in a new attempt."""
        self._abandon()
        self.log.lose_caches()
        self.counters.replays += 1
        return self._start(now)

    def _start(self, now: float) -> list[Effect]:
        turn = self._current_turn()
        if not self.plan.stages:
            return self._wait(_no_ring(self.plan), now)
        if self.plan.model != turn.model:
            return self._fail(SessionError("the swarm changed to another model", action="Ask again."))
        if len(self.log) >= self._context():
            return self._does_not_fit()
        self._pieces.extend(self.log.pieces(self.limits.chunk_rows, self.limits.sibling_rows))
        self.state = State.PREFILLING if len(self.log) == self._prompt_end else State.REPLAYING
        return self._pump(now)

    def _pump(self, now: float) -> list[Effect]:
        """Send while there is something to send and room in the window.

        Known rows keep every stage busy with one segment while one more waits at the first.
        """
        effects: list[Effect] = []
        while self._pieces and len(self._flights) < min(len(self.plan.stages) + 1, self.limits.window):
            effects.append(self._send(self._pieces.popleft(), 1, now))
        if self.state is State.DECODING:
            effects += self._speculate(now)
        if self._flights:
            self.deadline = now + self.limits.answer_s + self._flights.rows * self.limits.answer_row_s
        else:
            self.deadline = now + self.limits.draft_s
        return effects

    def _speculate(self, now: float) -> list[Effect]:
        """Send windows as drafting wants them: the last certain row if it was not run yet, and drafted ones."""
        effects: list[Effect] = []
        while len(self._flights) < self.limits.window:
            # The last token of the answer, and a drafted one in its place, are never run.
            step = self._drafting.next(self.log, len(self._flights), self._limit() - 1 - len(self.log))
            if step.ask:
                known = self.log.ids(0, len(self.log))
                sampling = self._current_turn().sampling
                how = step.chances, step.least, not step.wait
                effects.append(AskDraft(self.attempt, len(known), known, step.ask, sampling, *how))
            if step.wait:
                break
            start = self._flights.end(self.log.fed)
            self.log.append_drafted(step.tokens)
            window = Piece(start, len(self.log), RowKind.DECODE)
            effects.append(self._send(window, window.rows, now))
        return effects

    def _send(self, piece: Piece, wanted: int, now: float) -> SendSegment:
        flight = self._flights.send(piece, wanted, now)
        return SendSegment(self.plan.stages[0].node, self._segment(flight))

    def _segment(self, flight: Flight) -> Segment:
        piece = flight.piece
        return Segment(
            session=self.id,
            coordinator=self.node,
            epoch=self.plan.epoch,
            attempt=self.attempt,
            start=piece.start,
            kind=piece.kind,
            tokens=self.log.ids(piece.start, piece.end),
            wanted=flight.wanted,
            sampling=self._current_turn().sampling,
            number=flight.number,
        )

    def _verify(self, flight: Flight, answer: Drawn, now: float) -> list[Effect]:
        """Hold the drawn tokens against the log: known, drafted, or new; then go on, or end the answer."""
        turn, log = self._current_turn(), self.log
        emitted: list[int] = []
        agreed, finish = True, None
        for position, token in enumerate(answer.tokens, answer.position):
            if position < log.certain:
                differs = position >= self._prompt_end and (token,) != log.ids(position, position + 1)
                self.counters.mismatches += differs
                continue
            if token in turn.stop_tokens:
                finish = FinishReason.STOP
                break
            drafted = position < len(log)
            agreed = log.confirm(token)
            self._drafting.drawn(position, token, drafted, now)
            emitted.append(token)
            if log.certain >= self._limit():
                finish = FinishReason.LENGTH
            if finish is not None or not agreed:
                break
        sound = log.certain if agreed else log.certain - 1
        log.mark_fed(min(flight.piece.end, sound))
        effects: list[Effect] = [Emit(tuple(emitted))] if emitted else []
        if finish is not None:
            return effects + self._end(finish)
        if not agreed:
            self._drafting.rejected(self._flights.end(flight.piece.end) - sound, len(self._flights))
            self._abandon()
        if emitted:
            self.state = State.DECODING
        return self._pump(now) + effects

    def _abandon(self) -> None:
        self.attempt += 1
        self._pieces.clear()
        self._flights.clear()
        self.log.drop_drafted()
        self._drafting.clear(self.log.certain)
        self._retry_at = None
        self.deadline = None

    # --- waiting and ending -----------------------------------------------------------------------------------------

    def _wait(self, reason: str, now: float) -> list[Effect]:
        """For another plan; where this one has stages, also for a new try in this epoch."""
        self._abandon()
        self.log.lose_caches()
        self.state = State.WAITING
        stuck_since = self._note_stuck(reason, now)
        self.deadline = stuck_since + self.limits.wait_s
        if self.plan.stages:
            pause = min(self.limits.backoff_s * 2**self._refusals, self.limits.backoff_max_s)
            self._refusals = min(self._refusals + 1, 16)
            self._retry_at = now + pause
            self.deadline = min(self.deadline, self._retry_at)
        return []

    def _end(self, reason: FinishReason) -> list[Effect]:
        """The turn is over; what the stages are known to hold stays for the next one."""
        self._abandon()
        self._turn = None
        self.log.truncate(self.log.fed)
        if len(self.log) > 0:
            self.state = State.IDLE
            return [Finish(reason)]
        self.state = State.DONE
        return [self._close(), Finish(reason)]

    def _does_not_fit(self) -> list[Effect]:
        if len(self.log) > self._prompt_end:
            return self._end(FinishReason.LENGTH)
        return self._fail(prompt_too_long(self._prompt_end, self._context()))

    def _fail(self, error: SwarmError) -> list[Effect]:
        self._abandon()
        self._turn = None
        self.state = State.DONE
        return [self._close(), Fail(error)]

    def _close(self) -> CloseEverywhere:
        return CloseEverywhere(tuple(stage.node for stage in self.plan.stages))

    # --- small questions --------------------------------------------------------------------------------------------

    def _current(self, attempt: int) -> bool:
        return self.state in RUNNING and attempt == self.attempt

    def _current_turn(self) -> Begin:
        assert self._turn is not None
        return self._turn

    def _holds_stage(self) -> bool:
        return self.plan.stage_of(self.node) is not None

    def _context(self) -> int:
        return context_limit(self._current_turn().context_tokens, self.plan)

    def _limit(self) -> int:
        """Length of the log at which the answer ends."""
        most = self._current_turn().max_tokens
        return self._context() if most is None else min(self._context(), self._prompt_end + most)

    def _progress(self) -> None:
        self._silent_tries = self._refusals = 0
        self._stuck_since = None

    def _note_stuck(self, reason: str, now: float) -> float:
        self._reason = reason
        if self._stuck_since is None:
            self._stuck_since = now
        return self._stuck_since

    def _stuck(self) -> SessionError:
        return SessionError(
            f"no progress for {self.limits.wait_s:.0f} s", found=self._reason, action="Ask again when the ring is up."
        )

    def validate_state(self) -> None:
        """Assert the invariants; for tests and debugging."""
        self.log.check()
        assert (self._turn is None) == (self.state in (State.IDLE, State.DONE))
        assert (self.deadline is None) == (self._turn is None)
        assert (bool(self._flights) or self._drafting.waiting) == (self.state in RUNNING)
        assert len(self._flights) <= self.limits.window
        assert self.state is State.DECODING or len(self.log) == self.log.certain
        position = self.log.fed
        for piece in (*(flight.piece for flight in self._flights), *self._pieces):
            assert piece.start == position
            assert piece.end > piece.start
            position = piece.end
        if self.state in RUNNING:
            assert position == len(self.log) or (self._drafting.waiting and position == len(self.log) - 1)
        elif self._turn is None and self.state is State.IDLE:
            assert self.log.fed == len(self.log)


def context_limit(context_tokens: int, plan: Plan) -> int:
    """Positions that one session may fill: the model's context and the ring's KV cache (0: the plan does not say)."""
    return min(context_tokens, plan.kv_tokens or context_tokens)


def prompt_too_long(tokens: int, limit: int) -> CapacityError:
    return CapacityError(
        "the prompt is too long",
        expected=f"at most {limit - 1} tokens, so that an answer fits too",
        found=f"{tokens} tokens",
        action="Shorten the conversation.",
    )


def _no_ring(plan: Plan) -> str:
    if plan.missing_bytes:
        return f"the swarm lacks {plan.missing_bytes / 1e9:.1f} GB to hold the model"
    return plan.note or "no ring has formed yet"
