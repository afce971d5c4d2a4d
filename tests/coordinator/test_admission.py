"""Admission as a state machine: nobody over what fits, everybody in turn, and it never stands still."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swarm.coordinator.admission import ANSWER_TOKENS, PAUSE_S, Admission, Need
from swarm.coordinator.requests import in_line
from swarm.protocol.errors import CapacityError


def admission(capacity: int = 100, context: int = 0) -> Admission:
    return Admission(capacity, context)


def test_who_fits_begins_and_the_rest_wait_in_order() -> None:
    line = admission(100)
    for name in (1, 2, 3, 4):
        line.join(name, Need(30, 10), 0.0)
    assert [line.place(name) for name in (1, 2, 3, 4)] == [0, 0, 1, 2]
    line.leave(1, 1.0)
    assert [line.place(name) for name in (2, 3, 4)] == [0, 0, 1]


def test_a_small_one_does_not_pass_a_large_one() -> None:
    line = admission(100)
    line.join(1, Need(50, 10), 0.0)
    line.join(2, Need(60, 10), 0.0)
    line.join(3, Need(5, 5), 0.0)
    assert [line.place(name) for name in (2, 3)] == [1, 2]
    line.leave(1, 0.0)
    assert [line.place(name) for name in (2, 3)] == [0, 0]


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"at most 99 tokens.*120 tokens"):
        admission(100).join(1, Need(120), 0.0)


def test_an_answer_is_counted_with_no_more_than_a_session_may_fill() -> None:
    line = admission(capacity=200, context=100)
    for name in (1, 2):
        line.join(name, Need(30, 1000), 0.0)
    assert [line.place(name) for name in (1, 2)] == [0, 0]


def test_without_a_limit_an_answer_is_counted_with_a_usual_length() -> None:
    assert Need(10).tokens == 10 + ANSWER_TOKENS


def test_a_lone_answer_goes_whatever_it_is_counted_with() -> None:
    line = admission(100)
    line.join(1, Need(30, 5000), 0.0)
    assert line.place(1) == 0


def test_after_a_stage_was_full_nobody_begins_for_a_moment() -> None:
    line = admission(100)
    line.join(1, Need(10, 10), 0.0)
    line.full(1.0)
    line.join(2, Need(10, 10), 1.0)
    assert line.place(2) == 1
    assert line.next_change(1.0) == 1.0 + PAUSE_S
    line.advance(1.0 + PAUSE_S)
    assert line.place(2) == 0


def test_an_answer_that_ends_ends_the_pause() -> None:
    line = admission(100)
    for name in (1, 2):
        line.join(name, Need(10, 10), 0.0)
    line.full(1.0)
    line.join(3, Need(10, 10), 1.0)
    line.leave(1, 1.1)
    assert line.place(3) == 0


def test_a_larger_ring_lets_more_in() -> None:
    line = admission(50)
    for name in (1, 2):
        line.join(name, Need(30, 10), 0.0)
    assert line.place(2) == 1
    line.resize(200, 0, 1.0)
    assert line.place(2) == 0


@pytest.mark.parametrize(
    ("place", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd"), (112, "112th")]
)
def test_places_are_said_in_words(place: int, text: str) -> None:
    assert in_line(place) == f"waiting, {text} in line"


class Line(RuleBasedStateMachine):
    """People who come, give up at any point, end; stages that are full; plans that change."""

    @initialize(capacity=st.integers(0, 400))
    def begin(self, capacity: int) -> None:
        self.line = Admission(capacity)
        self.now = 0.0
        self.order: list[int] = []
        self.names = 0

    @rule(prompt=st.integers(1, 300), answer=st.one_of(st.none(), st.integers(1, 300)))
    def come(self, prompt: int, answer: int | None) -> None:
        self.names += 1
        try:
            self.line.join(self.names, Need(prompt, answer), self.now)
        except CapacityError:
            assert prompt >= self.line.capacity > 0
            return
        self.order.append(self.names)

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        """The answer is over, or its person does not want it any more."""
        if self.order:
            name = data.draw(st.sampled_from(self.order))
            self.order.remove(name)
            self.line.leave(name, self.now)

    @rule()
    def full(self) -> None:
        self.line.full(self.now)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        change = self.line.next_change(self.now - seconds)
        if change is not None and change <= self.now:
            self.line.advance(self.now)

    @rule(capacity=st.integers(0, 400), context=st.integers(0, 200))
    def change_plan(self, capacity: int, context: int) -> None:
        self.line.resize(capacity, context, self.now)

    @invariant()
    def holds(self) -> None:
        self.line.validate_state()
        places = [self.line.place(name) for name in self.order]
        waiting = [place for place in places if place]
        assert waiting == list(range(1, len(waiting) + 1)), "in the order in which they came"
        assert not self.order or 0 in places, "somebody is always answered"


TestLine = Line.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)
