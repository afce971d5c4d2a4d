"""Who waits for whose prompt: against a model that remembers every row."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.protocol import limits
from swarm.protocol.messages import RowKind, Segment
from swarm.ring.beginnings import STALLED_S, WORTH, Beginnings
from tests.ring.stage_harness import segment

PROMPTS = [tuple(range(100)), tuple(range(60)) + tuple(range(200, 240)), tuple(range(300, 400))]
sessions = st.integers(1, 3)
prompts = st.sampled_from(PROMPTS)


def rows(session: int, tokens: tuple[int, ...], start: int = 0, kind: RowKind = RowKind.PREFILL) -> Segment:
    return replace(segment(session), start=start, tokens=tokens, kind=kind)


def equal(some: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Length of their common beginning."""
    return next((n for n, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


class Waiting(RuleBasedStateMachine):
    """Nobody waits for rows that are there, are other ones, or do not come; all others wait, and not for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.beginnings = Beginnings()
        self.now = 0.0
        self.known: dict[int, tuple[tuple[int, ...], int, int, float]] = {}
        """Ids, how many of them were there before and are by now, when something happened last."""

    @rule(session=sessions, prompt=prompts, held=st.integers(0, 100))
    def ask(self, session: int, prompt: tuple[int, ...], held: int) -> None:
        self.beginnings.asked(segment(session).session, prompt, held, self.now)
        self.known[session] = prompt, held, held, self.now

    @rule(session=sessions, prompt=prompts, count=st.integers(2, 60))
    def come(self, session: int, prompt: tuple[int, ...], count: int) -> None:
        """The next rows; where the session asked for a prompt, of that one."""
        prompt, held, done, _ = self.known.get(session, (prompt, 0, 0, 0.0))
        chunk = prompt[done : done + count]
        if not chunk or (session not in self.known and done):
            return
        self.beginnings.delivered(rows(session, chunk, done), self.now)
        ids = prompt if session in self.known else chunk
        self.known[session] = ids, held, done, self.now

    @rule(session=sessions, count=st.integers(2, 60))
    def run(self, session: int, count: int) -> None:
        if session in self.known:
            ids, held, done, _ = self.known[session]
            chunk = ids[done : done + count]
            self.beginnings.ran(rows(session, chunk, done), self.now)
            self.known[session] = ids, held, done + len(chunk), self.now

    @rule(session=sessions, decoding=st.booleans())
    def end(self, session: int, decoding: bool) -> None:
        if decoding:
            self.beginnings.delivered(rows(session, (1,), 100, RowKind.DECODE), self.now)
        else:
            self.beginnings.forget(segment(session).session)
        self.known.pop(session, None)

    @rule(seconds=st.floats(0.0, STALLED_S))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def agrees(self) -> None:
        self.beginnings.validate_state()
        for prompt in PROMPTS:
            ends = [
                moved + STALLED_S
                for ids, held, done, moved in self.known.values()
                if done < (common := equal(ids, prompt)) and common - held >= WORTH
            ]
            expected = max((end for end in ends if end > self.now), default=None)
            assert self.beginnings.awaited(prompt, self.now) == expected


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=100, stateful_step_count=30, derandomize=True, deadline=None)


def test_rows_are_put_together_as_they_come() -> None:
    found, prompt = Beginnings(), PROMPTS[0]
    found.delivered(rows(1, prompt[:40]), 0.0)
    found.ran(rows(1, prompt[:40]), 0.0)
    assert found.awaited(prompt, 0.0) is None, "what came was run"
    found.delivered(rows(1, prompt[40:], 40), 1.0)
    assert found.awaited(prompt, 1.0) == 1.0 + STALLED_S
    assert found.awaited(PROMPTS[1], 1.0) == 1.0 + STALLED_S, "to the last row that is shared"
    found.ran(rows(1, prompt[40:60], 40), 1.0)
    assert found.awaited(PROMPTS[1], 1.0) is None, "it goes on otherwise"


def test_rows_behind_others_that_are_not_known_are_not_waited_for() -> None:
    found = Beginnings()
    found.delivered(rows(1, PROMPTS[0][40:], 40), 0.0)
    assert found.awaited(PROMPTS[0], 0.0) is None


def test_a_new_attempt_is_waited_for_from_where_it_begins() -> None:
    found, prompt = Beginnings(), PROMPTS[0]
    found.delivered(rows(1, prompt), 0.0)
    found.ran(rows(1, prompt), 0.0)
    found.delivered(rows(1, prompt), 1.0)
    assert found.awaited(prompt, 1.0) is not None


def test_of_a_long_prompt_no_more_is_kept_than_anybody_may_ask_for() -> None:
    found, chunk = Beginnings(), tuple(range(700))
    for start in (0, 700, 1400):
        found.delivered(rows(1, chunk, start), 0.0)
        found.validate_state()
    assert limits.MAX_SEGMENT_ROWS < 1400
