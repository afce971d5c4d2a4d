"""The cut: shards compute what the whole computes, and what cannot be cut is refused.

Shapes that a layer reads from an earlier one are tried in a plain stateful run on the CPU: a batch of two, prefill and
then single rows, so that batch, rows, past and total length all differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from swarm.engine.paged import PagedEngine
from swarm.engine.selftest import Chain
from swarm.model.cut import HIDDEN_INPUT, HIDDEN_OUTPUT, LOGITS_OUTPUT, cut
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard
from swarm.model.tiny import HEAD_SIZE, HIDDEN, KV_HEADS, VOCABULARY, tiny_model
from swarm.protocol.errors import UnsupportedModelError
from swarm.protocol.tensors import Array
from tests.engine.chains import DEVICE, THREADS, assert_same_bits, plain
from tests.model.graphs import SHARING, Node, attentions, caches, rewire, sharing

LAYERS = 3


def names(model: ov.Model) -> set[str]:
    return {port.get_any_name() for port in model.inputs}


@pytest.mark.parametrize(("start", "end"), [(a, b) for a in range(LAYERS) for b in range(a + 1, LAYERS + 1)])
def test_a_shard_has_its_own_inputs_output_and_caches(start: int, end: int) -> None:
    shard = cut(tiny_model(LAYERS), start, end)
    rows = {"input_ids"} if start == 0 else {HIDDEN_INPUT}
    assert names(shard) == {*rows, "attention_mask", "position_ids", "beam_idx"}
    assert shard.outputs[0].get_any_name() == (LOGITS_OUTPUT if end == LAYERS else HIDDEN_OUTPUT)
    width = VOCABULARY if end == LAYERS else HIDDEN
    assert str(shard.outputs[0].get_partial_shape()) == f"[?,?,{width}]"
    assert len(shard.outputs) == 1
    assert {node.get_variable_id().split(".")[1] for node in caches(shard)} == {str(i) for i in range(start, end)}
    assert len(shard.get_sinks()) == 2 * (end - start)
    if start > 0:
        assert str(shard.input(HIDDEN_INPUT).get_partial_shape()) == f"[?,?,{HIDDEN}]"


@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, 1), (2, 1), (-1, 2), (0, LAYERS + 1), (LAYERS, LAYERS + 1)])
def test_no_shard_without_layers(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="no layers"):
        cut(tiny_model(LAYERS), start, end)


def test_shards_leave_each_others_weights_out() -> None:
    """A shard's constants are those of its layers: they are all that it compiles and holds."""

    def constants(model: ov.Model) -> int:
        return sum(node.get_byte_size() for node in model.get_ordered_ops() if node.get_type_name() == "Constant")

    parts = [constants(cut(tiny_model(LAYERS), a, a + 1)) for a in range(LAYERS)]
    assert sum(parts) == pytest.approx(constants(tiny_model(LAYERS)), rel=0.01)
    assert parts[1] < min(parts[0], parts[2])


# --- shapes read from earlier layers --------------------------------------------------------------------------------


class Stateful:
    """Shards run one after the other as the plugin runs them, without the paged pass."""

    def __init__(self, shards: list[ov.Model], **more: str) -> None:
        core = ov.Core()
        properties = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} | more
        self._requests = [core.compile_model(shard, "CPU", properties).create_infer_request() for shard in shards]
        self._past = 0

    def run(self, ids: Array) -> Array:
        batch, rows = ids.shape
        end = self._past + rows
        given: dict[str, Array] = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, end), np.int64),
            "position_ids": np.tile(np.arange(self._past, end), (batch, 1)),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        for request in self._requests:
            wanted = {port.get_any_name() for port in request.model_inputs}
            request.infer({name: value for name, value in given.items() if name in wanted})
            given[HIDDEN_INPUT] = request.get_output_tensor(0).data.copy()
        self._past = end
        return given[HIDDEN_INPUT]


def logits(shards: list[ov.Model]) -> Array:
    """Of two sequences: seven rows at once, then two, then single ones."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 11))
    chain = Stateful(shards)
    return np.concatenate([chain.run(ids[:, a:b]) for a, b in ((0, 7), (7, 9), (9, 10), (10, 11))], axis=1)


Source = Callable[[ov.Model], Node]


def embedding(model: ov.Model) -> Node:
    graph = Graph.of(model)
    return graph.nodes[map_layers(graph).embedded]


def first_activation(model: ov.Model) -> Node:
    graph = Graph.of(model)
    return graph.nodes[map_layers(graph).boundaries[0]]


def first_cache(model: ov.Model) -> Node:
    return caches(model)[0]


def first_cache_gathered(model: ov.Model) -> Node:
    return next(iter(caches(model)[0].output(0).get_target_inputs())).get_node()


def first_keys(model: ov.Model) -> Node:
    """Past and new keys of layer 0 together."""
    return next(iter(first_cache_gathered(model).output(0).get_target_inputs())).get_node()


def first_new_keys(model: ov.Model) -> Node:
    return first_keys(model).input_value(1).get_node()


def first_query(model: ov.Model) -> Node:
    return attentions(model)[0].input_value(0).get_node()


def tokens(model: ov.Model) -> Node:
    return model.input("input_ids").get_node()


SOURCES: list[Source] = [
    tokens,
    embedding,
    first_activation,
    first_cache,
    first_cache_gathered,
    first_keys,
    first_new_keys,
    first_query,
]


def reading(source: Source, kind: str = "i64") -> ov.Model:
    """A decoder whose last layer scales its output by every axis of the shape of an early tensor."""
    model = tiny_model(LAYERS)
    shape = ops.convert(ops.shape_of(source(model), kind), ov.Type.f32)
    scale = ops.constant(np.float32(0.01))
    graph = Graph.of(model)
    head = graph.nodes[map_layers(graph).head]
    rank = shape.get_output_partial_shape(0)[0].get_length()
    x: Node = head.input_value(0)
    for axis in range(rank):
        length = ops.gather(shape, ops.constant(np.int64(axis)), ops.constant(np.int64(0)))
        x = ops.multiply(x, ops.add(ops.constant(np.float32(1)), ops.multiply(length, scale)))
    rewire(head, 0, x)
    model.validate_nodes_and_infer_types()
    return model


@cache
def plain_logits() -> Array:
    return logits([tiny_model(LAYERS)])


@pytest.mark.parametrize(
    ("source", "kind"),
    [*((source, "i64") for source in SOURCES), (first_keys, "i32")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_shape_read_from_an_early_layer_keeps_its_value(source: Source, kind: str) -> None:
    whole = logits([reading(source, kind)])
    assert not np.allclose(whole, plain_logits(), rtol=1e-3), "the shape matters"
    for start in (1, 2):
        chain = logits([cut(reading(source, kind), 0, start), cut(reading(source, kind), start, LAYERS)])
        np.testing.assert_allclose(chain, whole, rtol=1e-4, atol=1e-5)


def test_static_axes_become_constants() -> None:
    """An axis with a fixed size needs no input: the shard reads nothing of the layer it came from."""
    shard = cut(reading(first_new_keys), 2, LAYERS)
    assert names(shard) == {HIDDEN_INPUT, "attention_mask", "position_ids", "beam_idx"}
    sizes = [
        int(node.get_data().reshape(-1)[0])
        for node in shard.get_ordered_ops()
        if node.get_type_name() == "Constant" and list(node.get_output_shape(0)) == [1]
    ]
    assert KV_HEADS in sizes


def test_what_reads_an_earlier_cache_itself_is_refused() -> None:
    """Not its shape: its content. The residual stream does not carry that."""
    model = tiny_model(LAYERS)
    graph = Graph.of(model)
    head = graph.nodes[map_layers(graph).head]
    total = ops.reduce_sum(first_cache(model), ops.constant(np.array([0, 1, 2, 3], np.int64)), False)
    rewire(head, 0, ops.add(head.input_value(0), total))
    with pytest.raises(UnsupportedModelError, match=r"layer 2 reads more than the layer before it.*found ReadValue"):
        cut(model, 2, LAYERS)


# --- caches that later layers read too --------------------------------------------------------------------------------


def sharing_engine(start: int, end: int, *shared: int) -> PagedEngine:
    return PagedEngine(Shard(cut(sharing(*shared), start, end)), DEVICE, 256, VOCABULARY, THREADS)


@pytest.mark.parametrize("shared", [(0,), (0, 2), (0, 0), (SHARING - 1,)])
def test_layers_that_share_a_cache(shared: tuple[int, ...]) -> None:
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 40).tolist()
    whole = plain(Chain([sharing_engine(0, SHARING, *shared)]), 1, prompt, 8)
    for cuts in ([1], [3], list(range(1, SHARING))):
        ends = [0, *cuts, SHARING]
        chain = Chain([sharing_engine(a, b, *shared) for a, b in itertools.pairwise(ends)])
        assert_same_bits(plain(chain, 1, prompt, 8).logits, whole.logits, f"sharing {shared}, cut before {cuts}")


def test_layers_that_share_a_cache_run_stateful_too() -> None:
    """Close, not equal: the plugin fuses attention with a cache of one reader, as in the shard, and not of two."""
    whole = Stateful([sharing(0)], KV_CACHE_PRECISION="f32")
    chain = Stateful([cut(sharing(0), a, b) for a, b in ((0, 2), (2, 3), (3, SHARING))], KV_CACHE_PRECISION="f32")
    random = np.random.default_rng(3)
    for rows in (7, 1, 4, 1):
        ids = random.integers(0, VOCABULARY, (2, rows))
        np.testing.assert_allclose(chain.run(ids), whole.run(ids), atol=1e-4)


def test_a_shared_cache_crosses_while_it_is_needed() -> None:
    """As wide as its keys and values from the layer behind it to the last that reads it, and no cache on the way."""
    wide = HIDDEN + 2 * KV_HEADS * HEAD_SIZE
    widths = [cut(sharing(2), at, SHARING).input(HIDDEN_INPUT).get_partial_shape()[2] for at in range(1, SHARING)]
    assert widths == [HIDDEN, HIDDEN, wide]
    passing = cut(sharing(0), 1, 3)
    assert [str(port.get_partial_shape()) for port in (passing.input(HIDDEN_INPUT), passing.outputs[0])] == [
        f"[?,?,{wide}]"
    ] * 2
    assert {node.get_variable_id().split(".")[1] for node in caches(passing)} == {"1", "2"}
    reading = cut(sharing(0), 3, SHARING)
    assert {node.get_variable_id().split(".")[1] for node in caches(reading)} == {"0", "3"}
    assert len(reading.get_sinks()) == 4


# --- a graph as openvino_genai writes it ----------------------------------------------------------------------------


def test_a_converted_gguf_in_two_shards(tiny_ir_model: Callable[[], ov.Model]) -> None:
    """Its layers share reads of shapes, as those of SmolLM2's IR do."""
    vocabulary = tiny_ir_model().outputs[0].get_partial_shape()[2].get_length()

    def engine(start: int, end: int) -> PagedEngine:
        return PagedEngine(Shard(cut(tiny_ir_model(), start, end)), DEVICE, 256, vocabulary, THREADS)

    prompt = np.random.default_rng(1).integers(0, vocabulary, 40).tolist()
    whole = plain(Chain([engine(0, 2)]), 1, prompt, 8)
    halves = plain(Chain([engine(0, 1), engine(1, 2)]), 1, prompt, 8)
    assert halves.tokens == whole.tokens
    assert_same_bits(halves.logits, whole.logits, "two shards")


@pytest.fixture
def tiny_ir_model(tiny_ir: object) -> Callable[[], ov.Model]:
    return lambda: ov.Core().read_model(f"{tiny_ir}/openvino_model.xml")
