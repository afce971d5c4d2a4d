"""How many tokens to draft, and how many windows to keep in flight. Pure; every session has its own.

The model of cost. A window with k drafted tokens is k + 1 rows, and c_i is the chance that its token i is the target's
where those before it are. What is measured:

- c: for each source of drafts, how many were accepted of those that were compared, the newest counting most.
- L(r): latency, seconds from sending r rows into an idle ring to their tokens; a line through the trips of the windows.
- s: the step, seconds between the answers to windows that follow one another closely, which is what the busiest stage
  takes. Until it is measured, L / stages.
- t: seconds to draft one token while the ring is idle, and t' while windows are in flight: the draft model may share a
  device with a stage. 0 for n-gram.

One window at a time brings E(k) = 1 + c_1 + c_1 c_2 + … tokens and takes k t + L(k+1). For equal chances a, E(k) is
(1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, section 3).

With d > 1 in flight, windows follow one another until a token is rejected; what is in flight then is lost, and the
correction waits for the stage that runs it all the same. From one rejection to the next, with a the last c_i and S the
chance that the first window is accepted whole, its last draw too::

    tokens  = E(k) + c_1 … c_k a / (1 - a)
    seconds = k t + wait + L(k+1) + S / (1 - a^k) max(s, k t', L/d)

where `wait` is s on one stage and s/2 on several, as much of the time as the first stage is busy.

The choice is the smallest setting whose rate is within 2% of the best: rows that bring nothing are taken from others.
Plain decoding is k = 0. The first windows of a session are plain: they measure what drafting has to beat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_K = 10
"""Drafted tokens in a window."""

DEPTHS = (1, 2, 4, 8)
"""Windows in flight that are considered, up to two for each stage."""

MODEL = 0
"""The source that is the draft model. Others are n-gram matches, by their length in tokens (`ngram.Match`)."""

PLAIN_WINDOWS = 2
"""Measured before anything is drafted."""

PRIOR_CHANCE = {MODEL: 0.65, 2: 0.3, 3: 0.45, 4: 0.55, 5: 0.65, 6: 0.7, 7: 0.75, 8: 0.8}
"""Assumed acceptance. It counts as much as `PRIOR_WEIGHT` judged tokens, and fades as they do."""

PRIOR_WEIGHT = 4.0
MEMORY = 0.94
"""What is left of a judged token's weight after the next: about 16 tokens are remembered."""

MAX_CHANCE = 0.985
"""However often it was right so far, a draft is wrong some day."""

PRIOR_SLOPE = 0.04
"""Of the latency, for each row more."""

SLOPE_WEIGHT = 4.0
"""As much as two measurements at sizes three rows apart."""

LATENCY_MEMORY = 0.95
"""What is left of a measured latency's weight after the next."""

NEW_SHARE = 0.25
"""Of a new measurement in a running mean."""

MAX_JUMP = 3.0
"""A measurement counts as at most so many times what was expected: a hiccup is not a trend."""

CLOCK_TICK_S = 1e-4
"""No latency is shorter: some clocks stand still for a while."""

QUEUED = 1.15
"""A window whose answer took so much longer than in an idle ring has waited behind another."""

ENOUGH = 0.98
"""Of the best rate; see above."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a session may draft; the defaults adapt."""

    enabled: bool = True
    max_k: int = MAX_K
    fixed_k: int | None = None
    """1 or more: draft so many wherever something can be drafted, at once and whatever it costs (tests, benchmarks)."""
    fixed_depth: int | None = None
    ngram: bool = True
    model: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    k: int
    depth: int
    rate: float
    """Predicted tokens per second."""


class Latency:
    """Seconds through an idle ring by rows: a straight line through what was measured, the newest counting most.

    Least squares, with a little weight on a slope of `PRIOR_SLOPE`: one size alone tells nothing of it.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._seconds = 0.0
        """Weighted means, and sums of products of what differs from them."""
        self._rows_rows = self._rows_seconds = 0.0

    @property
    def measured(self) -> bool:
        return self._weight > 0.0

    def add(self, rows: int, seconds: float) -> None:
        if self.measured:
            seconds = min(seconds, MAX_JUMP * self.at(rows))
        old = self._weight * LATENCY_MEMORY
        self._weight = old + 1.0
        far, late = rows - self._rows, max(seconds, CLOCK_TICK_S) - self._seconds
        self._rows += far / self._weight
        self._seconds += late / self._weight
        self._rows_rows = self._rows_rows * LATENCY_MEMORY + old / self._weight * far * far
        self._rows_seconds = self._rows_seconds * LATENCY_MEMORY + old / self._weight * far * late

    def at(self, rows: int) -> float:
        """Without any measurement: in units of one row's."""
        if not self.measured:
            return 1.0 + PRIOR_SLOPE * (rows - 1)
        prior = PRIOR_SLOPE * self._seconds
        slope = (self._rows_seconds + SLOPE_WEIGHT * prior) / (self._rows_rows + SLOPE_WEIGHT)
        return max(self._seconds + max(0.0, slope) * (rows - self._rows), 0.25 * self._seconds)


class Pace:
    def __init__(self, settings: Speculation, stages: int, window: int) -> None:
        """`window`: windows in flight that the session allows."""
        self._settings = settings
        self._window = window
        self._counts = {source: (chance * PRIOR_WEIGHT, PRIOR_WEIGHT) for source, chance in PRIOR_CHANCE.items()}
        """Source to the weights of accepted and of judged tokens."""
        self._token_s: dict[bool, float] = {}
        """To draft one token with the model, by whether windows were in flight meanwhile: they may share a device."""
        self.measure_anew(stages)

    def measure_anew(self, stages: int) -> None:
        """Another ring: its times are not known yet; how good drafts are stays known."""
        self._stages = max(1, stages)
        self._latency = Latency()
        self._windows = 0
        self._step_share = 1.0 / self._stages
        """The step in parts of the latency of as many rows."""
        self._answered_at = 0.0
        self._disturbed = False
        """The next answer waits for windows that were lost."""

    @property
    def plain_s(self) -> float | None:
        """A token of plain decoding, where that is known."""
        return self._latency.at(1) if self._latency.measured else None

    @property
    def model_measured(self) -> bool:
        return bool(self._token_s)

    # --- measuring --------------------------------------------------------------------------------------------------

    def judged(self, source: int, accepted: bool) -> None:
        """A draft of `source` was compared with what the target drew."""
        right, all_ = self._counts[source]
        self._counts[source] = (right * MEMORY + accepted, all_ * MEMORY + 1.0)

    def chance(self, source: int) -> float:
        """That a draft of `source` is the target's token."""
        right, all_ = self._counts[source]
        return min(MAX_CHANCE, right / all_)

    def drafted(self, tokens: int, seconds: float, in_flight: bool) -> None:
        """The model drafted `tokens` in `seconds`, while windows were in flight or not."""
        each = seconds / tokens
        usual = self._token_s.setdefault(in_flight, each)
        self._token_s[in_flight] = usual + NEW_SHARE * (min(each, MAX_JUMP * usual) - usual)

    def answered(self, rows: int, sent_at: float, now: float, drafting: bool) -> None:
        """A window came back; `drafting`: meanwhile the model drafted, so that its trip is not that of an idle ring."""
        trip, usual, since = now - sent_at, self._latency.at(rows), now - self._answered_at
        queued = sent_at < self._answered_at and trip > QUEUED * usual
        if not self._disturbed and not queued and not drafting:
            self._latency.add(rows, trip)
        elif not self._disturbed and queued and self._latency.measured:
            self._step_share += NEW_SHARE * (min(1.0, since / usual) - self._step_share)
        self._disturbed = False
        self._answered_at = now
        self._windows += 1

    def lost(self, windows: int) -> None:
        """So many windows in flight turned out useless: the next one may have to wait for them."""
        self._disturbed = windows > 0

    # --- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, sources: Sequence[int], drafted: bool = True) -> Choice:
        """For drafts from these sources, one for each token that can be drafted; `drafted`: they are there already."""
        candidates = list(self._candidates([self.chance(source) for source in sources], drafted))
        best = max(choice.rate for choice in candidates)
        return next(choice for choice in candidates if choice.rate >= ENOUGH * best)

    def _candidates(self, chances: Sequence[float], drafted: bool) -> Iterator[Choice]:
        """Allowed choices, smallest first; `k` runs over the first so many of `chances`."""
        fixed = self._settings.fixed_k
        known = self._windows >= PLAIN_WINDOWS and (drafted or (self._latency.measured and self.model_measured))
        drafting = bool(chances) and (known or fixed is not None)
        if not drafting or fixed is None:
            yield Choice(0, 1, 1.0 / self._latency.at(1))
        if not drafting:
            return
        alone = 0.0 if drafted else self._token_s.get(False, 0.0)
        beside = 0.0 if drafted else self._token_s.get(True, alone)
        tokens, whole = 1.0, 1.0
        most = min(len(chances), fixed or self._settings.max_k)
        for k, last in enumerate(chances[:most], 1):
            whole *= last
            tokens += whole
            if fixed is None or k == most:
                for depth in self._depths():
                    rate = self._rate(k, depth, tokens, whole, last, (k * alone, k * beside))
                    yield Choice(k, depth, rate)

    def _depths(self) -> Sequence[int]:
        if self._settings.fixed_depth is not None:
            return (self._settings.fixed_depth,)
        if not self._latency.measured:
            return (1,)
        return [depth for depth in DEPTHS if depth <= min(2 * self._stages, self._window)]

    def _rate(
        self, k: int, depth: int, tokens: float, whole: float, last: float, draft_s: tuple[float, float]
    ) -> float:
        """Tokens per second; `tokens` is E(k), `whole` the chance that all k are right, `draft_s` alone and beside."""
        latency, (alone, beside) = self._latency.at(k + 1), draft_s
        if depth == 1:
            return tokens / (alone + latency)
        step = self._step_share * latency
        interval = max(step, beside, latency / depth)
        wait = step * min(1.0, step / interval) * (1.0 if self._stages == 1 else 0.5)
        following = whole * last / (1.0 - last**k)
        return (tokens + whole * last / (1.0 - last)) / (alone + wait + latency + following * interval)
