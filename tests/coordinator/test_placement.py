"""Which ring a session is given."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarm.coordinator.placement import choose_ring
from swarm.ring.port import RingLoad
from tests.coordinator.fake_stages import NODE, make_plan

IDLE = RingLoad()


def test_the_fastest_ring_takes_the_first_session() -> None:
    plan = replace(make_plan(1, 2, rings=3), ring_token_ms=(30.0, 20.0, 40.0))
    assert choose_ring(plan, NODE, (0, 0, 0), (IDLE, IDLE, IDLE)) == 1


def test_as_many_sessions_as_stages_run_side_by_side() -> None:
    plan = replace(make_plan(1, 4, rings=2), ring_token_ms=(20.0, 21.0))
    assert choose_ring(plan, NODE, (3, 0), (IDLE, IDLE)) == 0
    assert choose_ring(plan, NODE, (4, 0), (IDLE, IDLE)) == 1
    assert choose_ring(plan, NODE, (2, 0), (RingLoad(sessions=2), IDLE)) == 1
    assert choose_ring(plan, NODE, (4, 4), (IDLE, IDLE)) == 0


def test_equal_rings_are_taken_from_here_on() -> None:
    plan = make_plan(1, 1, rings=3)
    here = plan.stages[2].node
    assert choose_ring(plan, here, (0, 0, 0), (IDLE, IDLE, IDLE)) == 2
    assert choose_ring(plan, NODE, (0, 0, 0), (IDLE, IDLE, IDLE)) == 0


def test_a_ring_far_away_costs_its_round_trip() -> None:
    """10 ms on either; 15 ms to the other: a second session here is taken there only when it is worth the way."""
    plan = make_plan(1, 1, rings=2)
    here = plan.stages[0].node
    assert choose_ring(plan, here, (1, 0), (IDLE, RingLoad(round_trip_ms=15.0))) == 0
    assert choose_ring(plan, here, (2, 0), (IDLE, RingLoad(round_trip_ms=15.0))) == 1


def test_rings_that_nobody_predicted_are_filled_evenly() -> None:
    plan = replace(make_plan(1, 1, rings=2), ring_token_ms=())
    assert choose_ring(plan, NODE, (1, 0), (IDLE, IDLE)) == 1


@given(st.integers(1, 4), st.integers(2, 5), st.data())
def test_filled_one_by_one_no_session_would_do_better_elsewhere(stages: int, rings: int, data: st.DataObject) -> None:
    times = tuple(data.draw(st.lists(st.floats(1.0, 50.0), min_size=rings, max_size=rings)))
    plan = replace(make_plan(1, stages, rings=rings), ring_token_ms=times)
    mine = [0] * rings
    for _ in range(data.draw(st.integers(1, 30))):
        mine[choose_ring(plan, NODE, mine, (IDLE,) * rings)] += 1
    held = [time * max(1.0, count / stages) for time, count in zip(times, mine, strict=True) if count]
    joined = [time * max(1.0, (count + 1) / stages) for time, count in zip(times, mine, strict=True)]
    assert max(held) <= min(joined) * (1 + 1e-9)
