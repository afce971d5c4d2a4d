"""What a coordinator has measured of a ring and of its draft model. Sessions on one ring share it; pure.

So the next session begins where the last one ended: it knows what a window takes and how often drafts are right, and
drafts as soon as the draft model has read the prompt.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

from swarm.protocol.plan import Stage

MODEL = 0
"""The source that is the draft model, all its tokens together; below it are those by how sure it was of them
(`confidence`). Others are n-gram matches, by their length in tokens (`ngram.Match`)."""

MARGINS = (0.5, 1.0, 2.0, 3.0)
"""Logits; where one level of confidence ends and the next begins (`engine.sampling.draw_with_margin`)."""

LEVELS = tuple(range(MODEL, MODEL - len(MARGINS) - 2, -1))
"""`MODEL`, and all levels of confidence, the least sure first."""

PRIOR_CHANCE = dict(zip(LEVELS, (0.75, 0.4, 0.45, 0.65, 0.8, 0.97), strict=True))
PRIOR_CHANCE |= {2: 0.45, 3: 0.55, 4: 0.6, 5: 0.7, 6: 0.75, 7: 0.75, 8: 0.85}
"""Assumed acceptance, about what it was in the eight prompts of `bench.speculation`. It counts as much as
`PRIOR_WEIGHT` judged tokens, and fades as they do."""

PRIOR_WEIGHT = 4.0

RING_MEMORY = 0.995
"""What is left of a judged token's weight after the next, over all texts: about 200 tokens are remembered."""

MAX_CHANCE = 0.985
"""However often it was right so far, a draft is wrong some day."""

PRIOR_SLOPE = 0.04
"""Of the latency, for each row more than two: `bench.costs`, the 1.5B model in 1 to 4 stages."""

SLOPE_WEIGHT = 4.0
"""As much as two measurements at sizes three rows apart."""

LEAST_ROWS = 2

LATENCY_MEMORY = 0.95
"""What is left of a measured latency's weight after the next."""

HELD_UP = 1.5
"""Where a window is faster by this factor, those before it were held up, by others' prompts say: all of them together
count as one from then on. Plain decoding must not look slower than it is."""

NEW_SHARE = 0.25
"""Of a new measurement in a running mean."""

LATE_SHARE = 0.3
"""What a drafting time that is longer than expected counts beside a shorter one: whatever else a device does makes
times longer, never shorter."""

FIRST_DRAFTS = 4
"""Of so many drafting times at first the least counts."""

LATE_SHARE_IN_COMPANY = 0.02
"""The same where the stage of that device works for others too."""

MAX_JUMP = 3.0
"""A measurement counts as at most so many times what was expected: a hiccup is not a trend."""

CLOCK_TICK_S = 1e-4
"""No latency is shorter: some clocks stand still for a while."""

MAX_RINGS = 8
"""Rings remembered, the oldest go first."""


def confidence(margin: float) -> int:
    """The source of a token that was so far ahead of the next."""
    return MODEL - 1 - bisect.bisect_right(MARGINS, margin)


def row_cost(rows: float) -> float:
    """A forward of so many rows, in units of one with two (`bench.costs`, the 1.5B model in 1 to 3 stages on a CPU):
    up to four it waits for memory, from there on it computes."""
    return max(1.0 + PRIOR_SLOPE * (max(rows, LEAST_ROWS) - LEAST_ROWS), 0.55 + 0.14 * rows)


class Acceptance:
    """How often drafts of each source are right, the newest counting most."""

    def __init__(self, memory: float, assumed: Mapping[int, float]) -> None:
        """`memory`: what is left of a judged token's weight after the next."""
        self._memory = memory
        self._counts = {source: (chance * PRIOR_WEIGHT, PRIOR_WEIGHT) for source, chance in assumed.items()}
        """Source to the weights of accepted and of judged tokens."""

    def judged(self, source: int, accepted: bool) -> None:
        """A draft of `source` was compared with what the target drew."""
        right, all_ = self._counts[source]
        self._counts[source] = (right * self._memory + accepted, all_ * self._memory + 1.0)

    def chance(self, source: int) -> float:
        """That a draft of `source` is the target's token."""
        right, all_ = self._counts[source]
        return min(MAX_CHANCE, right / all_)

    def error(self, source: int) -> float:
        """The standard error of `chance`."""
        chance, (_, all_) = self.chance(source), self._counts[source]
        return math.sqrt(chance * (1.0 - chance) / all_)

    def chances(self) -> dict[int, float]:
        return {source: self.chance(source) for source in self._counts}

    def fade(self, source: int) -> None:
        """What is known counts for no more than what is assumed of any."""
        right, all_ = self._counts[source]
        share = min(1.0, PRIOR_WEIGHT / all_)
        self._counts[source] = right * share, all_ * share


class Latency:
    """Seconds through an idle ring by rows: a straight line through what was measured, the newest counting most.

    Least squares, with a little weight on a slope of `PRIOR_SLOPE`: one size alone tells nothing of it. A row alone is
    padded to two (`engine.paged`), so that the first drafted token of a window costs next to nothing.
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
        memory, rows = LATENCY_MEMORY, max(rows, LEAST_ROWS)
        if self.measured:
            seconds = min(seconds, MAX_JUMP * self.at(rows))
            if HELD_UP * seconds < self.at(rows):
                memory = min(memory, 1.0 / self._weight)
        old = self._weight * memory
        self._weight = old + 1.0
        far, late = rows - self._rows, max(seconds, CLOCK_TICK_S) - self._seconds
        self._rows += far / self._weight
        self._seconds += late / self._weight
        self._rows_rows = self._rows_rows * memory + old / self._weight * far * far
        self._rows_seconds = self._rows_seconds * memory + old / self._weight * far * late

    def at(self, rows: float) -> float:
        """Without any measurement: in units of one row's."""
        rows = max(rows, LEAST_ROWS)
        if not self.measured:
            return 1.0 + PRIOR_SLOPE * (rows - LEAST_ROWS)
        prior = PRIOR_SLOPE * self._seconds
        slope = (self._rows_seconds + SLOPE_WEIGHT * prior) / (self._rows_rows + SLOPE_WEIGHT)
        return max(self._seconds + max(0.0, slope) * (rows - self._rows), 0.25 * self._seconds)


class Times:
    """Of one ring, and of the draft model beside it."""

    def __init__(self) -> None:
        self.latency = Latency()
        self.windows = 0
        """Answers that were heard."""
        self.step_share: float | None = None
        """The step in parts of the latency of as many rows; None until it is measured."""
        self.new_draft()

    def new_draft(self) -> None:
        """Another draft model, of which nothing is known yet."""
        self.token_s: float | None = None
        """To draft one token with the model; None until it is measured."""
        self.acceptance = Acceptance(RING_MEMORY, PRIOR_CHANCE)
        self._drafts = 0

    def stepped(self, share: float, before: float) -> None:
        """An answer came `share` of a latency after the one before; `before`: what was believed."""
        self.step_share = before + NEW_SHARE * (min(1.0, share) - before)

    def drafted(self, each_s: float, *, alone: bool) -> None:
        """The model drafted tokens in so many seconds each, with nothing of the session in flight that may have shared
        its device; `alone`: nor of others."""
        usual = each_s if self.token_s is None else self.token_s
        self._drafts += 1
        if not self.draft_known:
            self.token_s = min(usual, each_s)
            return
        late = LATE_SHARE if alone else LATE_SHARE_IN_COMPANY
        share = NEW_SHARE * (late if each_s > usual else 1.0)
        self.token_s = usual + share * (min(each_s, MAX_JUMP * usual) - usual)

    @property
    def draft_known(self) -> bool:
        """It was measured often enough: the first times may have been held up by prompts of others."""
        return self._drafts >= FIRST_DRAFTS


class Memory:
    """The times of the newest rings, by their stages."""

    def __init__(self) -> None:
        self._rings: dict[tuple[Stage, ...], Times] = {}

    def of(self, stages: tuple[Stage, ...]) -> Times:
        times = self._rings.pop(stages, None) or Times()
        self._rings[stages] = times
        while len(self._rings) > MAX_RINGS:
            del self._rings[next(iter(self._rings))]
        return times

    def new_draft(self) -> None:
        """Another draft model, or the same one again."""
        for times in self._rings.values():
            times.new_draft()
