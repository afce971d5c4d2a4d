"""How many tokens to draft, and how many windows to keep in flight. Pure; every session has its own.

The model of cost. A window with k drafted tokens is k + 1 rows, and c_i is the chance that its token i is the target's
where those before it are. What is measured:

- c: for each source of drafts, how many were accepted of those that were compared, the newest counting most.
- L(r): latency, seconds from sending r rows into an idle ring to their tokens; a line through the trips of the windows,
  from two rows on: a row alone is padded.
- s: the step, seconds between the answers to windows that follow one another closely, which is what the busiest stage
  takes: where they were queued, and where answers come closer than was believed. Until it is measured, what links leave
  of L, divided by the stages.
- t: seconds to draft one token with nothing in flight. 0 for n-gram.

L, s and t belong to the ring and are shared by its sessions (`times`); c begins with what other texts gave.

One window at a time brings E(k) = 1 + c_1 + c_1 c_2 + … tokens and takes k t + L(k+1). For equal chances a, E(k) is
(1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, section 3).

With d > 1 in flight, windows follow one another until a token is rejected; what is in flight then is lost, and the
correction waits for the stage that runs it all the same. From one rejection to the next, with a the last c_i and S the
chance that the first window is accepted whole, its last draw too::

    tokens  = E(k) + c_1 … c_k a / (1 - a)
    seconds = k t + wait + L(k+1) + S / (1 - a^k) max(s + k t, (k t + L)/d)

where `wait` is s on one stage and s/2 on several, as much of the time as the first stage is busy. A draft model whose
device holds a stage does the work of both for each window, s + k t; on a device of its own max(s, k t) stands for it.

The ring is shared by U sessions on N stages, and each choice is rated as if all of them made it: what is good for one
alone is then never bad for all. A stage runs what waits in one forward, about m = max(1, U/N) windows, so that for m
above 1 ``L(1) C(m (k+1)) / C(m)`` stands for L(k+1), where C(r) is the cost of a forward by its rows
(`times.row_cost`): the first few are nearly free and the others are not. Windows without drafts, or with copied ones,
keep step: s U/m stands for s between them. Windows that a model drafts come at their own times. Each does ``work`` on
the devices of the ring, N s and, where the draft model's device holds a stage, k t; for the rest of ``alone = k t + L``
it is on links. A window meets each of the others at a device as often as that one is there, ``work / (N trip)`` of the
time; half of its work is left then (Pollaczek and Khinchine), less what both do in one forward::

    trip = alone + 0.35 (U - 1) work² / (N trip)

and with several in flight no device does more than U s + k t max(1, U/N) for each. `bench.simulated --pace` holds it
against simulated rings with recorded texts. Several in flight are considered as long as they leave stages to others:
up to 2 N/U, one where everybody has a stage's worth of work in any case.

The choice is the smallest setting whose rate is within 2% of the best, in company within 4% and, for every window
that shares a forward, 5% more: rows that bring nothing are taken from others, and a window out of step holds them up.
Plain decoding is k = 0. The first windows on a ring that nobody has measured are plain: they measure what drafting has
to beat.

A model that is asked goes on token by token as long as it is sure enough: what it drew last, and by how much, tells
more than any average (`Pace.ask`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swarm.coordinator.times import LEVELS, MODEL, PRIOR_CHANCE, Acceptance, Times, row_cost

MAX_K = 10
"""Drafted tokens in a window."""

DEPTHS = (1, 2, 4, 8)
"""Windows in flight that are considered, up to two for each stage."""

PLAIN_WINDOWS = 2
"""Measured before anything is drafted, where the ring is not known from other sessions."""

MAX_TRANSIT = 0.95
"""Of a latency, what links may take of it: stages take something."""

PRIOR_TOKEN = 0.15
"""Of the latency of a row: what the model is assumed to take for a token before it is measured."""

MEMORY = 0.94
"""What is left of a judged token's weight after the next: about 16 tokens are remembered."""

QUEUED = 1.15
"""A window whose answer took so much longer than in an idle ring has waited behind another."""

MET = 0.35
"""Of another's work at a device, what a window waits that meets it there."""

ENOUGH = 0.98
"""Of the best rate; see above."""

ENOUGH_IN_COMPANY = 0.96
"""The same on a shared ring, where the model of cost is less exact, as windows happen to meet."""

ENOUGH_BY_CROWD = 0.05
"""Less for each window more in a forward: drafts make the groups of a ring unequal, and stages wait."""

LEAST_ENOUGH = 0.8

CONFIDENT = 1.08
"""What it brings to draft as far as the model is sure, over the best constant k (recorded texts; docs/log.md)."""

SURE = 0.7
"""In company: the least chance that all of a window's drafts are right, the next one too. Long windows that do not come
to much are in the way of others."""


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
class Company:
    """What else is known of the session's ring."""

    others: int = 0
    """Sessions that run on it beside this one."""
    transit_s: float = 0.0
    """Of a token's way through it, what the links take; 0 where that was not measured."""


@dataclass(frozen=True, slots=True)
class Choice:
    k: int
    depth: int
    rate: float
    """Predicted tokens per second."""
    least: float = 0.0
    """Of drafts that are to be made: the chance that all are right below which another is not worth its time."""


@dataclass(frozen=True, slots=True)
class _Drafts:
    """What can be expected of a window's drafts."""

    k: int
    tokens: float
    """E(k)."""
    whole: float
    """The chance that all are right."""
    last: float
    """The chance of the last one, where those before it are right."""


class Pace:
    def __init__(
        self, settings: Speculation, stages: int, window: int, holds_stage: bool = True, times: Times | None = None
    ) -> None:
        """`window`: windows in flight that the session allows; `holds_stage`: so does the draft model's device;
        `times`: what is known of the ring."""
        self._settings = settings
        self._window = window
        self._company = Company()
        self.measure_anew(stages, holds_stage, times)
        self._acceptance = Acceptance(MEMORY, self._times.acceptance.chances())

    def measure_anew(self, stages: int, holds_stage: bool, times: Times | None = None) -> None:
        """Another ring, with its own times; how good drafts are stays known."""
        self._stages = max(1, stages)
        self._holds_stage = holds_stage
        self._times = times or Times()
        self._latency = self._times.latency
        self._answered_at = 0.0
        self._disturbed = False
        """The next answer waits for windows that were lost."""

    @property
    def plain_s(self) -> float | None:
        """A token of plain decoding, where that is known."""
        return self._latency.at(1) if self._latency.measured else None

    @property
    def model_measured(self) -> bool:
        return self._times.token_s is not None

    def promising(self, rate: float = 0.0) -> bool:
        """The model may be tried: it would pay, over plain decoding and over `rate`, if it were as good as assumed and,
        alone on the ring, a standard error better than found. In company a try breaks the others' step."""
        if self._settings.fixed_k is not None:
            return True
        chance = self.chance(MODEL)
        if not self._company.others:
            chance = max(chance, min(chance + self._acceptance.error(MODEL), PRIOR_CHANCE[MODEL]))
        chances = [chance] * self._settings.max_k
        choices = self._drafting_choices(chances, self._hoped_token_s)
        best = max(choice.rate for choice in choices)
        return self._enough * best > max(rate, self._plain_rate)

    @property
    def _enough(self) -> float:
        if not self._company.others:
            return ENOUGH
        return max(ENOUGH_IN_COMPANY - ENOUGH_BY_CROWD * (self._crowd - 1.0), LEAST_ENOUGH)

    @property
    def _users(self) -> int:
        return self._company.others + 1

    @property
    def _crowd(self) -> float:
        """Windows in a forward."""
        return max(1.0, self._users / self._stages)

    @property
    def _assumed_token_s(self) -> float:
        token_s = self._times.token_s
        return PRIOR_TOKEN * self._latency.at(1) if token_s is None else token_s

    @property
    def _hoped_token_s(self) -> float:
        """The same where a try may still show better."""
        token_s = self._assumed_token_s
        return token_s if self._times.draft_known else min(token_s, PRIOR_TOKEN * self._latency.at(1))

    @property
    def _plain_rate(self) -> float:
        return 1.0 / self._latency.at(1)

    @property
    def _step_share(self) -> float:
        """The step in parts of the latency of as many rows: until it is measured, what the links leave of it."""
        if self._times.step_share is not None:
            return self._times.step_share
        whole = self._latency.at(1) if self._latency.measured else 0.0
        links = min(self._company.transit_s / whole, MAX_TRANSIT) if whole else 0.0
        return (1.0 - links) / self._stages

    @property
    def confidence_chances(self) -> tuple[float, ...]:
        """That a token of the model is right, by how sure it is of it, as `AskDraft` has them."""
        return tuple(self.chance(source) for source in LEVELS)

    def share(self, company: Company) -> None:
        """Who runs on the ring beside this session."""
        self._company = company

    # --- measuring --------------------------------------------------------------------------------------------------

    def judged(self, source: int, accepted: bool) -> None:
        """A draft of `source` was compared with what the target drew."""
        for one in {source, MODEL} if source < MODEL else {source}:
            self._acceptance.judged(one, accepted)
            self._times.acceptance.judged(one, accepted)

    def new_text(self) -> None:
        """How good the model was counts for no more than what is assumed of any."""
        self._acceptance.fade(MODEL)

    def chance(self, source: int) -> float:
        """That a draft of `source` is the target's token. In company, where changes of mind disturb others, what other
        texts say counts as much as this one."""
        own = self._acceptance.chance(source)
        return (own + self._times.acceptance.chance(source)) / 2.0 if self._company.others else own

    def drafted(self, tokens: int, seconds: float) -> None:
        """The model drafted `tokens` in `seconds`, with nothing in flight that may have shared its device."""
        self._times.drafted(seconds / tokens, alone=not self._company.others)

    def answered(self, rows: int, sent_at: float, now: float, drafting: bool) -> None:
        """A window came back; `drafting`: meanwhile the model drafted, so that its trip is not that of an idle ring."""
        trip, usual, since = now - sent_at, self._latency.at(rows), now - self._answered_at
        behind = sent_at < self._answered_at
        queued = behind and trip > QUEUED * usual
        if not self._disturbed and not queued and not drafting:
            self._latency.add(rows, trip)
        if not self._disturbed and behind and self._latency.measured and (queued or since < self._step_share * usual):
            self._times.stepped(since / usual, self._step_share)
        self._disturbed = False
        self._answered_at = now
        self._times.windows += 1

    def lost(self, windows: int) -> None:
        """So many windows in flight turned out useless: the next one may have to wait for them."""
        self._disturbed = windows > 0

    # --- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, sources: Sequence[int], drafted: bool = True, depth: int | None = None) -> Choice:
        """For drafts from these sources, one for each token that can be drafted; `drafted`: they are there already;
        `depth`: at most so many windows in flight."""
        candidates = list(self._candidates([self.chance(source) for source in sources], drafted, depth))
        best = max(choice.rate for choice in candidates)
        return next(choice for choice in candidates if choice.rate >= self._enough * best)

    def ask(self, count: int) -> Choice:
        """For drafts that the model would make, at most `count`.

        How many is for the model to say, token by token: another one is worth its time while the chance that it and
        all before it are right brings more tokens than that time brings otherwise, at the rate of the best constant k.
        """
        choice = self.choose([MODEL] * count, drafted=False)
        if not choice.k or self._settings.fixed_k is not None:
            return choice
        chance, k = self.chance(MODEL), max(1, min(choice.k, self._settings.max_k - 1))
        seconds = [
            _expected(chance, one.k) / one.rate
            for one in self._drafting_choices([chance] * (k + 1), self._assumed_token_s)
            if one.depth == choice.depth and one.k >= k
        ]
        rate = CONFIDENT * choice.rate
        least = rate * max(0.0, seconds[-1] - seconds[0])  # the price of one more, with k or as near as is allowed
        return replace(choice, rate=rate, least=max(least, SURE) if self._company.others else least)

    def _candidates(self, chances: Sequence[float], drafted: bool, depth: int | None) -> Iterator[Choice]:
        """Allowed choices, smallest first; `k` runs over the first so many of `chances`."""
        fixed = self._settings.fixed_k
        known = self._times.windows >= PLAIN_WINDOWS and (drafted or (self._latency.measured and self.model_measured))
        drafting = bool(chances) and (known or fixed is not None)
        if not drafting or fixed is None:
            yield Choice(0, 1, self._plain_rate)
        if drafting:
            for choice in self._drafting_choices(chances, None if drafted else self._assumed_token_s):
                if depth is None or choice.depth <= depth or self._settings.fixed_depth is not None:
                    yield choice

    def _drafting_choices(self, chances: Sequence[float], token_s: float | None) -> Iterator[Choice]:
        """`token_s`: seconds to draft one; None: they are there already."""
        fixed = self._settings.fixed_k
        tokens, whole = 1.0, 1.0
        most = min(len(chances), fixed or self._settings.max_k)
        for k, last in enumerate(chances[:most], 1):
            whole *= last
            tokens += whole
            if fixed is None or k == most:
                drafts = _Drafts(k, tokens, whole, last)
                for depth in self._depths():
                    if token_s is None:
                        rate = self._copied_rate(drafts, depth)
                    else:
                        rate = self._drafted_rate(drafts, depth, token_s)
                    yield Choice(k, depth, rate)

    def _depths(self) -> Sequence[int]:
        if self._settings.fixed_depth is not None:
            return (self._settings.fixed_depth,)
        if not self._latency.measured:
            return (1,)
        most = 2 * self._stages // self._users if self._users < self._stages or self._users == 1 else 1
        return [depth for depth in DEPTHS if depth <= min(most, self._window)]

    def _window_latency(self, k: int) -> float:
        """Of a window with k drafts, if everybody's had as many."""
        crowd = self._crowd
        if crowd == 1.0:
            return self._latency.at(k + 1)
        return self._latency.at(1) * row_cost(crowd * (k + 1)) / row_cost(crowd)

    def _copied_rate(self, drafts: _Drafts, depth: int) -> float:
        """Tokens per second with drafts that are there already: all sessions keep step."""
        latency = self._window_latency(drafts.k)
        step = self._step_share * latency
        return self._rate(drafts, depth, latency, step, max(self._users / self._crowd * step, latency / depth))

    def _drafted_rate(self, drafts: _Drafts, depth: int, token_s: float) -> float:
        """Tokens per second with drafts that the model makes, in so many seconds each: every window for itself."""
        draft, latency = drafts.k * token_s, self._window_latency(drafts.k)
        step, alone = self._step_share * latency, draft + latency
        shared = draft if self._holds_stage else 0.0
        work = shared + min(self._stages * step, latency)
        met = MET * self._company.others * work * work / self._stages
        trip = (alone + math.sqrt(alone * alone + 4.0 * met)) / 2.0
        device = self._users * step + self._crowd * shared
        return self._rate(drafts, depth, trip, step, max(device, draft, trip / depth))

    def _rate(self, drafts: _Drafts, depth: int, trip: float, step: float, interval: float) -> float:
        """`trip`: seconds from one window to the next, one at a time; `interval`: with `depth` of them in flight."""
        if depth == 1:
            return drafts.tokens / trip
        wait = step * min(1.0, step / interval) * (1.0 if self._stages == 1 else 0.5)
        whole, last = drafts.whole, drafts.last
        following = whole * last / (1.0 - last**drafts.k)
        return (drafts.tokens + whole * last / (1.0 - last)) / (wait + trip + following * interval)


def _expected(chance: float, k: int) -> float:
    """E(k) for equal chances."""
    return sum(chance**i for i in range(k + 1))
