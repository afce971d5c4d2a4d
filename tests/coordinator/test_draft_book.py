"""The rows a draft model runs: only what is new, whatever was asked before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engines import Over
from swarm.coordinator.draft_book import CHUNK_ROWS, MAX_SESSIONS, SIBLING_ROWS, DraftBook
from swarm.coordinator.events import AskDraft
from swarm.coordinator.times import confidence
from swarm.engine.base import Engine, Output
from swarm.engine.timed import StageTimes, TimedEngine
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind, Segment
from swarm.protocol.sampling import GREEDY

VOCABULARY = 50


def session(number: int) -> SessionId:
    return SessionId(f"{number:08x}-1-00000000")


def ask(tokens: tuple[int, ...], count: int) -> AskDraft:
    return AskDraft(0, len(tokens), tokens, count, GREEDY)


class Sure(Over[TimedEngine]):
    """Says how far ahead each token was: `margins` in turn, and then always 9."""

    def __init__(self, *margins: float) -> None:
        super().__init__(engine())
        self._margins = list(margins)

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        return [
            replace(output, margins=tuple(self._margins.pop(0) if self._margins else 9.0 for _ in output.drawn))
            for output in super().run(batch)
        ]


def engine(kv_tokens: int = 100_000) -> TimedEngine:
    return TimedEngine(True, True, kv_tokens, StageTimes(0.0), VOCABULARY, sleep=lambda _: None)


def following(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the timed engine draws after `tokens`."""
    found = tokens
    for _ in range(count):
        value = 0
        for token in found:
            value = (value * 31 + token + 7) % 65_521
        found += (value % VOCABULARY,)
    return found[len(tokens) :]


def run(book: DraftBook, runs: Engine) -> tuple[list[int], list[RowKind]]:
    """Step until nothing is asked for: rows and kinds of the segments."""
    rows, kinds = [], []
    while book:
        batch = book.step(runs.max_rows)
        assert batch
        book.ran(batch, runs.run(batch))
        book.validate_state()
        rows += [len(segment.tokens) for segment in batch]
        kinds += [segment.kind for segment in batch]
    return rows, kinds


@pytest.mark.parametrize(
    ("margins", "least", "drafted"),
    [
        ((), 0.5, 10),  # sure to the end
        ((9.0, 0.1), 0.5, 2),  # the doubtful one is said, and nothing behind it
        ((0.1,), 0.5, 1),  # one always is
        ((0.1,), 0.0, 10),
        ((1.5, 9.0, 1.5), 0.3, 3),  # one doubt may pass, two are too many
    ],
)
def test_it_drafts_as_far_as_it_is_sure(margins: tuple[float, ...], least: float, drafted: int) -> None:
    chances = (0.8, 0.3, 0.4, 0.6, 0.8, 1.0)
    book, prompt = DraftBook(), tuple(range(40))
    job, _ = book.put(session(1), replace(ask(prompt, 10), chances=chances, least=least))
    run(book, Sure(*margins))
    assert tuple(job.drafted) == following(prompt, drafted)
    assert job.sources == [confidence(margin) for margin in (*margins, *[9.0] * 10)[:drafted]]


def test_a_model_that_does_not_say_how_sure_it_is_drafts_as_far_as_it_mostly_is_right() -> None:
    book, prompt = DraftBook(), tuple(range(40))
    job, _ = book.put(session(1), replace(ask(prompt, 10), chances=(0.8, 0.3, 0.4, 0.6, 0.8, 1.0), least=0.5))
    run(book, engine())
    assert len(job.drafted) == 3, "0.8 to the fourth is less than a half"


def test_only_what_is_new_is_run() -> None:
    book, runs = DraftBook(), engine()
    prompt = tuple(range(40))
    job, _ = book.put(session(1), ask(prompt, 3))
    assert run(book, runs) == ([40, 1, 1], [RowKind.PREFILL, RowKind.DECODE, RowKind.DECODE])
    assert tuple(job.drafted) == following(prompt, 3)
    # All three accepted, and one more: of the four only the last two are not in the cache.
    longer = prompt + following(prompt, 4)
    job, _ = book.put(session(1), ask(longer, 2))
    assert run(book, runs)[0] == [2, 1]
    # Rejected at the second: the correction alone.
    other = (*prompt, longer[40], (longer[41] + 1) % VOCABULARY)
    job, _ = book.put(session(1), ask(other, 1))
    assert run(book, runs)[0] == [1]
    assert tuple(job.drafted) == following(other, 1)
    # The very same again: the last row has to be run for its token.
    book.put(session(1), ask(other, 1))
    assert run(book, runs)[0] == [1]


@pytest.mark.parametrize("rows", [1, 2, SIBLING_ROWS, SIBLING_ROWS + 1, CHUNK_ROWS + 1, 3 * CHUNK_ROWS])
def test_long_prompts_go_in_chunks(rows: int) -> None:
    book, runs = DraftBook(), engine()
    prompt = tuple(position % VOCABULARY for position in range(rows))
    job, _ = book.put(session(1), ask(prompt, 1))
    sizes, kinds = run(book, runs)
    assert sum(sizes) == rows
    assert max(sizes) <= CHUNK_ROWS
    assert set(kinds) == {RowKind.PREFILL if rows > SIBLING_ROWS else RowKind.DECODE}
    assert tuple(job.drafted) == following(prompt, 1)


def test_sessions_share_a_step_and_one_prefills_at_a_time() -> None:
    book, runs = DraftBook(), engine()
    for number in (1, 2):
        book.put(session(number), ask((number,), 1))
    for number in (3, 4):
        book.put(session(number), ask(tuple([number] * 100), 1))
    batch = book.step(runs.max_rows)
    assert [segment.session for segment in batch] == [session(1), session(2), session(3)]
    assert len(batch[2].tokens) == CHUNK_ROWS


def test_nobody_waits_any_more_and_the_prompt_is_fed_all_the_same() -> None:
    book, runs = DraftBook(), engine()
    prompt = tuple([3] * 150)
    job, _ = book.put(session(1), ask(prompt, 4))
    batch = book.step(runs.max_rows)
    book.ran(batch, runs.run(batch))
    job.count = 0
    assert sum(run(book, runs)[0]) == 150 - CHUNK_ROWS
    assert job.drafted == []
    book.put(session(1), ask((*prompt, 9), 1))
    assert run(book, runs)[0] == [1]


def test_what_was_replaced_while_it_ran_leaves_a_right_cache() -> None:
    book, runs = DraftBook(), engine()
    prompt = tuple(range(20))
    book.put(session(1), ask(prompt, 4))
    batch = book.step(runs.max_rows)
    outputs = runs.run(batch)
    job, older = book.put(session(1), ask((*prompt[:10], 7), 2))
    assert older is not None
    book.ran(batch, outputs)
    assert run(book, runs)[0] == [1, 1]
    assert tuple(job.drafted) == following((*prompt[:10], 7), 2)


def test_caches_beyond_the_bound_go_the_longest_unused_first() -> None:
    book, runs = DraftBook(), engine()
    for number in range(MAX_SESSIONS + 2):
        book.put(session(number), ask((1, 2), 1))
        run(book, runs)
    book.put(session(0), ask((1, 2, 3), 1))
    run(book, runs)
    assert book.surplus() == [session(1), session(2)]
    book.put(session(1), ask((1, 2, 3), 1))
    assert book.surplus() == [session(2), session(3)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 150),
            st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=80),
            st.integers(1, 5),
            st.integers(0, 4),
        ),
        max_size=12,
    )
)
def test_any_asks_of_any_sessions(asks: list[tuple[int, int, list[int], int, int]]) -> None:
    """(session, how much of its sequence is kept, tokens behind, count, steps before the next ask)."""
    book, runs = DraftBook(), engine()
    known: dict[int, tuple[int, ...]] = {}
    for number, keep, tail, count, steps in asks:
        sequence = known[number] = known.get(number, ())[:keep] + tuple(tail)
        job, _ = book.put(session(number), ask(sequence, count))
        for _ in range(steps):
            if book:
                batch = book.step(runs.max_rows)
                book.ran(batch, runs.run(batch))
                book.validate_state()
        assert tuple(job.drafted) == following(sequence, len(job.drafted))
        known[number] = sequence + tuple(job.drafted)
    run(book, runs)
