"""What is measured of a ring, and how fast it is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.coordinator.times import (
    CLOCK_TICK_S,
    LEVELS,
    MAX_CHANCE,
    MAX_JUMP,
    MAX_RINGS,
    MODEL,
    PRIOR_CHANCE,
    PRIOR_WEIGHT,
    Acceptance,
    Latency,
    Memory,
    Times,
    confidence,
    row_cost,
)
from swarm.protocol.ids import NodeId
from swarm.protocol.plan import Stage

ROW_S = {1: 0.090, 2: 0.083, 4: 0.096, 8: 0.131}
"""Measured: the 1.5B model on one core."""


# --- latency ----------------------------------------------------------------------------------------------------------


def test_latency_is_a_line_through_what_was_measured() -> None:
    latency = Latency()
    for _ in range(10):
        for rows, seconds in ROW_S.items():
            latency.add(rows, seconds)
    for rows, seconds in ROW_S.items():
        assert latency.at(rows) == pytest.approx(seconds, rel=0.1)


def test_one_size_alone_tells_the_price_of_a_row_roughly() -> None:
    latency = Latency()
    assert not latency.measured
    assert latency.at(4) > latency.at(1) == 1.0
    latency.add(1, 0.1)
    assert latency.at(1) == pytest.approx(0.1)
    assert pytest.approx(latency.at(2)) == 0.1, "a row alone is padded to two"
    assert 0.1 < latency.at(3) < latency.at(8) < 0.2


def test_a_hiccup_is_not_a_trend() -> None:
    latency = Latency()
    for _ in range(20):
        latency.add(1, 0.1)
    latency.add(1, 60.0)
    assert latency.at(1) < 0.15


def test_windows_that_were_held_up_are_soon_forgotten() -> None:
    """The first windows of an answer often wait for the prompts of others."""
    latency = Latency()
    for seconds in (0.622, 0.622, 0.5, *[0.1] * 6):
        latency.add(1, seconds)
    assert latency.at(1) == pytest.approx(0.1, rel=0.2)


def test_a_clock_that_stands_still_is_no_fast_ring() -> None:
    latency = Latency()
    for seconds in (0.015, 0.015, 0.0, 0.015, 0.015, 0.0, 0.015, 0.015):
        latency.add(1, seconds)
    assert 0.008 < latency.at(1) < 0.015


def test_latency_follows_a_change() -> None:
    latency = Latency()
    for seconds in (0.1,) * 20 + (0.2,) * 32:
        latency.add(1, seconds)
    assert latency.at(1) == pytest.approx(0.2, rel=0.2)


@given(st.lists(st.tuples(st.integers(1, 11), st.floats(0.0, 100.0)), min_size=1, max_size=40))
def test_latency_is_never_nothing_and_more_rows_never_cost_less(found: list[tuple[int, float]]) -> None:
    latency = Latency()
    for rows, seconds in found:
        latency.add(rows, seconds)
    assert latency.at(1) >= CLOCK_TICK_S / 4
    assert all(latency.at(rows) <= latency.at(rows + 1) for rows in range(1, 16))


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_a_drafting_time_follows_what_is_faster_sooner_than_what_is_slower() -> None:
    faster, slower = Times(), Times()
    for times, seconds in ((faster, 0.01), (slower, 0.04)):
        for _ in range(8):
            times.drafted(0.02, alone=True)
        for _ in range(4):
            times.drafted(seconds, alone=True)
    assert faster.token_s is not None
    assert slower.token_s is not None
    assert faster.token_s < 0.014
    assert 0.02 < slower.token_s < 0.03
    for _ in range(40):
        slower.drafted(0.04, alone=True)
    assert slower.token_s == pytest.approx(0.04, rel=0.1)


@given(st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=40), st.booleans())
def test_a_drafting_time_is_within_what_was_measured(seconds: list[float], alone: bool) -> None:
    times = Times()
    for one in seconds:
        before = times.token_s
        times.drafted(one, alone=alone)
        assert times.token_s is not None
        assert before is None or times.token_s <= MAX_JUMP * before
    assert min(seconds) * 0.999 <= times.token_s <= max(seconds) * 1.001


def test_of_the_first_drafting_times_the_least_counts() -> None:
    """The model read the prompts of others meanwhile; a time that was too long once would end its drafting for good."""
    times = Times()
    for seconds in (0.2, 0.02, 0.06):
        times.drafted(seconds, alone=False)
        assert not times.draft_known
    assert times.token_s == 0.02
    times.drafted(0.02, alone=False)
    assert times.draft_known
    for _ in range(20):
        times.drafted(0.03, alone=False)
    assert 0.02 < times.token_s < 0.022, "beside the work of others"
    for _ in range(20):
        times.drafted(0.03, alone=True)
    assert 0.025 < times.token_s < 0.03


@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_who_is_further_ahead_is_no_less_sure(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert LEVELS[1] >= confidence(low) >= confidence(high) >= LEVELS[-1]


def test_a_forward_costs_what_was_measured() -> None:
    """`bench.costs`: 2, 4, 8, 16 and 32 rows of the whole 1.5B model took 71.3, 80.0, 117.9, 194.8 and 353.6 ms."""
    for rows, ms in ((2, 71.3), (4, 80.0), (8, 117.9), (16, 194.8), (32, 353.6)):
        assert row_cost(rows) == pytest.approx(ms / 71.3, rel=0.03)
    assert row_cost(1) == row_cost(2)


@given(st.lists(st.booleans(), max_size=300), st.floats(0.8, 0.999))
def test_a_chance_is_one_and_never_certain(verdicts: list[bool], memory: float) -> None:
    acceptance = Acceptance(memory, PRIOR_CHANCE)
    for verdict in verdicts:
        acceptance.judged(MODEL, verdict)
    assert 0.0 <= acceptance.chance(MODEL) <= MAX_CHANCE
    assert acceptance.error(MODEL) >= 0.0
    assert {**acceptance.chances(), MODEL: 0.0} == {**PRIOR_CHANCE, MODEL: 0.0}, "the others were not judged"


def test_what_has_faded_is_as_uncertain_as_an_assumption() -> None:
    acceptance = Acceptance(0.94, {MODEL: 0.5})
    at_first = acceptance.error(MODEL)
    for number in range(100):
        acceptance.judged(MODEL, number % 2 == 0)
    assert acceptance.error(MODEL) < 0.6 * at_first
    before = acceptance.chance(MODEL)
    acceptance.fade(MODEL)
    assert acceptance.chance(MODEL) == pytest.approx(before)
    assert acceptance.error(MODEL) == pytest.approx((before * (1 - before) / PRIOR_WEIGHT) ** 0.5)


# --- rings ------------------------------------------------------------------------------------------------------------


def ring(number: int) -> tuple[Stage, ...]:
    return (Stage(NodeId(f"{number:032x}"), f"n{number}", 0, 1, "CPU", 1),)


def test_sessions_on_one_ring_share_its_times_and_old_rings_are_forgotten() -> None:
    memory = Memory()
    first = memory.of(ring(0))
    assert memory.of(ring(0)) is first
    for number in range(1, MAX_RINGS):
        assert memory.of(ring(number)) is not first
    assert memory.of(ring(0)) is first, "used last"
    memory.of(ring(MAX_RINGS))
    assert memory.of(ring(0)) is first
    assert memory.of(ring(1)) is not first
    for number in range(2, MAX_RINGS + 2):
        memory.of(ring(number))
    assert memory.of(ring(0)) is not first


def test_another_draft_model_is_measured_anew_and_the_ring_stays_known() -> None:
    memory = Memory()
    times = memory.of(ring(0))
    times.latency.add(2, 0.1)
    times.drafted(0.02, alone=True)
    for _ in range(100):
        times.acceptance.judged(MODEL, False)
    memory.new_draft()
    assert times.token_s is None
    assert times.acceptance.chance(MODEL) == PRIOR_CHANCE[MODEL]
    assert times.latency.measured
    times.drafted(0.05, alone=True)
    assert times.token_s == pytest.approx(0.05)
