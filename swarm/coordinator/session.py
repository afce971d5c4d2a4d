"""One session on its coordinator: a pure state machine over the token log.

::

    IDLE ──Begin──► PREFILLING ──first token──► DECODING ──end──► IDLE ──new epoch──► DONE
                        │  ▲                      │  ▲
            no ring, refused, link lost           │  │ last row of the replay
                        ▼  │ ring / retry         ▼  │
                       WAITING ◄────────────── REPLAYING          any running state ──fatal, deadline──► DONE

Every segment asks for the token after its last row, inner chunks of a prompt and of a replay too. There the token is
known and the answer serves as an acknowledgement, so that few segments are in flight and the coordinator knows what
the stages hold. It costs one row of the head for each chunk. In a replay the answer also proves that the ring still
computes what it did: `Counters.mismatches`.

The first segment of an attempt travels alone where the stages may still hold rows of an older one: were it lost with a
link, the next would be taken for a rewind into the old rows. Once it is answered, a lost segment leaves a gap behind
it, which stages refuse.

Leaving an attempt (a replay, a wait, the end of a turn) raises the attempt number: whatever is still under way is
stale from then on, here and at the stages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from swarm.coordinator.events import (
    Begin,
    CloseEverywhere,
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
from swarm.coordinator.requests import FinishReason
from swarm.coordinator.token_log import Piece, TokenLog
from swarm.protocol.errors import CapacityError, SessionError, SwarmError
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.messages import Drawn, Refused, Segment
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


@dataclass(frozen=True, slots=True)
class _Flight:
    """A segment on its way. Its answer begins at the position after the first wanted row."""

    piece: Piece
    wanted: int

    @property
    def answer_position(self) -> int:
        return self.piece.end - self.wanted + 1


class Session:
    """`handle(event, now) -> effects`. `deadline` says when the next `Tick` is due."""

    def __init__(self, session: SessionId, node: NodeId, plan: Plan, limits: SessionLimits, counters: Counters) -> None:
        """`counters` may be shared by many sessions."""
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
        self._in_flight: deque[_Flight] = deque()
        self._used_epoch: Epoch | None = None
        """The last one in which a segment was sent."""
        self._alone = False
        self._silent_tries = 0
        self._refusals = 0
        self._stuck_since: float | None = None
        self._retry_at: float | None = None
        self._reason = ""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event. Raises ``ValueError`` for `Begin` while a turn is running."""
        if isinstance(event, Begin):
            return self._begin(event, now)
        if isinstance(event, PlanChanged):
            return self._plan_changed(event.plan, now)
        if isinstance(event, Drawn):
            return self._drawn(event, now)
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
        self.reused = self.log.reusable(turn.prompt)
        self.log.truncate(self.reused)
        self.log.append_prompt(turn.prompt[self.reused :])
        if turn.held and not self.reused:
            self.log.mark_fed(turn.held)
            self.reused = turn.held
        self._prompt_end = len(self.log)
        self._progress()
        return self._start(now)

    def _plan_changed(self, plan: Plan, now: float) -> list[Effect]:
        same, self.plan = plan.epoch == self.plan.epoch, plan
        if same:
            return []
        if self._turn is None:
            self.state = State.DONE
            return []
        self._silent_tries = self._refusals = 0
        if plan.stages and self._stuck_since is not None and now - self._stuck_since >= self.limits.wait_s:
            return self._fail(self._stuck())
        return self._replay(now)

    def _drawn(self, answer: Drawn, now: float) -> list[Effect]:
        flight = next((f for f in self._in_flight if f.answer_position == answer.position), None)
        current = self._current(answer.attempt) and answer.epoch == self.plan.epoch
        if flight is None or not current or len(answer.tokens) != flight.wanted:
            self.counters.stale += 1
            return []
        # Stages run a session's segments in order: an answer to a later one proves that the earlier ones were run.
        while self._in_flight[0] is not flight:
            self._in_flight.popleft()
        self._in_flight.popleft()
        self.log.mark_fed(flight.piece.end)
        self._alone = False
        self._progress()
        return self._verify(answer, now)

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
        self._alone, self._used_epoch = self._used_epoch == self.plan.epoch, self.plan.epoch
        self.state = State.PREFILLING if len(self.log) == self._prompt_end else State.REPLAYING
        return self._pump(now)

    def _pump(self, now: float) -> list[Effect]:
        """Send while there is something to send and room in the window.

        The window keeps every stage busy with one segment while one more waits at the first.
        """
        effects: list[Effect] = []
        window = 1 if self._alone else min(len(self.plan.stages) + 1, self.limits.window)
        while self._pieces and len(self._in_flight) < window:
            flight = _Flight(self._pieces.popleft(), wanted=1)
            self._in_flight.append(flight)
            effects.append(SendSegment(self.plan.stages[0].node, self._segment(flight)))
        rows = sum(flight.piece.rows for flight in self._in_flight)
        self.deadline = now + self.limits.answer_s + rows * self.limits.answer_row_s
        return effects

    def _segment(self, flight: _Flight) -> Segment:
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
        )

    def _verify(self, answer: Drawn, now: float) -> list[Effect]:
        """Hold the drawn tokens against the log, then go on: with what is left to feed, or with new tokens.

        Here a window of drafted tokens is to be decided, once there are any: a drafted row is a wanted row whose next
        token is in the log already but not certain.
        """
        new: list[int] = []
        for position, token in enumerate(answer.tokens, answer.position):
            if position == len(self.log) + len(new):
                new.append(token)
            elif position >= self._prompt_end and (token,) != self.log.ids(position, position + 1):
                self.counters.mismatches += 1
        if not new:
            return self._pump(now)
        return self._extend(new, now)

    def _extend(self, tokens: list[int], now: float) -> list[Effect]:
        """Append newly drawn tokens up to the end of the answer, and ask for the next."""
        turn, finish, kept = self._current_turn(), None, 0
        limit = self._context()
        if turn.max_tokens is not None:
            limit = min(limit, self._prompt_end + turn.max_tokens)
        for token in tokens:
            if token in turn.stop_tokens:
                finish = FinishReason.STOP
                break
            kept += 1
            if len(self.log) + kept >= limit:
                finish = FinishReason.LENGTH
                break
        self.log.append_drawn(tokens[:kept])
        emitted: list[Effect] = [Emit(tuple(tokens[:kept]))] if kept else []
        if finish is not None:
            return emitted + self._end(finish)
        self.state = State.DECODING
        self._pieces.extend(self.log.pieces(self.limits.chunk_rows, self.limits.sibling_rows))
        return self._pump(now) + emitted

    def _abandon(self) -> None:
        self.attempt += 1
        self._pieces.clear()
        self._in_flight.clear()
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

    def _context(self) -> int:
        return context_limit(self._current_turn().context_tokens, self.plan)

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
        assert bool(self._in_flight) == (self.state in RUNNING)
        assert len(self._in_flight) <= self.limits.window
        position = self.log.fed
        for piece in (*(flight.piece for flight in self._in_flight), *self._pieces):
            assert piece.start == position
            assert piece.end > piece.start
            position = piece.end
        if self.state in RUNNING:
            assert position == len(self.log)
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
