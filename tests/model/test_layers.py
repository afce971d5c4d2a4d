"""The layer map on small graphs, whole and spoiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from swarm.model.layers import Graph, map_layers
from swarm.model.tiny import HIDDEN, VOCABULARY, tiny_model
from swarm.protocol.errors import UnsupportedModelError
from tests.model.graphs import attentions, caches, edited, rewire, with_results


def test_the_layers_of_a_small_decoder() -> None:
    graph = Graph.of(tiny_model(3))
    found = map_layers(graph)
    assert found.layers == 3
    assert len(found.boundaries) == 2
    assert [found.entry(layer) for layer in range(3)] == [found.embedded, *found.boundaries]
    for node in (found.embedded, *found.boundaries):
        assert str(graph.nodes[node].get_output_partial_shape(0)) == f"[?,?,{HIDDEN}]"
    assert graph.types[found.embedded] == "Gather"
    assert [graph.types[node] for node in found.boundaries] == ["Add", "Add"]
    assert graph.types[found.head] == "MatMul"
    assert graph.nodes[found.head].get_output_partial_shape(0)[2].get_length() == VOCABULARY
    assert graph.types[found.result] == "Result"
    assert sorted(found.cache_layer.values()) == [0] * 4 + [1] * 4 + [2] * 4


def test_layers_are_found_by_their_caches_not_by_names() -> None:
    """Every node is renamed; the map stays the same."""
    graph = Graph.of(tiny_model(2))
    expected = [graph.types[i] for i in (map_layers(graph).embedded, *map_layers(graph).boundaries)]
    model = tiny_model(2)
    for number, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"x{number * 7919 % 1000}.{number}")
    renamed = Graph.of(model)
    found = map_layers(renamed)
    assert [renamed.types[i] for i in (found.embedded, *found.boundaries)] == expected


def test_a_single_layer_has_no_boundary() -> None:
    assert map_layers(Graph.of(tiny_model(1))).boundaries == ()


def test_operations_behind_the_head_belong_to_it() -> None:
    """Some models scale or cap their logits."""
    model = tiny_model(2)
    logits = model.get_results()[0].input_value(0)
    capped = ops.multiply(ops.tanh(ops.divide(logits, np.float32(30))), np.float32(30))
    graph = Graph.of(with_results(model, [capped]))
    found = map_layers(graph)
    assert graph.types[found.head] == "MatMul"
    assert str(graph.nodes[found.head].get_output_partial_shape(0)) == f"[?,?,{VOCABULARY}]"


def test_a_converted_gguf(tiny_ir: Path) -> None:
    found = map_layers(Graph.of(ov.Core().read_model(tiny_ir / "openvino_model.xml")))
    assert found.layers == 2


# --- what cannot be cut ---------------------------------------------------------------------------------------------


def no_cache() -> ov.Model:
    ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    table = ops.constant(np.zeros((8, 4), np.float32))
    embedded = ops.gather(table, ids, ops.constant(np.int64(0)))
    return ov.Model([ops.result(ops.matmul(embedded, table, False, True))], [ids], "no cache")


def gap(folder: Path) -> ov.Model:
    return edited(tiny_model(3), folder, ("past_key_values.1.", "past_key_values.5."))


def other_state(folder: Path) -> ov.Model:
    return edited(tiny_model(3), folder, ("past_key_values.1.", "conv_state.1."))


def no_tokens(folder: Path) -> ov.Model:
    return edited(tiny_model(2), folder, ("input_ids", "pixel_values"))


def two_outputs(_folder: Path) -> ov.Model:
    model = tiny_model(2)
    logits = model.get_results()[0].input_value(0)
    return with_results(model, [logits, ops.tanh(logits)])


def skip_connection(_folder: Path) -> ov.Model:
    """The last layer reads what the first one made."""
    model = tiny_model(3)
    graph = Graph.of(model)
    found = map_layers(graph)
    first = graph.nodes[found.boundaries[0]].output(0)
    behind = graph.nodes[graph.inputs[found.head][0]]
    rewire(behind, 0, ops.add(behind.input_value(0), first))
    return model


def no_head(_folder: Path) -> ov.Model:
    """Logits that come of two things."""
    model = tiny_model(2)
    logits = model.get_results()[0].input_value(0)
    return with_results(model, [ops.multiply(logits, ops.softmax(logits, 2))])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: no_cache(), "keeps no KV cache"),
        (gap, "without gaps.*found \\[0, 2, 5\\]"),
        (other_state, "no KV cache; .*found conv_state.1"),
        (no_tokens, "expected one input_ids; found 0"),
        (two_outputs, "expected one output .*found 2"),
        (skip_connection, "cannot be told apart.*none after layer 1"),
        (no_head, "no head before the logits"),
    ],
)
def test_graphs_that_cannot_be_cut_say_why(tmp_path: Path, make: Callable[[Path], ov.Model], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        map_layers(Graph.of(make(tmp_path)))


def test_a_cache_that_a_later_layer_reads_is_told() -> None:
    """A layer attends over the keys of the first one, as in Gemma 3n."""
    model = tiny_model(3)
    first, _, last = attentions(model)
    rewire(last, 1, first.input_value(1))
    graph = Graph.of(model)
    layer_map = map_layers(graph)
    assert [len(layer_map.crossing(layer)) for layer in range(3)] == [0, 1, 1]
    (shared,) = layer_map.shared
    assert (shared.layer, shared.first, shared.last) == (0, 2, 2)
    assert graph.nodes[shared.read].get_variable_id() == "past_key_values.0.keypresent.0.key"
    assert not map_layers(Graph.of(tiny_model(3))).shared


def test_the_helpers_find_their_nodes() -> None:
    model = tiny_model(3)
    assert len(attentions(model)) == 3
    assert len(caches(model)) == 6
