"""The step scheduler: order, groups, prefill beside decoding; and the rate it reaches in a simulated ring."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind, Segment
from swarm.ring.schedule import (
    ALONE_MS,
    DUE,
    EASY_MS,
    LINGER,
    MAX_PREFILL_ROWS,
    MIN_PREFILL_ROWS,
    STRETCH,
    RowBudget,
    StepScheduler,
    divide,
)
from tests.ring.pipeline import Simulation, ideal_rate
from tests.ring.stage_harness import STRANGER, segment

# --- the rate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("users", [2, 3, 4, 8, 16, 32])
def test_the_steady_rate_is_near_the_ideal(stages: int, users: int) -> None:
    shares = [1 / stages] * stages
    ring = Simulation(shares, seed=users)
    for user in range(users):
        ring.join(user, at=user * 0.7)
    ring.run_until(6000)
    transit = (stages + 1) + 0.3 * stages * (-(-users // stages) - 1)
    round_ms = users / ideal_rate(shares, users)
    assert ring.rate(since=2000) >= 0.95 * users / (round_ms + transit)
    assert stages > 2 or ring.rate(since=2000) >= 0.9 * ideal_rate(shares, users)


@pytest.mark.parametrize("shares", [[17 / 28, 11 / 28], [11 / 28, 17 / 28], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
@pytest.mark.parametrize("users", [4, 8, 16])
def test_stages_of_different_size_are_held_up_by_none_but_the_largest(shares: list[float], users: int) -> None:
    ring = Simulation(shares)
    for user in range(users):
        ring.join(user)
    ring.run_until(6000)
    assert ring.rate(since=2000) >= 0.9 * ideal_rate(shares, users)


def test_users_who_come_and_go_leave_the_rate_near_the_ideal() -> None:
    ring = Simulation([0.5, 0.5])
    for user in range(12):
        ring.join(user, at=user * 300.0)
    ring.run_until(4000)
    for user in range(4):
        ring.leave(user)
        ring.run_until(ring.now + 400)
    begun = ring.now + 500
    ring.run_until(begun + 4000)
    assert ring.rate(since=begun) >= 0.9 * ideal_rate([0.5, 0.5], 8)


def test_one_user_waits_for_nobody() -> None:
    ring = Simulation([0.5, 0.5])
    ring.join(0)
    ring.run_until(4000)
    assert ring.rate(since=0) >= 0.95 * ideal_rate([0.5, 0.5], 1)


@pytest.mark.parametrize("users", [1, 3, 8])
def test_a_long_prompt_slows_nobody_down_by_more_than_half_and_still_moves_on(users: int) -> None:
    ring = Simulation([0.5, 0.5], window=3)
    for user in range(users):
        ring.join(user)
    ring.run_until(4000)
    ring.join(99, at=4000, prompt=2000)
    ring.run_until(60_000)
    assert ring.drawn[99], "the prompt got its first token"
    during = ring.drawn[99][0]
    gaps = {"before": [], "during": []}  # type: dict[str, list[float]]
    for user in range(users):
        for earlier, later in itertools.pairwise(ring.drawn[user]):
            if earlier > 1000 and later < 4000:
                gaps["before"].append(later - earlier)
            elif 4000 < later < during:
                gaps["during"].append(later - earlier)
    p95 = {name: statistics.quantiles(found, n=20)[-1] for name, found in gaps.items()}
    assert p95["during"] <= 2.0 * p95["before"]
    alone_ms = 2000 * 5.0
    assert during - 4000 <= 8 * alone_ms


# --- the queue ------------------------------------------------------------------------------------------------------

pushed = st.lists(
    st.builds(
        lambda session, rows, decode: segment(session, rows=rows, kind=RowKind.DECODE if decode else RowKind.PREFILL),
        st.integers(0, 4),
        st.integers(2, 300),
        st.booleans(),
    ),
    max_size=20,
)


def drain(scheduler: StepScheduler, max_rows: int = 1024) -> list[list[Segment]]:
    batches = []
    while len(scheduler):
        batches.append(scheduler.take(max_rows, 0.0))
        assert batches[-1], "something waits, so something runs"
        scheduler.ran(batches[-1], 1.0, 0.0)
        scheduler.validate_state()
    assert scheduler.take(max_rows, 0.0) == []
    return batches


@given(pushed, st.integers(300, 1024), st.integers(1, 4), st.booleans())
@settings(max_examples=100, derandomize=True)
def test_every_row_runs_once_in_order_and_within_bounds(
    segments: list[Segment], max_rows: int, stages: int, first: bool
) -> None:
    scheduler = StepScheduler(stages, first=first)
    for one in segments:
        scheduler.push(one, 0.0)
    batches = drain(scheduler, max_rows)
    ran = list(itertools.chain.from_iterable(batches))
    for session in {one.session for one in segments}:
        asked = [token for one in segments if one.session == session for token in one.tokens]
        assert [token for one in ran if one.session == session for token in one.tokens] == asked
    for batch in batches:
        assert len({one.session for one in batch}) == len(batch)
        kinds = [one.kind is RowKind.PREFILL for one in batch]
        assert kinds == sorted(kinds), "decode rows come first"
        assert sum(len(one.tokens) for one in batch) <= max_rows
        prefill = [len(one.tokens) for one in batch if one.kind is RowKind.PREFILL]
        assert len(prefill) <= 1 or sum(prefill) <= MAX_PREFILL_ROWS
        assert all(rows >= 2 for rows in prefill)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30))
@settings(max_examples=100, derandomize=True)
def test_only_the_newest_attempt_of_a_session_runs(order: list[tuple[int, int]]) -> None:
    scheduler = StepScheduler(2, first=True)
    expected: list[Segment] = []
    newest: dict[SessionId, int] = {}
    for session, attempt in order:
        one = segment(session, attempt=attempt)
        scheduler.push(one, 0.0)
        if attempt >= newest.get(one.session, 0):
            newest[one.session] = attempt
            expected = [s for s in expected if s.session != one.session or s.attempt == attempt] + [one]
    ran = itertools.chain.from_iterable(drain(scheduler))
    assert sorted(map(id, ran)) == sorted(map(id, expected))


def test_a_forgotten_session_may_begin_again() -> None:
    scheduler = StepScheduler(1, first=True)
    scheduler.push(segment(1, attempt=5), 0.0)
    scheduler.push(segment(2), 0.0)
    scheduler.forget(segment(1).session)
    assert [one.session for one in scheduler.take(10, 0.0)] == [segment(2).session]
    scheduler.push(segment(1, attempt=0), 0.0)
    assert len(scheduler) == 1


class Churn(RuleBasedStateMachine):
    """Sessions that send, are cancelled at any point, begin anew in another attempt, and refusals in between."""

    @initialize(stages=st.integers(1, 4), first=st.booleans())
    def begin(self, stages: int, first: bool) -> None:
        self.scheduler = StepScheduler(stages, first=first)
        self.now = 0.0
        self.batch: list[Segment] | None = None
        self.attempts = dict.fromkeys(range(5), 0)
        self.owed: dict[int, int] = dict.fromkeys(range(5), 0)

    @rule(session=st.integers(0, 4), rows=st.integers(1, 40), following=st.integers(0, 2))
    def send(self, session: int, rows: int, following: int) -> None:
        one = segment(session, 0, rows, attempt=self.attempts[session])
        self.scheduler.push(replace(one, following=following), self.now)
        self.owed[session] += rows

    @rule(session=st.integers(0, 4))
    def cancel(self, session: int) -> None:
        self.scheduler.forget(segment(session).session)
        self.owed[session] = 0

    @rule(session=st.integers(0, 4))
    def begin_anew(self, session: int) -> None:
        self.attempts[session] += 1
        self.scheduler.push(segment(session, attempt=self.attempts[session]), self.now)
        self.owed[session] = 2

    @precondition(lambda self: self.batch is None)
    @rule(patient=st.booleans())
    def run(self, patient: bool) -> None:
        due = self.scheduler.due()
        assert (due is None) == (len(self.scheduler) == 0)
        if due is None:
            return
        assert due <= self.now + 0.1 * DUE + 1e-9, "nobody is waited for longer than a step"
        self.now = max(self.now, due) if patient else self.now
        self.batch = self.scheduler.take(1024, self.now)
        assert self.batch
        for one in self.batch:
            self.owed[int(one.session.split("-")[1], 16)] -= len(one.tokens)

    @precondition(lambda self: self.batch is not None)
    @rule(refused=st.booleans())
    def end(self, refused: bool) -> None:
        assert self.batch is not None
        self.now += 0.1
        self.scheduler.ran(self.batch[1:] if refused else self.batch, 100.0, self.now)
        self.batch = None

    @invariant()
    def holds(self) -> None:
        self.scheduler.validate_state()
        waiting = {int(name.split("-")[1], 16) for name in self.scheduler.sessions}
        assert waiting == {session for session, rows in self.owed.items() if rows > 0}


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)


# --- groups ---------------------------------------------------------------------------------------------------------


def decode(session: int, start: int = 0, rows: int = 1) -> Segment:
    return segment(session, start, rows, kind=RowKind.DECODE)


def test_the_first_stage_takes_an_nth_of_the_decode_rows_and_the_others_all() -> None:
    for first, expected in ((True, [4, 4]), (False, [8])):
        scheduler = StepScheduler(2, first=first)
        for session in range(8):
            scheduler.push(decode(session), 0.0)
        assert [len(batch) for batch in drain(scheduler)] == expected


def test_a_verify_window_counts_its_rows() -> None:
    scheduler = StepScheduler(2, first=True)
    for session, rows in ((1, 4), (2, 4), (3, 1), (4, 1), (5, 1), (6, 1)):
        scheduler.push(decode(session, rows=rows), 0.0)
    assert [sum(len(one.tokens) for one in batch) for batch in drain(scheduler)] == [8, 4]


def away(scheduler: StepScheduler, sessions: list[int], now: float) -> None:
    for session in sessions:
        scheduler.push(decode(session), now)
    batch = scheduler.take(1024, now)
    assert [one.session for one in batch] == [decode(session).session for session in sessions]
    scheduler.ran(batch, 100.0, now)


def test_the_rest_of_a_group_is_waited_for_and_only_once() -> None:
    scheduler = StepScheduler(1, first=True)
    away(scheduler, [1, 2, 3], 0.0)
    scheduler.push(decode(1, 1), 1.0)
    assert scheduler.due() == pytest.approx(1.0 + LINGER * 0.1)
    scheduler.push(decode(2, 1), 1.01)
    assert scheduler.due() == pytest.approx(1.0 + LINGER * 0.1)
    assert len(scheduler.take(1024, 1.025)) == 2
    scheduler.ran([decode(1, 1), decode(2, 1)], 100.0, 1.1)
    scheduler.push(decode(1, 2), 2.0)
    scheduler.push(decode(2, 2), 2.0)
    assert scheduler.due() == 2.0, "3 did not come in time and is not waited for again"


def test_a_whole_group_goes_at_once() -> None:
    scheduler = StepScheduler(1, first=True)
    away(scheduler, [1, 2], 0.0)
    scheduler.push(decode(1, 1), 1.0)
    scheduler.push(decode(2, 1), 1.01)
    assert scheduler.due() == 1.0


def test_no_more_groups_than_stages_while_one_is_due() -> None:
    scheduler = StepScheduler(2, first=True)
    away(scheduler, [1], 0.0)
    away(scheduler, [2], 0.1)
    scheduler.push(decode(3), 0.2)
    assert scheduler.due() == pytest.approx(0.2 + DUE * 0.1)
    scheduler.push(decode(1, 1), 0.21)
    assert scheduler.due() == 0.2


def test_a_group_that_is_away_for_long_is_not_due() -> None:
    scheduler = StepScheduler(1, first=True)
    away(scheduler, [1], 0.0)
    scheduler.push(segment(2, 0, 20), 60.0)
    due = scheduler.due()
    assert due is not None
    assert due <= 60.0


def test_a_later_stage_waits_for_what_it_is_told_of() -> None:
    scheduler = StepScheduler(2, first=False)
    away(scheduler, [1], 0.0)
    scheduler.push(replace(decode(1, 1), following=1), 1.0)
    assert scheduler.due() == pytest.approx(1.0 + LINGER * 0.1)
    scheduler.push(decode(2, 1), 1.001)
    assert scheduler.due() == 1.0


def test_a_session_that_was_closed_is_not_waited_for() -> None:
    scheduler = StepScheduler(1, first=True)
    away(scheduler, [1, 2], 0.0)
    scheduler.push(decode(1, 1), 1.0)
    scheduler.forget(decode(2).session)
    assert scheduler.due() == 1.0


# --- prefill --------------------------------------------------------------------------------------------------------


def test_decode_rows_of_others_pass_a_long_prompt() -> None:
    scheduler = StepScheduler(1, first=True)
    for start in range(0, 768, 256):
        scheduler.push(segment(1, start, 256), 0.0)
    scheduler.push(segment(2, 9, 1), 0.0)
    batch = scheduler.take(1024, 0.0)
    assert [one.session for one in batch] == [segment(2).session, segment(1).session]
    assert len(batch[1].tokens) == MIN_PREFILL_ROWS, "what a row costs is not known yet"


@given(st.integers(4, 300), st.integers(1, 4), st.integers(2, 40))
def test_a_divided_segment_is_the_same_rows(rows: int, wanted: int, room: int) -> None:
    whole = segment(1, 7, rows, kind=RowKind.PREFILL, wanted=min(wanted, rows))
    whole = replace(whole, hidden=np.arange(rows * 2, dtype=np.float32).reshape(rows, 2))
    if room > rows - max(2, whole.wanted):
        return
    first, rest = divide(whole, room)
    assert first.tokens + rest.tokens == whole.tokens
    assert (first.start, rest.start) == (7, 7 + room)
    assert (first.wanted, rest.wanted) == (0, whole.wanted)
    assert first.hidden is not None
    assert rest.hidden is not None
    assert np.array_equal(np.concatenate([first.hidden, rest.hidden]), whole.hidden)  # type: ignore[arg-type]


def test_coordinators_and_sessions_take_turns_with_prefill() -> None:
    """Three prompts of one PC do not hold up the one of another, nor each other."""
    scheduler = StepScheduler(1, first=True)
    for session in (1, 2, 3):
        scheduler.push(segment(session, 0, 250), 0.0)
    scheduler.push(replace(segment(4, 0, 250), coordinator=STRANGER), 0.0)
    rows = dict.fromkeys((segment(session).session for session in (1, 2, 3, 4)), 0)
    for step in range(24):
        scheduler.push(decode(9, step), 0.0)
        batch = scheduler.take(1024, 0.0)
        scheduler.ran(batch, 100.0, 0.0)
        for one in batch[1:]:
            rows[one.session] += len(one.tokens)
    *ours, theirs = rows.values()
    assert theirs >= 0.4 * sum(rows.values())
    assert max(ours) - min(ours) <= 2 * MIN_PREFILL_ROWS


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler = StepScheduler(1, first=True)
    for start in range(0, 1024, 256):
        scheduler.push(segment(1, start, 256), 0.0)
    scheduler.ran(scheduler.take(1024, 0.0), 500.0, 0.0)
    scheduler.push(segment(2, 0, 20), 0.0)
    assert segment(2).session in [one.session for one in scheduler.take(1024, 0.0)]


# --- the budget -----------------------------------------------------------------------------------------------------


@given(st.floats(5, 300), st.floats(0.05, 20), st.integers(1, 16))
@settings(max_examples=100, derandomize=True)
def test_the_budget_finds_the_rows_that_keep_a_step_under_its_target(base: float, row: float, users: int) -> None:
    budget = RowBudget()
    decode_ms = base + row * users
    for _ in range(30):
        budget.observe(users, 0, decode_ms)
    for _ in range(30):
        rows = budget.prefill_rows(decoding=True)
        took = decode_ms + row * rows
        budget.observe(users, rows, took)
    target = max(STRETCH * decode_ms, EASY_MS)
    assert rows in (MIN_PREFILL_ROWS, MAX_PREFILL_ROWS) or target - 2 * row <= took <= target * 1.01
    assert rows >= MIN_PREFILL_ROWS


def test_a_step_now_and_then_goes_without_prefill_so_that_the_target_follows() -> None:
    budget = RowBudget()
    budget.observe(4, 0, 50.0)
    steps = 0
    while not budget.probing:
        budget.observe(4, 10, 80.0)
        steps += 1
        assert steps < 100
    budget.observe(4, 0, 60.0)
    assert not budget.probing


def test_alone_a_prompt_takes_what_half_a_second_holds() -> None:
    budget = RowBudget()
    assert budget.prefill_rows(decoding=False) == MAX_PREFILL_ROWS
    for _ in range(30):
        budget.observe(0, 100, 1000.0)
    assert budget.prefill_rows(decoding=False) == ALONE_MS / 10
