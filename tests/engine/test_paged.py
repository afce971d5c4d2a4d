"""The paged engine: whatever is batched, cut, drafted, rejected and replayed, every logit is that of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.engine.paged import MAX_ROWS, PagedEngine
from swarm.engine.selftest import Chain, segment
from swarm.model.cut import cut
from swarm.model.shard import Shard
from swarm.model.tiny import HIDDEN, VOCABULARY, tiny_model
from swarm.protocol.errors import CapacityError, DeviceError, SessionError
from swarm.protocol.messages import RowKind, Segment
from swarm.protocol.sampling import SamplingParams
from tests.engine.chains import DEVICE, THREADS, Plain, Published, assert_same_bits, plain, published
from tests.engine.histories import live

LAYERS, DECODED, KV_TOKENS = 4, 20, 2048

# --- any history, bit for bit ---------------------------------------------------------------------------------------


@cache
def tiny_engine(start: int, end: int) -> PagedEngine:
    return PagedEngine(Shard(cut(tiny_model(LAYERS), start, end)), DEVICE, KV_TOKENS, VOCABULARY, THREADS)


@cache
def tiny_references() -> tuple[Plain, ...]:
    random = np.random.default_rng(3)
    whole, found = Chain([tiny_engine(0, LAYERS)]), []
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (2, 9, 33, 70)]
    prompts += [[*prompts[-1][:40], *prompts[1]], prompts[-1][:68]]  # they begin like others
    for prompt in prompts:
        whole.engines[0].reset()
        found.append(plain(whole, 1, prompt, DECODED))
    return tuple(found)


@given(st.sets(st.integers(1, LAYERS - 1)), st.data())
@settings(max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_cut_batch_chunk_window_and_replay(cuts: set[int], data: st.DataObject) -> None:
    ends = [0, *sorted(cuts), LAYERS]
    chain = Chain([tiny_engine(a, b) for a, b in itertools.pairwise(ends)])
    chosen = data.draw(st.lists(st.sampled_from(tiny_references()), min_size=1, max_size=4))
    live(chain, chosen, data)


@pytest.mark.model
def test_smollm2_any_batch_chunk_window_and_replay(smollm2_ir: Path, tmp_path: Path) -> None:
    model = published(smollm2_ir, tmp_path)
    chains, references = smollm2_chains(model)

    @given(st.sampled_from(chains), st.data())
    @settings(max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    def run(chain: Chain, data: st.DataObject) -> None:
        live(chain, data.draw(st.lists(st.sampled_from(references), min_size=1, max_size=3)), data)

    run()


def smollm2_chains(model: Published) -> tuple[list[Chain], list[Plain]]:
    random = np.random.default_rng(4)
    whole = model.whole(KV_TOKENS)
    references = [plain(whole, n, random.integers(0, 2000, length).tolist(), 12) for n, length in enumerate((5, 40))]
    drawn = [sorted(random.choice(np.arange(1, model.layers), size, replace=False).tolist()) for size in (1, 3)]
    return [model.chain(cuts, KV_TOKENS) for cuts in drawn], references


def test_equal_prefixes_are_computed_once_and_change_nothing() -> None:
    """A session goes on inside a block of another one, one rewinds into one of them, and nobody notices."""
    chain = Chain([tiny_engine(0, 2), tiny_engine(2, LAYERS)])
    first, second, third = tiny_references()[3:]
    assert first.prompt[:40] == second.prompt[:40]
    for engine in chain.engines:
        engine.reset()
    chain.run([segment(1, 0, first.prompt)])
    assert chain.adopt(2, second.prompt[:-2]) == 40
    assert chain.adopt(3, third.prompt[:-2]) >= 64
    rest = [segment(2, 40, second.prompt[40:]), segment(3, 60, third.prompt[60:])]
    _, logits = chain.run(rest)
    assert_same_bits(logits[:1], second.logits[len(second.prompt) - 1 :][:1], "behind adopted blocks")
    assert_same_bits(logits[1:], third.logits[len(third.prompt) - 1 :][:1], "rewound into an adopted block")
    _, logits = chain.run([segment(1, len(first.prompt), first.ids[len(first.prompt) :][:1])])
    assert_same_bits(logits, first.logits[len(first.prompt) :][:1], "the one whose blocks they are")


# --- the interface --------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> PagedEngine:
    whole = tiny_engine(0, LAYERS)
    whole.reset()
    return whole


def test_outputs_are_the_callers_own(engine: PagedEngine) -> None:
    """The plugin's buffers are written again by the next forward."""
    first = tiny_engine(0, 2)
    first.reset()
    hidden = first.run([segment(1, 0, [1, 2, 3])])[0].hidden
    assert hidden is not None
    kept = hidden.copy()
    first.run([segment(2, 0, [4, 5, 6])])
    assert np.array_equal(hidden, kept)
    assert (hidden.shape, hidden.dtype) == ((3, HIDDEN), np.float32)


def test_wanted_rows_are_the_last_of_each_segment(engine: PagedEngine) -> None:
    """A segment that wants nothing takes no row of the head from its neighbours."""
    a, b, c = segment(1, 0, [1, 2, 3], 2), segment(2, 0, [4, 5], 0), segment(3, 0, [6, 7, 8], 1)
    outputs = engine.run([a, b, c])
    assert [len(output.drawn) for output in outputs] == [2, 0, 1]
    logits = engine.logits()[:3].copy()
    assert [token for output in outputs for token in output.drawn] == logits.argmax(-1).tolist()
    engine.reset()
    engine.run([c])
    assert_same_bits(logits[2:3], engine.logits()[:1].copy(), "the third segment")


def test_a_batch_that_wants_nothing_runs(engine: PagedEngine) -> None:
    assert engine.run([segment(1, 0, [1, 2, 3], 0)])[0].drawn == ()
    assert engine.run([segment(1, 3, [4])])[0].drawn != ()


def test_draws_depend_on_seed_and_position_however_they_are_reached(engine: PagedEngine) -> None:
    sampled = SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.2, seed=77)

    def ask(session: int, start: int, ids: list[int], wanted: int, kind: RowKind) -> tuple[int, ...]:
        return engine.run([replace(segment(session, start, ids, wanted, kind), sampling=sampled)])[0].drawn

    prompt = [5, 9, 200, 31]
    ids = [*prompt, *ask(1, 0, prompt, 1, RowKind.PREFILL)]
    while len(ids) < 16:
        ids += ask(1, len(ids) - 1, ids[-1:], 1, RowKind.DECODE)
    assert ask(2, 0, prompt, 1, RowKind.PREFILL) == (ids[4],)
    ask(2, 4, [ids[4], 1, 2, 3], 4, RowKind.DECODE)
    assert list(ask(2, 4, ids[4:15], 11, RowKind.DECODE)) == ids[5:16]


@pytest.mark.parametrize(
    ("bad", "error", "reason"),
    [
        (segment(1, 3, [1, 2]), SessionError, "gap"),
        (segment(1, 0, [1, VOCABULARY]), SessionError, "vocabulary"),
        (segment(1, 0, [-1, 1]), SessionError, "vocabulary"),
        (replace(segment(1, 0, [1, 2]), hidden=np.zeros((2, HIDDEN), np.float32)), SessionError, "another stage"),
        (segment(1, 0, [1] * (MAX_ROWS + 1)), CapacityError, "too large"),
    ],
)
def test_what_cannot_run_is_refused(engine: PagedEngine, bad: Segment, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        engine.check(bad)


@pytest.mark.parametrize(
    "hidden",
    [
        None,
        np.zeros((2, HIDDEN + 1), np.float32),
        np.zeros((3, HIDDEN), np.float32),
        np.zeros((2, HIDDEN), np.float16),
        np.zeros((2 * HIDDEN,), np.float32),
    ],
)
def test_hidden_rows_of_another_shape_are_refused(hidden: np.ndarray | None) -> None:
    with pytest.raises(SessionError, match="another stage"):
        tiny_engine(2, LAYERS).check(replace(segment(1, 0, [1, 2]), hidden=hidden))


def small_engine() -> PagedEngine:
    return PagedEngine(Shard(cut(tiny_model(1), 0, 1)), DEVICE, 96, VOCABULARY, THREADS)


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    engine = small_engine()
    expected = plain(Chain([small_engine()]), 1, list(range(40)), 2)
    engine.run([segment(1, 0, list(range(40)))])
    with pytest.raises(CapacityError, match="full"):
        engine.run([segment(1, 10, [5]), segment(2, 0, list(range(33)))])
    assert engine.free_tokens == 32
    engine.run([segment(1, 40, expected.tokens[:1])])
    assert_same_bits(engine.logits()[:1].copy(), expected.logits[40:41], "after the refusal")
    with pytest.raises(CapacityError, match="at most 96"):
        engine.check(segment(3, 0, list(range(97))))


def test_a_closed_session_gives_its_blocks_to_others() -> None:
    engine = small_engine()
    expected = plain(Chain([small_engine()]), 1, list(range(90)), 2)
    engine.run([segment(7, 0, [3] * 90)])
    engine.close_session(segment(7, 0, [3]).session)
    assert engine.free_tokens == 96
    engine.run([segment(8, 0, list(range(90)))])
    assert_same_bits(engine.logits()[:1].copy(), expected.logits[89:90], "in blocks that another session left")


def test_a_shard_that_does_not_compile_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_model: object) -> None:
        raise RuntimeError("Check failed at src/x.cpp:1:\nthe pass does not know this\n")

    monkeypatch.setattr("swarm.engine.paged.paged_attention_transformation", refuse)
    with pytest.raises(DeviceError, match="CPU cannot compile the shard; found the pass does not know this"):
        small_engine()


# --- the comparison can fail ----------------------------------------------------------------------------------------


def one_ulp(logits: np.ndarray) -> np.ndarray:
    changed = logits.copy()
    changed[1, 3] = np.nextafter(changed[1, 3], np.float32(np.inf))
    return changed


def minus_zero(logits: np.ndarray) -> np.ndarray:
    changed = np.zeros_like(logits)
    changed[1, 3] = -0.0
    return changed


@pytest.mark.parametrize(("change", "against"), [(one_ulp, np.copy), (minus_zero, np.zeros_like)])
def test_a_single_bit_is_noticed(
    change: Callable[[np.ndarray], np.ndarray], against: Callable[[np.ndarray], np.ndarray]
) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    with pytest.raises(AssertionError, match="row 1 of 3"):
        assert_same_bits(change(logits), against(logits), "two forwards")
