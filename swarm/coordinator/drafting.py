"""What a session drafts next, and how its drafts did. Pure; `session` sends and verifies.

Guesses are tokens for the positions after the certain ones. The first of them are the drafted tail of the log; the rest
were found but not sent, and are judged like the others: what plain decoding draws tells for free how good n-gram and a
late draft are.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.coordinator.events import Begin, Drafted
from swarm.coordinator.ngram import MAX_MATCH, NgramIndex
from swarm.coordinator.pace import Choice, Company, Pace, Speculation
from swarm.coordinator.requests import SpeculationUsage
from swarm.coordinator.times import MODEL, Times
from swarm.coordinator.token_log import TokenLog

PROBE_TOKENS = 1
"""Asked of the model where its speed is to be measured."""

PROBE_AFTER = 6
"""Tokens without the draft model until it is tried again, as long as it may pay. It reads what it missed; to try it
seldom would cost no less."""


@dataclass(frozen=True, slots=True)
class Guess:
    token: int
    source: int
    """As in `pace`."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do before the next window."""

    tokens: tuple[int, ...] = ()
    """Drafted: append them and send all that was not sent yet."""
    ask: int = 0
    """Ask the draft model for so many tokens."""
    wait: bool = False
    """Send nothing more for now."""
    chances: tuple[float, ...] = ()
    least: float = 0.0
    """As in `events.AskDraft`."""


SEND = Step()
WAIT = Step(wait=True)


class Tally:
    """Counts of one turn."""

    def __init__(self) -> None:
        self.windows = self.in_flight = self.rejected = self.wasted_rows = 0
        self.drafted: Counter[bool] = Counter()
        """By whether the model drafted them."""
        self.accepted: Counter[bool] = Counter()
        self.tokens = 0
        self.first_at = self.last_at = 0.0

    def sent(self, drafted: Sequence[Guess], in_flight: int) -> None:
        if drafted:
            self.windows += 1
            self.in_flight += in_flight
            self.drafted.update(guess.source <= MODEL for guess in drafted)

    def judged(self, guess: Guess, right: bool) -> None:
        self.accepted[guess.source <= MODEL] += right
        self.rejected += not right

    def emitted(self, now: float) -> None:
        self.first_at = self.first_at if self.tokens else now
        self.last_at = now
        self.tokens += 1

    def usage(self, plain_s: float | None) -> SpeculationUsage:
        """`plain_s`: a token of plain decoding, where it was measured."""
        timed = plain_s is not None and self.tokens > 1
        return SpeculationUsage(
            windows=self.windows,
            ngram_drafted=self.drafted[False],
            ngram_accepted=self.accepted[False],
            model_drafted=self.drafted[True],
            model_accepted=self.accepted[True],
            rejected=self.rejected,
            wasted_rows=self.wasted_rows,
            in_flight=self.in_flight,
            seconds=self.last_at - self.first_at if timed else 0.0,
            plain_seconds=plain_s * (self.tokens - 1) if plain_s is not None and timed else 0.0,
        )


class Drafting:
    """One for each session. It hears of every change of the log's certain part and of its drafted tail."""

    def __init__(
        self, settings: Speculation, stages: int, window: int, holds_stage: bool = True, times: Times | None = None
    ) -> None:
        """As `Pace` has it."""
        self._settings = settings
        self._window = window
        self._pace = Pace(settings, stages, window, holds_stage, times)
        self._index = NgramIndex()
        self._guesses: deque[Guess] = deque()
        self._stop_tokens: frozenset[int] = frozenset()
        self._tally = Tally()
        self._model = False
        """The draft model is there and able."""
        self._warm = False
        """It has read the prompt: from then on its times tell something."""
        self._warming = False
        self._asked: int | None = None
        """Position of the first token that the draft model was asked for."""
        self._asked_in_flight = False
        self._drafted_at = 0.0
        self._dry_at: int | None = None
        """Length of the log at which the draft model expects the end."""
        self._read = 0
        """Length of the log that the draft model has read."""
        self.waiting = False
        """The next window waits for the draft model."""

    @property
    def enabled(self) -> bool:
        return self._settings.enabled

    # --- what happens -----------------------------------------------------------------------------------------------

    def begin(self, turn: Begin, log: TokenLog, reused: int) -> None:
        """A turn whose prompt is in `log`; what is left of an earlier turn is within the first `reused` tokens."""
        kept = min(reused, len(self._index))
        self._tally = Tally()
        self._stop_tokens = turn.stop_tokens
        self._model = self._settings.enabled and self._settings.model and turn.draft_model
        self._warm = self._warming = False
        self._read, self._dry_at = 0, None
        self._pace.new_text()
        self.clear(kept)
        self._remember(log.ids(kept, len(log)))

    def new_ring(self, stages: int, holds_stage: bool, times: Times | None = None) -> None:
        """Whatever was measured of the old one tells nothing; how good drafts are, it does."""
        self._pace.measure_anew(stages, holds_stage, times)

    def share(self, company: Company) -> None:
        """Who runs on the ring beside this session."""
        self._pace.share(company)

    def clear(self, certain: int) -> None:
        """The log ends at `certain`: nothing is drafted any more, nothing asked."""
        self._guesses.clear()
        self._index.truncate(certain)
        self._asked, self.waiting = None, False

    def drawn(self, position: int, token: int, drafted: bool, now: float) -> None:
        """The target drew `token` at `position`, the first uncertain one; `drafted`: the log had a draft there."""
        guess = self._guesses.popleft() if self._guesses else None
        right = guess is not None and guess.token == token
        if guess is not None:
            self._pace.judged(guess.source, right)
            if not right:
                self._guesses.clear()
            if drafted:
                self._tally.judged(guess, right)
        if not (drafted and right):
            self._index.truncate(position)
            self._remember((token,))
        self._tally.emitted(now)

    def answered(self, rows: int, sent_at: float, now: float) -> None:
        """A window came back."""
        drafting = self._warming or self._asked is not None or sent_at < self._drafted_at
        self._pace.answered(rows, sent_at, now, drafting)

    def rejected(self, wasted_rows: int, lost_windows: int) -> None:
        """What the rejection of a draft cost: rows sent for nothing, windows that are still under way."""
        self._tally.wasted_rows += wasted_rows
        self._pace.lost(lost_windows)

    def drafted(self, answer: Drafted, current: bool, log: TokenLog, now: float) -> None:
        """The draft model answered; `current`: in this attempt. A late answer is compared with what was drawn since."""
        warm, self._warm, self._warming = self._warm, True, False
        self._drafted_at = now
        up_to_date, self._read = answer.start - self._read < PROBE_AFTER, answer.start
        if not current or answer.start != self._asked:
            return
        self._asked, self.waiting = None, False
        if not answer.tokens:
            self._model = False
            return
        if warm and not self._asked_in_flight and up_to_date:
            self._pace.drafted(len(answer.tokens), answer.seconds)
        tokens = self._before_stop(answer.tokens)
        sources = answer.sources or (MODEL,) * len(tokens)
        for position, token in enumerate(tokens[: len(log) - answer.start], answer.start):
            right = log.ids(position, position + 1) == (token,)
            if position < log.certain:
                self._pace.judged(sources[position - answer.start], right)
            if not right:
                return
        known = len(log) - answer.start
        news = [Guess(*pair) for pair in zip(tokens[known:], sources[known : len(tokens)], strict=True)]
        if len(tokens) < len(answer.tokens) and not news:
            self._dry_at = len(log)
        self._guess(log, news)

    def give_up_model(self) -> None:
        """It does not answer: no more of it in this turn."""
        self._model = False
        self._asked, self.waiting = None, False

    def usage(self) -> SpeculationUsage:
        """Of the turn so far."""
        return self._tally.usage(self._pace.plain_s)

    # --- what next --------------------------------------------------------------------------------------------------

    def next(self, log: TokenLog, in_flight: int, room: int) -> Step:
        """Before a window is sent while `in_flight` others are; at most `room` tokens can still be drafted."""
        count = min(self._settings.max_k, room)
        if self.waiting:
            return WAIT
        if not self._settings.enabled or count < 1:
            return WAIT if in_flight else SEND
        guesses, choice = self._found(count)
        left = self._left(log)[:count]
        by_model = self._by_model(log, left, count)
        if left:
            depth = by_model.depth if by_model else 1
            by_model = self._pace.choose([guess.source for guess in left], depth=depth)
        if by_model is not None and (by_model.rate > choice.rate or (self._settings.fixed_k and not choice.k)):
            guesses, choice = left, by_model
        if in_flight and (choice.k == 0 or in_flight >= choice.depth):
            return WAIT
        if choice.k and not guesses:
            return self._ask(len(log), choice.k if self._settings.fixed_k else count, in_flight, choice.least)
        if not in_flight and guesses is not left and self._probe_is_due(log, choice):
            return self._ask(len(log), min(count, PROBE_TOKENS), in_flight)
        warm_up = self._warm_up(len(log))
        self._guess(log, guesses)
        drafts = guesses[: choice.k]
        self._remember([guess.token for guess in drafts])
        self._tally.sent(drafts, in_flight + 1)
        return Step(tuple(guess.token for guess in drafts), ask=warm_up)

    def _found(self, count: int) -> tuple[list[Guess], Choice]:
        """What n-gram offers, and how many of them are best."""
        match = self._index.match(count)
        guesses: list[Guess] = []
        if match is not None:
            tokens = self._before_stop(match.tokens)
            # Where the copy goes on to be right, its context grows with it.
            guesses = [Guess(token, min(match.length + i, MAX_MATCH)) for i, token in enumerate(tokens)]
        return guesses, self._pace.choose([guess.source for guess in guesses])

    def _by_model(self, log: TokenLog, left: Sequence[Guess], count: int) -> Choice | None:
        """How much of the draft model is best, where it has drafted or can be asked.

        What is left of its drafts is used before it is asked again, be it less than is best.
        """
        ready = self._warm or self._settings.fixed_k is not None
        able = self._model and ready and not self._warming and self._dry_at != len(log)
        choice = self._pace.ask(count) if left or able else None
        return choice if choice is not None and choice.k else None

    def _probe_is_due(self, log: TokenLog, choice: Choice) -> bool:
        """Its speed is measured with nothing else running: on one PC the ring and the draft model share a device.

        And while it has little to read: whole windows of copied tokens are not the time for it.
        """
        able = self._model and self._warm and self._dry_at != len(log)
        if not able or self._settings.fixed_k is not None or self._pace.plain_s is None:
            return False
        due = len(log) - self._read >= PROBE_AFTER if self._pace.model_measured else not choice.k
        return due and self._pace.promising(choice.rate)

    def _warm_up(self, position: int) -> int:
        """Tokens to ask for, unawaited, so that the model reads the prompt while the ring goes on."""
        if not self._model or self._warm or self._warming or not self._pace.promising():
            return 0
        self._asked, self._warming = position, True
        return 1

    def _ask(self, position: int, count: int, in_flight: int, least: float = 0.0) -> Step:
        self._asked, self._asked_in_flight, self.waiting = position, in_flight > 0, True
        return Step(ask=count, wait=True, chances=self._pace.confidence_chances if least else (), least=least)

    # --- small ones -------------------------------------------------------------------------------------------------

    def _guess(self, log: TokenLog, guesses: Sequence[Guess]) -> None:
        """For the positions after the log's end; those of its drafted tail stay."""
        while len(self._guesses) > len(log) - log.certain:
            self._guesses.pop()
        self._guesses.extend(guesses)

    def _left(self, log: TokenLog) -> list[Guess]:
        """What the model drafted behind the log's end."""
        return [guess for guess in list(self._guesses)[len(log) - log.certain :] if guess.source <= MODEL]

    def _remember(self, tokens: Sequence[int]) -> None:
        if self._settings.enabled and self._settings.ngram:
            self._index.extend(tokens)

    def _before_stop(self, tokens: Sequence[int]) -> list[int]:
        """Up to the first stop token: its row is never run, the row before it draws it."""
        return list(itertools.takewhile(lambda token: token not in self._stop_tokens, tokens))
