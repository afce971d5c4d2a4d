"""The simulator against what can be computed by hand, and its answers against plain decoding."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import recorded
from bench.clock import Core, RowCosts, World
from bench.simulated import PLAIN, Run, reading, simulate, timed_engine
from bench.simulator import Draft, Forgetful, Links, Ring, User
from swarm.coordinator.pace import Speculation
from swarm.engine.selftest import segment

NEAR = Links()
PROMPT = tuple(range(40))


def flat(milliseconds: float) -> RowCosts:
    """The same for any number of rows."""
    return RowCosts(((1, milliseconds), (2, milliseconds)))


def forgetful(costs: RowCosts, acceptance: float) -> Draft:
    return Draft(lambda: Forgetful(timed_engine(True, True), acceptance), costs)


def always_right(milliseconds: float) -> Draft:
    return forgetful(flat(milliseconds), acceptance=1.0)


def by_hand(prompt: tuple[int, ...], count: int) -> list[int]:
    engine = timed_engine(True, True)
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        (output,) = engine.run([segment(0, 0, ids)])
        ids += output.drawn
    return ids[len(prompt) :]


# --- the parts --------------------------------------------------------------------------------------------------------


def test_a_core_is_shared_evenly() -> None:
    world, ends = World(), []
    core = Core(world)
    for seconds in (1.0, 3.0):
        core.run(seconds, lambda: ends.append(world.now))
    world.after(3.0, lambda: core.run(0.5, lambda: ends.append(world.now)))
    world.run(until=lambda: len(ends) == 3)
    assert ends == pytest.approx([2.0, 4.0, 4.5])
    assert core.busy_s == pytest.approx(4.5)


def test_costs_are_straight_lines_between_what_was_measured() -> None:
    costs = RowCosts(((2, 20.0), (4, 30.0), (8, 34.0)))
    assert [costs.of(rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == [20.0, 20.0, 25.0, 30.0, 32.0, 34.0, 38.0]


def test_a_world_in_which_nothing_happens_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="stands still"):
        World().run(until=lambda: False)


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("delay_ms", [0.0, 50.0])
def test_plain_decoding_takes_every_stage_and_every_link(stages: int, delay_ms: float) -> None:
    found = simulate([flat(20.0)] * stages, 1, PLAIN, Links(delay_ms / 1000), None)
    links = stages if stages > 1 else 0
    assert 1000 / found.rate == pytest.approx(20.0 * stages + delay_ms * links)
    assert found.wasted == pytest.approx(0.0)


def test_users_fill_the_stages() -> None:
    alone = simulate([flat(20.0)] * 3, 1, PLAIN, NEAR, None)
    three = simulate([flat(20.0)] * 3, 3, PLAIN, NEAR, None)
    assert three.rate == pytest.approx(3 * alone.rate, rel=0.02)
    assert three.busy == pytest.approx((1.0, 1.0, 1.0), abs=0.05)


def test_eight_users_on_one_pc_share_each_forward() -> None:
    costs = RowCosts(((1, 20.0), (8, 48.0)))
    found = simulate([costs], 8, PLAIN, NEAR, None)
    in_halves = 8000 / (2 * costs.of(4))
    assert in_halves * 0.99 < found.rate < 8000 / costs.of(8) * 1.01


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("stages", [1, 3])
def test_one_window_at_a_time_with_a_draft_that_is_always_right(k: int, stages: int) -> None:
    only_model = Speculation(fixed_k=k, fixed_depth=1, ngram=False)
    found = simulate([flat(20.0)] * stages, 1, only_model, Links(0.010), always_right(5.0))
    links = stages if stages > 1 else 0
    assert 1000 * (k + 1) / found.rate == pytest.approx(5.0 * k + 20.0 * stages + 10.0 * links, rel=0.05)


def test_windows_in_flight_hide_the_links() -> None:
    costs, links, draft = [flat(20.0)] * 2, Links(0.100), always_right(0.1)
    one = simulate(costs, 1, Speculation(fixed_k=3, fixed_depth=1, ngram=False), links, draft)
    four = simulate(costs, 1, Speculation(fixed_k=3, fixed_depth=4, ngram=False), links, draft)
    assert four.rate > 2.5 * one.rate


def test_a_draft_that_is_always_wrong_wastes_its_rows() -> None:
    never = forgetful(flat(1.0), acceptance=0.0)
    found = simulate([flat(20.0)], 1, Speculation(fixed_k=3, fixed_depth=1, ngram=False), NEAR, never)
    assert 0.2 < found.wasted <= 3 / 4


def test_the_same_world_gives_the_same_figures() -> None:
    def once() -> Run:
        draft = forgetful(flat(7.0), acceptance=0.7)
        return simulate([flat(20.0)] * 3, 4, Speculation(), Links(0.013), draft)

    assert once() == once()


def test_the_next_session_drafts_as_soon_as_the_draft_model_has_read_its_prompt() -> None:
    ring = Ring(World(), [timed_engine(True, True)], [flat(20.0)], NEAR, forgetful(flat(2.0), acceptance=0.9))
    drafted = []
    for _ in range(2):
        (one,) = ring.ask([User(PROMPT, 8, speculation=Speculation(ngram=False))])
        drafted.append(one.session.speculation.model_drafted)
    assert drafted[1] > drafted[0]


@pytest.mark.parametrize("users", [1, 3])
def test_recorded_texts_are_said_again_whatever_is_drafted(users: int) -> None:
    texts = recorded.texts()
    engines = [timed_engine(True, False), recorded.Reading(timed_engine(False, True), texts)]
    ring = Ring(World(), engines, [flat(20.0)] * 2, NEAR, reading(flat(5.0), texts))
    for first in range(len(texts)):
        asked = [texts[(first + user) % len(texts)] for user in range(users)]
        found = ring.ask([User(text.prompt, 60, home=index % 2) for index, text in enumerate(asked)])
        assert [tuple(one.answer.tokens) for one in found] == [text.answer[:60] for text in asked]
    assert sum(one.session.speculation.accepted for one in found) > 0


@pytest.mark.parametrize(("stages", "users"), [(1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (2, 8), (2, 16), (4, 3), (4, 8)])
def test_the_adaptive_pace_is_never_slower_than_plain_decoding(stages: int, users: int) -> None:
    """With what rows and drafts of the 1.5B model cost, a draft model and n-gram together, recorded texts."""
    texts = recorded.texts()
    costs = [
        RowCosts(((2, 71.3), (4, 80.0), (6, 100.0), (8, 118.0), (16, 195.0), (32, 354.0))).times(1 / stages)
    ] * stages
    draft = reading(RowCosts(((2, 20.0), (4, 22.0), (8, 30.0), (32, 92.0))), texts)
    plain, adaptive = (
        simulate(costs, users, way, Links(message_s=0.0005), draft, texts).rate for way in (PLAIN, Speculation())
    )
    assert adaptive > (1.4 if users == 1 else 0.99) * plain


# --- the text ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(1, 4),
    users=st.integers(1, 4),
    acceptance=st.floats(0.0, 1.0),
    delay_ms=st.floats(0.0, 80.0),
    draft_ms=st.floats(0.1, 30.0),
    k=st.none() | st.integers(1, 10),
    depth=st.none() | st.integers(1, 4),
)
def test_the_text_is_the_plain_one(
    stages: int, users: int, acceptance: float, delay_ms: float, draft_ms: float, k: int | None, depth: int | None
) -> None:
    engines = [timed_engine(index == 0, index == stages - 1) for index in range(stages)]
    costs = [RowCosts(((1, 15.0), (8, 22.0)))] * stages
    ring = Ring(World(), engines, costs, Links(delay_ms / 1000), forgetful(flat(draft_ms), acceptance))
    way = Speculation(fixed_k=k, fixed_depth=depth)
    asked = [User(PROMPT[number:], 24, home=number % stages, speculation=way) for number in range(users)]
    for user, one in zip(asked, ring.ask(asked), strict=True):
        assert one.answer.tokens == by_hand(user.prompt, 24)
        assert one.session.counters.replays == 0
        assert all(earlier <= later for earlier, later in itertools.pairwise(one.answer.times_s))
