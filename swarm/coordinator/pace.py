"""How many tokens to draft, and how many windows to keep in flight. Pure; every session has its own.

The model of cost. A window with k drafted tokens is k + 1 rows, and c_i is the chance that its token i is the target's
where those before it are. What is measured:

- c: for each source of drafts, how many were accepted of those that were compared, the newest counting most.
- L(r): latency, seconds from sending r rows into an idle ring to their tokens, for each r that was used.
- s: the step, seconds between the answers to windows that follow one another closely, which is what the busiest stage
  takes. Until it is measured, L / stages.
- t: seconds to draft one token; 0 for n-gram.

One window at a time brings E(k) = 1 + c_1 + c_1 c_2 + … tokens and takes k t + L(k+1). For equal chances a, E(k) is
(1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, section 3).

With d > 1 in flight, windows follow one another until a token is rejected; what is in flight then is lost, and the
correction waits for the stage that runs it all the same. From one rejection to the next, with a the last c_i and S the
chance that the first window is accepted whole, its last draw too::

    tokens  = E(k) + c_1 … c_k a / (1 - a)
    seconds = k t + wait + L(k+1) + S / (1 - a^k) max(s, k t, L/d)

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
"""Assumed acceptance. It counts as much as `PRIOR_WEIGHT` measured tokens: gone after a few windows."""

PRIOR_WEIGHT = 3.0
MEMORY = 0.94
"""What is left of a judged token's weight after the next: about 16 tokens are remembered."""

MAX_CHANCE = 0.985
"""However often it was right so far, a draft is wrong some day."""

PRIOR_ROW = 0.05
"""Of one row's latency, for each row more, until two sizes were measured."""

NEW_SHARE = 0.25
"""Of a new measurement in a running mean."""

MAX_JUMP = 3.0
"""A measurement counts as at most so many times what was expected: a hiccup is not a trend."""

CLOCK_TICK_S = 1e-4
"""No latency is shorter: some clocks stand still for a while."""

FORGET_AFTER = 64
"""Windows after which the latency of a size that was not used since is guessed from the others again."""

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
    """Draft so many wherever something can be drafted, at once and whatever it costs (tests, benchmarks)."""
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
    """Seconds through an idle ring by rows: running means where measured, straight lines between and beyond."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, int]] = {}
        """Rows to mean and the number of the measurement it was last renewed by."""
        self.measured = 0

    def add(self, rows: int, seconds: float) -> None:
        self.measured += 1
        seconds = max(seconds, CLOCK_TICK_S)
        if self._points:
            seconds = min(seconds, MAX_JUMP * self.at(rows))
        if rows in self._points:
            mean = self._points[rows][0]
            seconds = mean + NEW_SHARE * (seconds - mean)
        self._points[rows] = (seconds, self.measured)
        oldest = self.measured - FORGET_AFTER
        self._points = {rows: point for rows, point in self._points.items() if point[1] > oldest}

    def at(self, rows: int) -> float:
        """Without any measurement: in units of one row's."""
        if not self._points:
            return 1.0 + PRIOR_ROW * (rows - 1)
        below = max((r for r in self._points if r <= rows), default=None)
        above = min((r for r in self._points if r >= rows), default=None)
        if below is None or above is None:
            nearest = min(self._points) if below is None else max(self._points)
            return max(self._points[nearest][0] + self._slope() * (rows - nearest), CLOCK_TICK_S)
        low, high = self._points[below][0], self._points[above][0]
        return low + (high - low) * (rows - below) / max(above - below, 1)

    def _slope(self) -> float:
        few, many = min(self._points), max(self._points)
        if few == many:
            return PRIOR_ROW * self._points[few][0] / (1.0 + PRIOR_ROW * (few - 1))
        return max(0.0, (self._points[many][0] - self._points[few][0]) / (many - few))


class Pace:
    def __init__(self, settings: Speculation, stages: int, window: int) -> None:
        """`window`: windows in flight that the session allows."""
        self._settings = settings
        self._window = window
        self._counts: dict[int, tuple[float, float]] = {}
        """Source to the weights of accepted and of judged tokens."""
        self.token_s: float | None = None
        """To draft one token with the model."""
        self.new_ring(stages)

    def new_ring(self, stages: int) -> None:
        """Begin to measure anew; how good drafts are stays known."""
        self._stages = max(1, stages)
        self._latency = Latency()
        self._step_share = 1.0 / self._stages
        """The step in parts of the latency of as many rows."""
        self._answered_at = 0.0
        self._disturbed = False

    @property
    def measured(self) -> bool:
        return self._latency.measured >= PLAIN_WINDOWS

    @property
    def plain_s(self) -> float:
        """A token of plain decoding."""
        return self._latency.at(1)

    # --- measuring --------------------------------------------------------------------------------------------------

    def judged(self, source: int, accepted: bool) -> None:
        """A draft of `source` was compared with what the target drew."""
        right, all_ = self._counts.get(source, (0.0, 0.0))
        self._counts[source] = (right * MEMORY + accepted, all_ * MEMORY + 1.0)

    def chance(self, source: int) -> float:
        right, all_ = self._counts.get(source, (0.0, 0.0))
        return min(MAX_CHANCE, (PRIOR_CHANCE[source] * PRIOR_WEIGHT + right) / (PRIOR_WEIGHT + all_))

    def drafted(self, tokens: int, seconds: float) -> None:
        """The model drafted `tokens` in `seconds`."""
        each = seconds / tokens
        if self.token_s is None:
            self.token_s = each
        else:
            self.token_s += NEW_SHARE * (min(each, MAX_JUMP * self.token_s) - self.token_s)

    def answered(self, rows: int, sent_at: float, now: float) -> None:
        """A window came back."""
        trip, usual = now - sent_at, self._latency.at(rows)
        in_an_idle_ring = sent_at >= self._answered_at
        if self._disturbed:
            self._disturbed = False
        elif in_an_idle_ring or trip <= QUEUED * usual:
            self._latency.add(rows, trip)
        else:
            share = min(1.0, (now - self._answered_at) / usual)
            self._step_share += NEW_SHARE * (share - self._step_share)
        self._answered_at = now

    def lost(self, windows: int) -> None:
        """So many windows in flight turned out useless: the next one may have to wait for them."""
        self._disturbed = windows > 0

    # --- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, sources: Sequence[int], token_s: float = 0.0) -> Choice:
        """For drafts from these sources, one for each token that can be drafted, at `token_s` seconds each."""
        candidates = list(self._candidates([self.chance(source) for source in sources], token_s))
        best = max(choice.rate for choice in candidates)
        return next(choice for choice in candidates if choice.rate >= ENOUGH * best)

    def _candidates(self, chances: Sequence[float], token_s: float) -> Iterator[Choice]:
        """Allowed choices, smallest first; `k` runs over the first so many of `chances`."""
        fixed = self._settings.fixed_k
        drafting = bool(chances) and (self.measured or fixed is not None)
        if not drafting or fixed is None:
            yield Choice(0, 1, 1.0 / self._latency.at(1))
        if not drafting:
            return
        tokens, whole, last = 1.0, 1.0, 0.0
        most = min(len(chances), fixed or self._settings.max_k)
        for k, last in enumerate(chances[:most], 1):
            whole *= last
            tokens += whole
            if fixed is None or k == most:
                for depth in self._depths():
                    yield Choice(k, depth, self._rate(k, depth, tokens, whole, last, k * token_s))

    def _depths(self) -> Sequence[int]:
        if self._settings.fixed_depth is not None:
            return (self._settings.fixed_depth,)
        if not self.measured:
            return (1,)
        return [depth for depth in DEPTHS if depth <= min(2 * self._stages, self._window)]

    def _rate(self, k: int, depth: int, tokens: float, whole: float, last: float, draft: float) -> float:
        """Tokens per second; `tokens` is E(k), `whole` the chance that all k are right, `draft` seconds."""
        latency = self._latency.at(k + 1)
        if depth == 1:
            return tokens / (draft + latency)
        step = self._step_share * latency
        interval = max(step, draft, latency / depth)
        wait = step * min(1.0, step / interval) * (1.0 if self._stages == 1 else 0.5)
        following = whole * last / (1.0 - last**k)
        return (tokens + whole * last / (1.0 - last)) / (draft + wait + latency + following * interval)
