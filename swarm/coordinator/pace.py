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
alone is then never bad for all. Sessions that draft nothing, or that copy, keep step: a stage runs m = max(1, U/N) of
them in one forward, so that k rows more cost k m rows: L(1 + k m) stands for L(k+1), and s U/m for s between windows.
Windows that a model drafts come at their own times. Each does ``work`` on the devices of the ring, N s and, where the
draft model's device holds a stage, k t; for the rest of ``alone = k t + L`` it is on links. On the average a window
meets each of the others once on its way, if that one is at a device just then; work that takes always the same time is
then half done (Pollaczek and Khinchine; the balanced job bounds of Zahorjan et al. 1982 with half the wait)::

    busy = (U - 1) work² / (2 N alone)

is added to a window's time, and with several in flight no device does more than U s + k t max(1, U/N) for each.
For 1 to 4 stages, 2 to 8 users, links of 0 and 50 ms it comes to 0.96 of a simulated cycle in the mean, with a standard
deviation of 0.09, as windows happen to meet. What is measured in company is longer too: t is divided by
``1 + (U - 1) / 4N``.

The choice is the smallest setting whose rate is within 2% of the best, in company within 8%: rows that bring nothing
are taken from others, and a window out of step holds them up. Plain decoding is k = 0. The first windows on a ring that
nobody has measured are plain: they measure what drafting has to beat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.coordinator.times import MODEL, PRIOR_CHANCE, Acceptance, Times

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

ENOUGH = 0.98
"""Of the best rate; see above."""

ENOUGH_IN_COMPANY = 0.92
"""The same on a shared ring, where the model of cost is off by a tenth, as windows happen to meet."""


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

    @property
    def promising(self) -> bool:
        """It may be tried: the model would pay if it were as good as assumed and, alone on the ring, a standard error
        better than found. In company a try breaks the others' step."""
        if self._settings.fixed_k is not None:
            return True
        chance = self.chance(MODEL)
        if not self._company.others:
            chance = max(chance, min(chance + self._acceptance.error(MODEL), PRIOR_CHANCE[MODEL]))
        chances = [chance] * self._settings.max_k
        best = max(choice.rate for choice in self._drafting_choices(chances, drafted=False))
        return self._enough * best > self._plain_rate

    @property
    def _enough(self) -> float:
        return ENOUGH_IN_COMPANY if self._company.others else ENOUGH

    @property
    def _crowding(self) -> float:
        """How many times longer a draft takes beside the work of others."""
        return 1.0 + self._company.others * min(1.0 / self._stages, self._step_share) / 4.0

    @property
    def _assumed_token_s(self) -> float:
        token_s = self._times.token_s
        return PRIOR_TOKEN * self._latency.at(1) if token_s is None else token_s

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

    def share(self, company: Company) -> None:
        """Who runs on the ring beside this session."""
        self._company = company

    # --- measuring --------------------------------------------------------------------------------------------------

    def judged(self, source: int, accepted: bool) -> None:
        """A draft of `source` was compared with what the target drew."""
        self._acceptance.judged(source, accepted)
        self._times.acceptance.judged(source, accepted)

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
        self._times.drafted(seconds / tokens / self._crowding)

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

    def choose(self, sources: Sequence[int], drafted: bool = True) -> Choice:
        """For drafts from these sources, one for each token that can be drafted; `drafted`: they are there already."""
        candidates = list(self._candidates([self.chance(source) for source in sources], drafted))
        best = max(choice.rate for choice in candidates)
        return next(choice for choice in candidates if choice.rate >= self._enough * best)

    def _candidates(self, chances: Sequence[float], drafted: bool) -> Iterator[Choice]:
        """Allowed choices, smallest first; `k` runs over the first so many of `chances`."""
        fixed = self._settings.fixed_k
        known = self._times.windows >= PLAIN_WINDOWS and (drafted or (self._latency.measured and self.model_measured))
        drafting = bool(chances) and (known or fixed is not None)
        if not drafting or fixed is None:
            yield Choice(0, 1, self._plain_rate)
        if drafting:
            yield from self._drafting_choices(chances, drafted)

    def _drafting_choices(self, chances: Sequence[float], drafted: bool) -> Iterator[Choice]:
        fixed, token_s = self._settings.fixed_k, self._assumed_token_s
        tokens, whole = 1.0, 1.0
        most = min(len(chances), fixed or self._settings.max_k)
        for k, last in enumerate(chances[:most], 1):
            whole *= last
            tokens += whole
            if fixed is None or k == most:
                drafts = _Drafts(k, tokens, whole, last)
                for depth in self._depths():
                    rate = self._copied_rate(drafts, depth) if drafted else self._drafted_rate(drafts, depth, token_s)
                    yield Choice(k, depth, rate)

    def _depths(self) -> Sequence[int]:
        if self._settings.fixed_depth is not None:
            return (self._settings.fixed_depth,)
        if not self._latency.measured:
            return (1,)
        return [depth for depth in DEPTHS if depth <= min(2 * self._stages, self._window)]

    def _copied_rate(self, drafts: _Drafts, depth: int) -> float:
        """Tokens per second with drafts that are there already: all sessions keep step."""
        users = self._company.others + 1
        crowd = max(1.0, users / self._stages)
        latency = self._latency.at(1 + drafts.k * crowd)
        step = self._step_share * latency
        return self._rate(drafts, depth, latency, step, max(users / crowd * step, latency / depth))

    def _drafted_rate(self, drafts: _Drafts, depth: int, token_s: float) -> float:
        """Tokens per second with drafts that the model makes, in so many seconds each: every window for itself."""
        others, stages = self._company.others, self._stages
        draft, latency = drafts.k * token_s, self._latency.at(drafts.k + 1)
        step, alone = self._step_share * latency, draft + latency
        shared = draft if self._holds_stage else 0.0
        work = shared + min(stages * step, latency)
        trip = alone + others * work * work / (2.0 * stages * alone)
        device = (others + 1) * step + max(1.0, (others + 1) / stages) * shared
        return self._rate(drafts, depth, trip, step, max(device, draft, trip / depth))

    def _rate(self, drafts: _Drafts, depth: int, trip: float, step: float, interval: float) -> float:
        """`trip`: seconds from one window to the next, one at a time; `interval`: with `depth` of them in flight."""
        if depth == 1:
            return drafts.tokens / trip
        wait = step * min(1.0, step / interval) * (1.0 if self._stages == 1 else 0.5)
        whole, last = drafts.whole, drafts.last
        following = whole * last / (1.0 - last**drafts.k)
        return (drafts.tokens + whole * last / (1.0 - last)) / (wait + trip + following * interval)
