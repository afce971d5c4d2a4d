"""The stateful engine: whatever is cut, drafted, rejected, masked and compacted, every logit is plain decoding's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.engine import devices, stateful
from swarm.engine.layout import ALIGN
from swarm.engine.selftest import Chain, segment
from swarm.engine.stateful import StatefulEngine, dividing_threads
from swarm.model.cut import cut
from swarm.model.shard import Shard
from swarm.model.tiny import HIDDEN, VOCABULARY, tiny_model
from swarm.protocol.config import STATEFUL
from swarm.protocol.errors import CapacityError, DeviceError, SessionError
from swarm.protocol.limits import MAX_SEGMENT_ROWS
from swarm.protocol.messages import RowKind, Segment
from swarm.protocol.sampling import SamplingParams
from tests.engine.chains import DEVICE, THREADS, Plain, assert_same_bits, plain, published
from tests.engine.histories import live

LAYERS, DECODED, KV_TOKENS = 3, 20, 2048

# --- any history, bit for bit ---------------------------------------------------------------------------------------


@cache
def tiny_engine(start: int, end: int) -> StatefulEngine:
    return StatefulEngine(Shard(cut(tiny_model(LAYERS), start, end)), DEVICE, KV_TOKENS, VOCABULARY, THREADS)


@cache
def tiny_references() -> tuple[Plain, ...]:
    random = np.random.default_rng(3)
    whole, found = Chain([tiny_engine(0, LAYERS)]), []
    for length in (1, 9, 33, 70):
        whole.engines[0].reset()
        found.append(plain(whole, 1, random.integers(0, VOCABULARY, length).tolist(), DECODED))
    return tuple(found)


class Checked(Chain):
    """Every engine's bookkeeping is checked after each batch, and now and then a cache is trimmed physically."""

    def __init__(self, engines: list[StatefulEngine], data: st.DataObject) -> None:
        super().__init__(engines)
        self.stateful = engines
        self.data = data

    def run(self, batch: list[Segment]) -> tuple[list[tuple[int, ...]], np.ndarray]:
        for engine in self.stateful:
            for session in engine._sessions.values():
                if self.data.draw(st.sampled_from([False, False, False, False, True])):
                    engine._compact(session)
        found = super().run(batch)
        for engine in self.stateful:
            engine.validate_state()
        return found


@given(st.sets(st.integers(1, LAYERS - 1)), st.data())
@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_cut_interleaving_chunk_window_replay_and_compaction(cuts: set[int], data: st.DataObject) -> None:
    engines = [tiny_engine(a, b) for a, b in itertools.pairwise([0, *sorted(cuts), LAYERS])]
    chosen = data.draw(st.lists(st.sampled_from(tiny_references()), min_size=1, max_size=3))
    live(Checked(engines, data), chosen, data, least=1)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=30))
@settings(max_examples=20, derandomize=True, deadline=None)
def test_masked_cells_give_the_bits_of_a_cache_trimmed_after_every_window(verdicts: list[tuple[int, int]]) -> None:
    """(rejected, accepted) rows of each window in turn; both engines are given the same wrong tokens."""
    expected, masked, trimmed = tiny_references()[1], tiny_engine(0, LAYERS), trimming_engine()
    masked.reset()
    trimmed.reset()
    prompt, ids = len(expected.prompt), expected.ids
    rows = [run_both(masked, trimmed, segment(1, 0, expected.prompt))]
    done = prompt
    for rejected, accepted in verdicts:
        end = min(done + accepted, len(ids) - 1)
        if end == done:
            break
        window = [*ids[done:end], *range(rejected)]
        rows.append(run_both(masked, trimmed, segment(1, done, window, len(window), RowKind.DECODE))[: end - done])
        done = end
    found = np.concatenate(rows)
    assert_same_bits(found, expected.logits[prompt - 1 : prompt - 1 + len(found)], "windows")
    assert all(session.layout.masked == 0 for session in trimmed._sessions.values())


@cache
def trimming_engine() -> StatefulEngine:
    class Trimming(StatefulEngine):
        """Compacts at every rewind."""

        def _rewind(self, session: stateful._Session, start: int) -> None:
            super()._rewind(session, start)
            self._compact(session)

    return Trimming(Shard(cut(tiny_model(LAYERS), 0, LAYERS)), DEVICE, KV_TOKENS, VOCABULARY, THREADS)


def run_both(masked: StatefulEngine, trimmed: StatefulEngine, asked: Segment) -> np.ndarray:
    masked.run([asked])
    trimmed.run([asked])
    assert_same_bits(masked.logits(), trimmed.logits(), f"rows from {asked.start}")
    return masked.logits()


@pytest.mark.model
def test_smollm2_any_interleaving_chunk_window_and_replay(smollm2_ir: Path, tmp_path: Path) -> None:
    model = published(smollm2_ir, tmp_path, STATEFUL)
    random = np.random.default_rng(4)
    whole = model.whole(KV_TOKENS)
    references = [plain(whole, n, random.integers(0, 2000, length).tolist(), 12) for n, length in enumerate((5, 40))]
    chains = [model.chain(cuts, KV_TOKENS) for cuts in ([14], [9, 20])]

    @given(st.sampled_from(chains), st.data())
    @settings(max_examples=2, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def run(chain: Chain, data: st.DataObject) -> None:
        live(chain, data.draw(st.lists(st.sampled_from(references), min_size=1, max_size=3)), data, least=1)

    run()


# --- rewinding and compaction ---------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> StatefulEngine:
    whole = tiny_engine(0, LAYERS)
    whole.reset()
    return whole


def reject(engine: StatefulEngine, start: int) -> None:
    engine.run([segment(1, start, [1, 2, 3], 3, RowKind.DECODE)])


def test_a_rewind_leaves_cells_behind_until_there_are_too_many(
    engine: StatefulEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stateful, "MASKED_CELLS", 60)
    engine.run([segment(1, 0, list(range(10)))])
    (session,) = engine._sessions.values()
    masked = []
    for _ in range(8):
        reject(engine, 10)
        masked.append(session.layout.masked)
    assert masked == [0, 16, 32, 48, 64, 0, 16, 32]


def test_a_new_beginning_masks_nothing(engine: StatefulEngine) -> None:
    engine.run([segment(1, 0, list(range(300)))])
    engine.run([segment(1, 0, [1, 2, 3])])
    (session,) = engine._sessions.values()
    assert (session.layout.held, session.layout.masked) == (3, 0)


def test_a_full_cache_compacts_before_it_refuses() -> None:
    """Masked cells are counted, and given up when others need the room."""
    engine = small_engine(128)
    for session in range(4):
        engine.run([segment(session, 0, list(range(20)))])
    for start in [20] * 40:
        reject(engine, start)
        engine.validate_state()
    assert engine.free_tokens == 128 - 4 * 20 - 3
    engine.run([segment(5, 0, list(range(45)))])
    engine.validate_state()
    assert engine.free_tokens == 0


# --- the interface --------------------------------------------------------------------------------------------------


def test_rows_beyond_one_forward_are_the_same_rows(engine: StatefulEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(5).integers(0, VOCABULARY, 70).tolist()
    engine.run([segment(1, 0, ids, 50)])
    expected = engine.logits()
    monkeypatch.setattr(stateful, "FORWARD_ROWS", 16)
    drawn = engine.run([segment(2, 0, ids, 50)])[0].drawn
    assert_same_bits(engine.logits(), expected, "in five forwards")
    assert drawn == tuple(expected.argmax(-1))


def test_outputs_are_the_callers_own() -> None:
    first = tiny_engine(0, 2)
    first.reset()
    hidden = first.run([segment(1, 0, [1, 2, 3])])[0].hidden
    assert hidden is not None
    kept = hidden.copy()
    first.run([segment(1, 3, [4, 5, 6])])
    assert np.array_equal(hidden, kept)
    assert (hidden.shape, hidden.dtype) == ((3, HIDDEN), np.float32)


def test_wanted_rows_are_the_last_of_each_segment(engine: StatefulEngine) -> None:
    a, b, c = segment(1, 0, [1, 2, 3], 2), segment(2, 0, [4, 5], 0), segment(3, 0, [6, 7, 8], 1)
    outputs = engine.run([a, b, c])
    assert [len(output.drawn) for output in outputs] == [2, 0, 1]
    logits = engine.logits()
    assert [token for output in outputs for token in output.drawn] == logits.argmax(-1).tolist()
    engine.run([replace(c, start=0)])
    assert_same_bits(logits[2:3], engine.logits(), "the third segment")


def test_draws_depend_on_seed_and_position_however_they_are_reached(engine: StatefulEngine) -> None:
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


def test_siblings_do_not_notice_that_a_session_is_opened_reset_or_closed(engine: StatefulEngine) -> None:
    """Bit for bit, in the middle of an answer."""
    one, other = tiny_references()[1], tiny_references()[2]
    engine.run([segment(1, 0, one.prompt)])
    churn = itertools.cycle([partial(engine.close_session, segment(2, 0, [1]).session), lambda: None])
    for position in range(len(one.prompt), len(one.ids) - 1):
        next(churn)()
        engine.run([segment(2, 0, other.prompt), segment(1, position, one.ids[position : position + 1])])
        assert_same_bits(engine.logits()[1:], one.logits[position : position + 1], f"position {position}")


def test_where_sessions_need_models_of_their_own_they_get_and_return_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compute the same."""
    monkeypatch.setitem(devices._PROFILES, "CPU", replace(devices.profile("CPU"), model_per_session=True))
    one = tiny_references()[1]
    engine = StatefulEngine(Shard(tiny_model(LAYERS)), DEVICE, 256, VOCABULARY, THREADS)
    for _ in range(2):
        engine.run([segment(n, 0, one.prompt) for n in (1, 2)])
        assert_same_bits(engine.logits(), one.logits[[len(one.prompt) - 1] * 2], "two sessions")
        used = {id(session.compiled) for session in engine._sessions.values()}
        assert len(used) == 2
        engine.reset()
        assert {id(compiled) for compiled in engine._idle} == used


@pytest.mark.parametrize(
    ("bad", "error", "reason"),
    [
        (segment(1, 3, [1, 2]), SessionError, "gap"),
        (segment(1, 0, [1, VOCABULARY]), SessionError, "vocabulary"),
        (replace(segment(1, 0, [1, 2]), hidden=np.zeros((2, HIDDEN), np.float32)), SessionError, "another stage"),
        (segment(1, 0, [1] * (MAX_SEGMENT_ROWS + 1)), CapacityError, "too large"),
    ],
)
def test_what_cannot_run_is_refused(engine: StatefulEngine, bad: Segment, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        engine.check(bad)
    with pytest.raises(error, match=reason):
        engine.run([bad])
    assert engine.free_tokens == KV_TOKENS


def small_engine(kv_tokens: int) -> StatefulEngine:
    return StatefulEngine(Shard(cut(tiny_model(1), 0, 1)), DEVICE, kv_tokens, VOCABULARY, THREADS)


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    engine = small_engine(96)
    expected = plain(Chain([small_engine(96)]), 1, list(range(40)), 2)
    engine.run([segment(1, 0, list(range(40)))])
    with pytest.raises(CapacityError, match="full"):
        engine.run([segment(1, 10, [5]), segment(2, 0, list(range(96)))])
    assert engine.free_tokens == 56
    engine.run([segment(1, 40, expected.tokens[:1])])
    assert_same_bits(engine.logits(), expected.logits[40:41], "after the refusal")
    with pytest.raises(CapacityError, match="at most 96"):
        engine.check(segment(3, 0, list(range(97))))


def test_a_shard_that_does_not_compile_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.profile("CPU").properties, "NO_SUCH_PROPERTY", "1")
    with pytest.raises(DeviceError, match="CPU cannot compile the shard"):
        small_engine(96)


@pytest.mark.parametrize(
    ("heads", "cores", "threads"), [(3, 2, 1), (3, 16, 3), (2, 8, 2), (8, 12, 8), (8, 6, 4), (1, 64, 1), (4, 1, 1)]
)
def test_threads_share_heads_evenly(heads: int, cores: int, threads: int) -> None:
    assert dividing_threads(heads, cores) == threads


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    yield
    for start, end in ((0, LAYERS), (0, 2)):
        tiny_engine(start, end).reset()


def test_a_cache_begins_with_cells_of_nobody(engine: StatefulEngine) -> None:
    engine.run([segment(1, 0, [1, 2])])
    (session,) = engine._sessions.values()
    cells = session.request.query_state()[0].state.data
    assert cells.shape[2] == ALIGN + 2
    assert not cells[:, :, :ALIGN].any()
    assert cells[:, :, ALIGN:].any()
