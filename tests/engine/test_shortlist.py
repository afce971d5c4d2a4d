"""The short head: the logits of the whole one at its ids, for every form of weights, and when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from swarm.engine import shortlist
from swarm.engine.head import HEAD_ROWS_INPUT, gather_head_rows
from swarm.engine.paged import PagedEngine
from swarm.engine.sampling import draw
from swarm.engine.selftest import segment
from swarm.engine.shortlist import (
    CONTEXT,
    EXTRA_IDS_INPUT,
    MISSED,
    RECENT,
    SHORT_ROWS_INPUT,
    Shortlist,
    add_short_head,
    most_needed,
)
from swarm.model.cut import cut
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard
from swarm.model.tiny import VOCABULARY, tiny_model
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.messages import RowKind
from swarm.protocol.sampling import GREEDY, SamplingParams
from tests.engine.chains import DEVICE, THREADS
from tests.real_models import cache_directory, draft_ir

Node: TypeAlias = Any

ROWS, COLUMNS, GROUP = 300, 192, 64  # three groups: the zero points of a row end within a byte
IDS = np.array([0, 1, 2, 7, 150, 298, 299], np.int64)
SAMPLED = SamplingParams(temperature=0.8, seed=5)

# --- whose rows -----------------------------------------------------------------------------------------------------


def test_the_first_the_last_the_stops_and_single_bytes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortlist, "FIRST", 20)
    monkeypatch.setattr(shortlist, "LAST", 5)
    tokens = dict.fromkeys(range(100), b"ab") | {50: b"7", 60: b""}
    found = most_needed(tokens, {40, 300}, 128)  # 28 ids of padding stand for nothing
    assert found is not None
    assert found.ids.tolist() == [*range(20), 40, 50, *range(95, 100)]
    assert most_needed(tokens, {40}, 49) is None


def test_what_the_text_has_beyond_it_is_listed_too() -> None:
    listed = Shortlist(range(100), 200)
    assert missing(listed, [5, 150, 7, 120, 150], [130, 6]) == [120, 130, 150]
    assert missing(listed, [150] + [5] * CONTEXT) == []
    assert missing(listed) == []


def test_it_suits_where_few_of_the_last_tokens_are_new() -> None:
    listed, few, many = Shortlist(range(100), 200), [*range(100, 100 + MISSED)], [*range(100, 101 + MISSED)]
    assert missing(listed, [5] * RECENT + few * 3) == few
    assert missing(listed, [5] * RECENT + many) is None
    assert missing(listed, many + [5] * RECENT) == many
    assert missing(listed, many + [5] * RECENT + many) == many
    assert missing(listed, few, many) is None


def missing(listed: Shortlist, *sessions: list[int]) -> list[int] | None:
    found = listed.missing(sessions)
    return None if found is None else found.tolist()


# --- the graph ------------------------------------------------------------------------------------------------------


def _f16(random: np.random.Generator) -> Node:
    return _converted(ops.constant(random.standard_normal((ROWS, COLUMNS)).astype(np.float16)))


def _f32(random: np.random.Generator) -> Node:
    return ops.constant(random.standard_normal((ROWS, COLUMNS)).astype(np.float32))


def _u8_by_row(random: np.random.Generator) -> Node:
    values = _converted(ops.constant(random.integers(0, 256, (ROWS, COLUMNS), dtype=np.uint8)), "f16")
    zeros = _converted(ops.constant(random.integers(120, 136, (ROWS, 1), dtype=np.uint8)), "f16")
    return _converted(ops.multiply(ops.subtract(values, zeros), _scales(random, (ROWS, 1))))


def _grouped(kind: str, zero_points: bool) -> Callable[[np.random.Generator], Node]:
    def build(random: np.random.Generator) -> Node:
        values = _converted(_integers(kind, [ROWS, COLUMNS // GROUP, GROUP], random), "f16")
        if zero_points:
            values = ops.subtract(values, _converted(_integers(kind, [ROWS, COLUMNS // GROUP, 1], random), "f16"))
        scaled = ops.multiply(values, _scales(random, (ROWS, COLUMNS // GROUP, 1)))
        return _converted(ops.reshape(scaled, np.array([ROWS, COLUMNS]), False))

    return build


def _converted(node: Node, kind: str = "f32") -> Node:
    return ops.convert(node, kind)


def _scales(random: np.random.Generator, shape: tuple[int, ...]) -> Node:
    return ops.constant(random.uniform(0.001, 0.002, shape).astype(np.float16))


def _integers(kind: str, shape: list[int], random: np.random.Generator) -> Node:
    tensor = ov.Tensor(getattr(ov.Type, kind), ov.Shape(shape))
    data = tensor.data.reshape(-1).view(np.uint8)
    data[:] = random.integers(0, 256, len(data), dtype=np.uint8)
    return ops.constant(tensor)


FORMS = {
    "f16": _f16,
    "f32": _f32,
    "u8": _u8_by_row,
    "i8": _grouped("i8", False),
    "u8-grouped": _grouped("u8", True),
    "u4": _grouped("u4", True),
    "i4": _grouped("i4", False),
}


def head_model(weight: Node, behind: Callable[[Node], Node] = lambda logits: logits) -> ov.Model:
    hidden = ops.parameter([-1, 1, COLUMNS], ov.Type.f32, name="hidden")
    hidden.output(0).set_names({"hidden"})
    return ov.Model([ops.result(behind(ops.matmul(hidden, weight, False, True)))], [hidden], "head")


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_whole_head(form: str) -> None:
    random = np.random.default_rng(1)
    model = head_model(FORMS[form](random))
    assert add_short_head(model, IDS)
    gather_head_rows(model, axis=0)
    # Rows that are looked up meet activations that are not quantized, here like the others.
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    request = ov.Core().compile_model(model, DEVICE, exact).create_infer_request()
    hidden, some, none = random.standard_normal((3, 1, COLUMNS), np.float32), np.array([2, 0]), np.empty(0, np.int64)
    for extra in (none, np.array([200, 5, 9])):
        request.infer({"hidden": hidden, HEAD_ROWS_INPUT: some, SHORT_ROWS_INPUT: some, EXTRA_IDS_INPUT: extra})
        whole, short = (request.get_output_tensor(i).data.reshape(2, -1).copy() for i in (0, 1))
        assert np.abs(whole).max() > 0.1
        np.testing.assert_allclose(short, whole[:, [*IDS, *extra]], rtol=1e-5, atol=1e-5)
        request.infer({"hidden": hidden, HEAD_ROWS_INPUT: none, SHORT_ROWS_INPUT: some, EXTRA_IDS_INPUT: extra})
        assert request.get_output_tensor(0).data.size == 0
        assert np.array_equal(request.get_output_tensor(1).data.reshape(2, -1), short)


def test_a_weight_stays_in_its_element_type() -> None:
    model = head_model(FORMS["u4"](np.random.default_rng(1)))
    assert add_short_head(model, IDS)
    sizes = [node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant"]
    assert len(IDS) * COLUMNS // 2 in sizes


@pytest.mark.parametrize(
    "model",
    [
        head_model(_f32(np.random.default_rng(1)), lambda logits: ops.tanh(logits)),
        head_model(ops.tanh(_f32(np.random.default_rng(1)))),
        head_model(ops.reshape(ops.constant(np.zeros((COLUMNS, ROWS), np.float32)), np.array([ROWS, COLUMNS]), False)),
    ],
    ids=["a cap on the logits", "an unknown step to the weight", "rows that a reshape makes"],
)
def test_a_head_of_another_form_is_left_whole(model: ov.Model) -> None:
    before = len(model.get_ops())
    assert not add_short_head(model, IDS)
    assert len(model.get_ops()) == before
    assert len(model.outputs) == len(model.inputs) == 1


# --- the engine -----------------------------------------------------------------------------------------------------


def engine(listed: Shortlist | None) -> PagedEngine:
    return PagedEngine(Shard(cut(tiny_model(2), 0, 2)), DEVICE, 256, VOCABULARY, THREADS, shortlist=listed)


def test_a_session_that_it_suits_draws_from_it_with_the_noise_of_the_whole() -> None:
    listed, whole = Shortlist(range(0, VOCABULARY, 3), VOCABULARY), engine(None)
    short = engine(listed)
    prompt = [3 * (7 * i % 50) for i in range(20)] + [1, 100]
    for sampling in (GREEDY, SAMPLED, replace(SAMPLED, repetition_penalty=1.3)):
        for one in (short, whole):
            one.reset()
        asked = replace(segment(0, 0, prompt, 3, RowKind.PREFILL), sampling=sampling)
        (output,) = short.run([asked])
        whole.run([asked])
        ids = np.array([*listed.ids, 1, 100])
        rows = whole.logits()[:, ids]
        history = np.array(prompt, np.int64)
        expected = [draw(row, sampling, 20 + i, history[: 20 + i], ids) for i, row in enumerate(rows)]
        assert list(output.drawn) == expected
        assert not {*expected} - {*ids.tolist()}


def test_a_chunk_of_a_prompt_draws_nothing() -> None:
    short, whole = engine(Shortlist(range(100), VOCABULARY)), engine(None)
    for first in ([1, 2, 3], [*range(200, 220)]):
        for one in (short, whole):
            one.reset()
        assert short.run([segment(0, 0, first, 0, RowKind.PREFILL)])[0].drawn == ()
        whole.run([segment(0, 0, first, 0, RowKind.PREFILL)])
        (output,) = short.run([segment(0, len(first), [7], 1)])
        whole.run([segment(0, len(first), [7], 1)])
        listed = [*range(100)] if len(first) == 3 else [*range(VOCABULARY)]
        assert output.drawn == (draw(whole.logits()[0, listed], GREEDY, len(first) + 1, np.array(first)),)


def test_other_sessions_draw_from_the_whole_vocabulary() -> None:
    short, whole = engine(Shortlist(range(100), VOCABULARY)), engine(None)
    prompts = [[*range(100, 120)], [1, 2, 3], [*range(300, 330)]]
    batch = [replace(segment(i, 0, rows, 1), sampling=SAMPLED) for i, rows in enumerate(prompts)]
    assert short.run(batch) == whole.run(batch)
    (output,) = short.run([segment(1, 3, [4], 1)])
    assert output.drawn[0] < 100
    assert short.run([segment(0, 20, [120], 1)]) == whole.run([segment(0, 20, [120], 1)])


@pytest.mark.large
def test_a_real_draft() -> None:
    """It reads a prompt with the short head, and ends a turn as the whole head does."""
    ir = draft_ir(cache_directory())
    tokenizer = Tokenizer.load(ir)
    listed = most_needed(tokenizer.tokens(), tokenizer.stop_tokens, tokenizer.vocabulary_size)
    assert listed is not None
    assert tokenizer.stop_tokens <= {*listed.ids.tolist()}
    drawn = []
    for each in (listed, None):
        model = ov.Core().read_model(ir / "openvino_model.xml")
        layers = map_layers(Graph.of(model)).layers
        one = PagedEngine(Shard(cut(model, 0, layers)), DEVICE, 256, tokenizer.vocabulary_size, 1, shortlist=each)
        turn = tokenizer.render_chat([("user", "Say only: yes")]) + "yes<|im_end|>"
        prompt = tokenizer.encode(turn)
        asked = segment(0, 0, prompt, 8, RowKind.PREFILL)
        drawn.append([one.run([replace(asked, sampling=sampling)])[0].drawn for sampling in (GREEDY, SAMPLED)])
        one.close()
    assert drawn[0] == drawn[1]
    assert tokenizer.encode("<|im_end|>")[0] in drawn[0][0]
