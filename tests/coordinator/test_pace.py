"""The model of cost, and how fast it is believed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.coordinator.pace import DEPTHS, PLAIN_WINDOWS, SURE, Company, Pace, Speculation
from swarm.coordinator.times import FIRST_DRAFTS, LEVELS, MODEL, Times


def measured(stages: int = 1, *, one: float = 0.090, row: float = 0.006, settings: Speculation | None = None) -> Pace:
    """A pace that knows its ring: `one` second for two rows and for one, `row` for each more."""
    pace = Pace(settings or Speculation(), stages, 8)
    now = 0.0
    for rows in (1, 1, 4, 1, 4):
        pace.answered(rows, now, now + one + row * max(0, rows - 2), drafting=False)
        now += 1.0
    return pace


def teach(pace: Pace, source: int, acceptance: float, tokens: int = 64) -> None:
    for i in range(tokens):
        pace.judged(source, (i * 37) % 100 < acceptance * 100)


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_the_first_windows_are_plain() -> None:
    pace = Pace(Speculation(), 1, 8)
    for number in range(PLAIN_WINDOWS):
        assert pace.choose([8] * 10).k == 0
        pace.answered(1, number, number + 0.1, drafting=False)
    assert pace.choose([8] * 10).k > 0


def test_the_next_session_on_a_ring_begins_where_the_last_one_ended() -> None:
    times = Times()
    first = Pace(Speculation(), 1, 8, times=times)
    for now in range(PLAIN_WINDOWS):
        first.answered(1, now, now + 0.1, drafting=False)
    first.drafted(1, 0.02)
    teach(first, MODEL, 0.9, 400)
    second = Pace(Speculation(), 1, 8, times=times)
    assert second.choose([MODEL] * 10, drafted=False).k > 0
    assert second.chance(MODEL) == pytest.approx(0.9, abs=0.03)
    second.measure_anew(2, True)
    assert second.choose([MODEL] * 10, drafted=False).k == 0, "another ring is another thing"
    assert second.chance(MODEL) == pytest.approx(0.9, abs=0.03)


def test_nothing_to_draft_is_plain_decoding() -> None:
    choice = measured().choose([])
    assert (choice.k, choice.depth) == (0, 1)
    assert choice.rate == pytest.approx(1 / 0.090, rel=0.02)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_one_window_brings_what_the_closed_form_says(k: int) -> None:
    """(1 - a^(k+1)) / (1 - a) tokens in k t + L(k+1)."""
    pace = measured(settings=Speculation(fixed_k=k, fixed_depth=1))
    teach(pace, MODEL, 0.8)
    pace.drafted(1, 0.03)
    a = pace.chance(MODEL)
    expected = (1 - a ** (k + 1)) / (1 - a) / (k * 0.03 + 0.090 + 0.006 * (k - 1))
    assert pace.choose([MODEL] * 10, drafted=False).rate == pytest.approx(expected, rel=0.03)


def test_drafts_that_cost_nothing_are_worth_more_of_them() -> None:
    pace = measured()
    for source in (MODEL, 8):
        teach(pace, source, 0.9)
    pace.drafted(1, 0.03)
    assert pace.choose([8] * 10).k > pace.choose([MODEL] * 10, drafted=False).k > 0


def test_a_dear_draft_goes_on_only_as_far_as_the_model_is_sure() -> None:
    found = []
    for token_s in (0.005, 0.015, 0.03):
        pace = measured()
        teach(pace, MODEL, 0.8)
        for _ in range(FIRST_DRAFTS):
            pace.drafted(1, token_s)
        found.append(pace.ask(10).least)
    assert 0.0 < found[0] < found[1] < found[2] < 1.0
    shared = measured(2)
    teach(shared, MODEL, 0.9)
    shared.drafted(1, 0.005)
    shared.share(Company(1))
    assert shared.ask(10).least >= SURE, "others wait for it"


def test_a_model_that_may_draft_no_more_than_it_should_still_stops_where_it_doubts() -> None:
    for most in (2, 3, 10):
        pace = measured(settings=Speculation(max_k=most))
        teach(pace, MODEL, 1.0, 400)
        for _ in range(FIRST_DRAFTS):
            pace.drafted(1, 0.01)
        assert pace.choose([MODEL] * most, drafted=False).k == most
        assert pace.ask(most).least > 0.05


def test_drafts_that_are_made_whatever_they_cost_are_made_whole() -> None:
    pace = measured(settings=Speculation(fixed_k=5))
    teach(pace, MODEL, 0.8)
    pace.drafted(1, 0.03)
    assert (pace.ask(10).k, pace.ask(10).least) == (5, 0.0)


def test_each_level_of_confidence_is_judged_by_itself_and_as_one_of_the_model() -> None:
    pace = measured()
    mean, unsure, surest = pace.chance(MODEL), pace.chance(LEVELS[1]), pace.chance(LEVELS[-1])
    teach(pace, LEVELS[1], 0.0)
    assert pace.chance(LEVELS[1]) < 0.2 * unsure
    assert pace.chance(MODEL) < 0.2 * mean
    assert pace.chance(LEVELS[-1]) == surest
    assert pace.confidence_chances == tuple(pace.chance(source) for source in LEVELS)


def test_a_bad_draft_or_a_slow_one_is_not_used() -> None:
    bad, slow = measured(), measured()
    teach(bad, MODEL, 0.0)
    bad.drafted(1, 0.03)
    teach(slow, MODEL, 0.95)
    slow.drafted(1, 0.2)
    for pace in (bad, slow):
        assert pace.choose([MODEL] * 10, drafted=False).k == 0


@pytest.mark.parametrize("before", [0.0, 1.0])
def test_it_settles_within_32_tokens(before: float) -> None:
    """From all right to nearly all wrong, and back."""
    pace, fresh = measured(), measured()
    pace.drafted(1, 0.03)
    fresh.drafted(1, 0.03)
    teach(pace, MODEL, before, 200)
    teach(pace, MODEL, 0.9 - 0.8 * before, 32)
    teach(fresh, MODEL, 0.9 - 0.8 * before, 200)
    settled, expected = (p.choose([MODEL] * 10, drafted=False) for p in (pace, fresh))
    assert abs(settled.k - expected.k) <= 2
    assert (settled.k == 0) == (expected.k == 0)


def test_windows_in_flight_where_links_are_long() -> None:
    pace = measured(3, one=0.5, row=0.001)
    teach(pace, MODEL, 0.95)
    pace.drafted(1, 0.005)
    now = 10.0
    for _ in range(20):  # two follow one another at a step of 30 ms
        pace.answered(4, now, now + 0.5, drafting=False)
        pace.answered(4, now + 0.001, now + 0.63, drafting=True)
        now += 1.0
    assert pace.choose([MODEL] * 10, drafted=False).depth >= 4


def test_one_window_at_a_time_where_one_stage_does_all() -> None:
    pace = measured(1)
    teach(pace, MODEL, 0.7)
    pace.drafted(1, 0.03)
    choice = pace.choose([MODEL] * 10, drafted=False)
    assert choice.k > 0
    assert choice.depth == 1


def test_a_disturbed_trip_is_not_measured() -> None:
    pace = measured()
    before = pace.plain_s
    pace.lost(2)
    pace.answered(1, 10.0, 15.0, drafting=False)
    pace.answered(1, 20.0, 25.0, drafting=True)
    assert pace.plain_s == before
    pace.answered(1, 30.0, 30.2, drafting=False)
    assert pace.plain_s is not None
    assert before is not None
    assert pace.plain_s > before


# --- a ring that is shared --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_model_drafts_where_stages_would_stand_idle_and_not_where_others_keep_them_busy(stages: int) -> None:
    pace = measured(stages)
    teach(pace, MODEL, 0.75)
    for _ in range(FIRST_DRAFTS):
        pace.drafted(1, 0.055)
    assert pace.choose([MODEL] * 10, drafted=False).k > 0
    for users in range(max(2, stages), 9):
        pace.share(Company(users - 1))
        assert pace.choose([MODEL] * 10, drafted=False).k == 0
        assert not pace.promising()
    pace.share(Company(0))
    assert pace.choose([MODEL] * 10, drafted=False).k > 0
    assert pace.promising()


def test_a_model_that_takes_next_to_nothing_and_is_nearly_always_right_pays_in_company() -> None:
    pace = measured(2)
    teach(pace, MODEL, 0.98)
    pace.drafted(1, 0.001)
    pace.share(Company(1))
    assert pace.choose([MODEL] * 10, drafted=False).k > 0


@pytest.mark.parametrize(("stages", "cycle_s"), [(1, 0.203), (2, 0.145), (4, 0.136)])
def test_a_window_in_company_waits_for_those_it_meets(stages: int, cycle_s: float) -> None:
    """Two users, a draft of 20 ms, k = 2: 40 + 90 ms alone, of which a stage and the draft share the work; on one stage
    both windows are one forward of six rows."""
    pace = measured(stages, row=0.0, one=0.086, settings=Speculation(fixed_k=2, fixed_depth=1))
    teach(pace, MODEL, 0.75)
    pace.drafted(1, 0.02)
    pace.share(Company(1))
    a = pace.chance(MODEL)
    assert pace.choose([MODEL] * 2, drafted=False).rate == pytest.approx((1 + a + a * a) / cycle_s, rel=0.03)


def test_a_cheap_draft_pays_for_two_users_on_two_stages() -> None:
    """A draft of a fifth of a token; the same draft at three times the price does not."""
    cheap, dear = measured(2, row=0.003), measured(2, row=0.003)
    for pace, token_s in ((cheap, 0.018), (dear, 0.054)):
        pace.share(Company(1))
        teach(pace, MODEL, 0.78)
        for _ in range(FIRST_DRAFTS):
            pace.drafted(1, token_s)
    assert cheap.choose([MODEL] * 10, drafted=False).k > 0
    assert dear.choose([MODEL] * 10, drafted=False).k == 0


@pytest.mark.parametrize(
    ("stages", "users", "depth"), [(4, 1, 8), (4, 2, 4), (4, 3, 2), (4, 4, 1), (2, 3, 1), (1, 1, 2)]
)
def test_windows_in_flight_leave_stages_to_others(stages: int, users: int, depth: int) -> None:
    pace = measured(stages)
    pace.share(Company(users - 1))
    assert max(pace._depths()) == depth


def test_links_that_take_most_of_the_time_leave_stages_idle() -> None:
    """In company too: what stages do not compute they can do for drafts. The links never take all of it."""
    pace = measured(2)
    teach(pace, MODEL, 0.75)
    pace.drafted(1, 0.035)
    plain_s = pace.plain_s
    assert plain_s is not None
    found = []
    for part in (0.0, 0.5, 0.9, 1.0, 1e9):
        pace.share(Company(2, part * plain_s))
        found.append(pace.choose([MODEL] * 10, drafted=False).k)
    assert found[0] == 0 < found[2] <= found[3] == found[4]


def test_a_stage_that_runs_many_sessions_at_once_leaves_less_room_for_rows() -> None:
    """Copies cost nothing to find, but their rows are paid for by all who share the forward."""
    pace = measured(1, row=0.02)
    teach(pace, 4, 0.6)
    found = []
    for others in (0, 3, 15):
        pace.share(Company(others))
        found.append(pace.choose([4] * 10).k)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 0


def test_a_draft_model_in_the_way_of_a_stage_delays_the_next_window() -> None:
    """Two stages, a draft of half a step: in flight, its device does both for each window."""
    found = {}
    for holds_stage in (True, False):
        pace = measured(2, settings=Speculation(fixed_k=1, fixed_depth=2))
        pace.measure_anew(2, holds_stage)
        for now in (0.0, 1.0):
            pace.answered(1, now, now + 0.1, drafting=False)
        teach(pace, MODEL, 1.0, 1000)
        pace.drafted(1, 0.040)
        found[holds_stage] = pace.choose([MODEL], drafted=False).rate
    step, latency = 0.052, 0.104
    assert found[True] == pytest.approx(1 / (step + 0.040), rel=0.05)
    assert found[False] == pytest.approx(1 / ((0.040 + latency) / 2), rel=0.05)


def test_answers_that_come_closer_than_a_step_make_it_shorter() -> None:
    """Long links: nothing queues, and still it shows how little a stage takes."""
    pace = measured(4, one=0.4, row=0.001)
    teach(pace, MODEL, 0.9)
    pace.drafted(1, 0.010)
    before = pace.choose([MODEL] * 10, drafted=False)
    for now in range(10, 30):
        pace.answered(4, now, now + 0.400, drafting=True)
        pace.answered(4, now + 0.1, now + 0.420, drafting=True)
    after = pace.choose([MODEL] * 10, drafted=False)
    assert after.rate > 1.1 * before.rate


@given(
    stages=st.integers(1, 5),
    acceptance=st.floats(0.0, 1.0),
    token_s=st.floats(0.0, 0.3),
    others=st.lists(st.integers(1, 30), min_size=2, max_size=2, unique=True).map(sorted),
)
def test_more_company_never_makes_drafting_look_better(
    stages: int, acceptance: float, token_s: float, others: list[int]
) -> None:
    """Alone a session goes by its own text only, and may think less of its drafts."""
    pace = measured(stages)
    teach(pace, MODEL, acceptance)
    pace.drafted(1, token_s)
    for drafted in (True, False):
        rates = []
        for number in others:
            pace.share(Company(number))
            rates.append(pace.choose([MODEL] * 10, drafted).rate)
        assert rates[1] <= rates[0] / 0.92  # of the best, the smallest that comes near it is chosen


@given(
    stages=st.integers(1, 5),
    one=st.floats(0.0, 1.0),
    sources=st.lists(st.sampled_from([MODEL, 2, 5, 8]), max_size=10),
    verdicts=st.lists(st.tuples(st.sampled_from([MODEL, 2, 5, 8]), st.booleans()), max_size=60),
    token_s=st.none() | st.floats(0.0, 1.0),
    fixed_k=st.none() | st.integers(1, 10),
    fixed_depth=st.none() | st.sampled_from(DEPTHS),
)
def test_a_choice_is_always_allowed(
    stages: int,
    one: float,
    sources: list[int],
    verdicts: list[tuple[int, bool]],
    token_s: float | None,
    fixed_k: int | None,
    fixed_depth: int | None,
) -> None:
    pace = measured(stages, one=one, settings=Speculation(fixed_k=fixed_k, fixed_depth=fixed_depth))
    for source, right in verdicts:
        pace.judged(source, right)
    if token_s is not None:
        pace.drafted(1, token_s)
    for drafted, count in itertools.product((True, False), (0, len(sources))):
        choice = pace.choose(sources[:count], drafted)
        assert 0 <= choice.k <= count
        assert choice.rate > 0
        assert choice.depth == 1 or choice.depth == fixed_depth or choice.depth <= 2 * stages
        if count and fixed_k:
            assert choice.k == min(fixed_k, count)
