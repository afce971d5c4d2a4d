"""The timed engine behaves as a real one does: its tokens depend on the ids alone, and time on the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.engine.selftest import segment
from swarm.engine.timed import HIDDEN_SIZE, StageTimes, TimedEngine
from swarm.protocol.errors import CapacityError, SessionError
from swarm.protocol.messages import RowKind, Segment

FAST = StageTimes(0.0)


def chain(stages: int, kv_tokens: int = 4096) -> list[TimedEngine]:
    last = stages - 1
    return [TimedEngine(i == 0, i == last, kv_tokens, FAST, 1000, lambda _: None) for i in range(stages)]


def run(engines: Sequence[TimedEngine], batch: Sequence[Segment]) -> list[tuple[int, ...]]:
    for engine in engines:
        outputs = engine.run(batch)
        batch = [replace(s, hidden=output.hidden) for s, output in zip(batch, outputs, strict=True)]
    return [output.drawn for output in outputs]


def decode(engines: Sequence[TimedEngine], session: int, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(run(engines, [segment(session, 0, prompt)])[0])
    while len(tokens) < count:
        tokens += run(engines, [segment(session, len(prompt) + len(tokens) - 1, tokens[-1:])])[0]
    return tokens


prompts = st.lists(st.integers(0, 999), min_size=2, max_size=40)


@given(prompts, st.integers(1, 6))
@settings(max_examples=50, derandomize=True)
def test_the_same_tokens_however_it_is_cut(prompt: list[int], stages: int) -> None:
    assert decode(chain(stages), 1, prompt, 12) == decode(chain(1), 1, prompt, 12)


@given(prompts, prompts, st.integers(1, 3), st.data())
@settings(max_examples=50, derandomize=True)
def test_the_same_tokens_however_rows_are_batched(
    prompt: list[int], other: list[int], stages: int, data: st.DataObject
) -> None:
    """Chunks, windows with rejected rows, and another session in the same forward."""
    expected, engines = decode(chain(1), 1, prompt, 12), chain(stages)
    split = data.draw(st.integers(1, len(prompt) - 1))
    run(engines, [segment(1, 0, prompt[:split], 0, RowKind.PREFILL)])
    first, _ = run(engines, [segment(1, split, prompt[split:], 1, RowKind.PREFILL), segment(2, 0, other)])
    assert list(first) == expected[:1]
    done = 0
    while done < len(expected) - 1:
        start = len(prompt) + done
        wrong = [expected[done], *data.draw(st.lists(st.integers(0, 999), max_size=4))]
        run(engines, [segment(1, start, wrong, len(wrong), RowKind.DECODE)])
        window = expected[done : min(done + data.draw(st.integers(1, 4)), len(expected) - 1)]
        drawn = run(engines, [segment(1, start, window, len(window), RowKind.DECODE)])[0]
        assert list(drawn) == expected[done + 1 : done + 1 + len(window)]
        done += len(window)


def test_every_id_of_the_past_matters() -> None:
    prompt = list(range(20))
    tokens = decode(chain(2), 1, prompt, 8)
    for position in range(len(prompt)):
        changed = [*prompt[:position], 999, *prompt[position + 1 :]]
        assert decode(chain(2), 1, changed, 8) != tokens


def test_a_stage_that_lost_a_row_is_noticed() -> None:
    first, last = chain(2)
    ids = segment(1, 0, [1, 2, 3])
    hidden = first.run([ids])[0].hidden
    assert hidden is not None
    with pytest.raises(AssertionError, match="do not follow"):
        last.run([replace(ids, hidden=np.ascontiguousarray(hidden[::-1]))])


def test_rows_of_another_stage_are_refused() -> None:
    first, last = chain(2)
    with pytest.raises(SessionError, match="another stage"):
        last.check(segment(1, 0, [1, 2]))
    with pytest.raises(SessionError, match="another stage"):
        first.check(replace(segment(1, 0, [1, 2]), hidden=np.zeros((2, HIDDEN_SIZE), np.float32)))
    with pytest.raises(SessionError, match="vocabulary"):
        first.check(segment(1, 0, [1, 1000]))
    with pytest.raises(SessionError, match="gap"):
        first.check(segment(1, 5, [1, 2]))


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    (engine,) = chain(1, kv_tokens=64)
    engine.run([segment(1, 0, [1, 2, 3])])
    free = engine.free_tokens
    with pytest.raises(CapacityError):
        engine.run([segment(1, 1, [7]), segment(2, 0, list(range(40)))])
    assert engine.free_tokens == free
    engine.check(segment(1, 3, [4]))
    with pytest.raises(CapacityError, match="longer than"):
        engine.check(segment(3, 0, list(range(65))))


def test_a_closed_session_gives_its_cache_back() -> None:
    (engine,) = chain(1, kv_tokens=64)
    request = segment(1, 0, list(range(40)))
    engine.run([request])
    assert engine.free_tokens == 0
    engine.close_session(request.session)
    engine.close_session(request.session)
    assert engine.free_tokens == 64
    engine.run([request])
    engine.reset()
    assert engine.free_tokens == 64


def test_a_forward_takes_its_time_once() -> None:
    slept: list[float] = []
    engine = TimedEngine(True, True, 4096, StageTimes(30.0, 2.0), sleep=slept.append)
    engine.run([segment(1, 0, [1, 2, 3, 4]), segment(2, 0, [5, 6])])
    engine.run([segment(1, 4, [5])])
    assert slept == pytest.approx([0.040, 0.030])
