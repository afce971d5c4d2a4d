"""Attention over cells: what the rewritten shard computes, its masks, and the beam_idx Gather that fuses the cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from swarm.model.cells import attend_over_cells, gather_beams
from swarm.model.cut import cut
from swarm.model.tiny import VOCABULARY, tiny_model
from swarm.protocol.errors import UnsupportedModelError
from tests.model.beams import without_beams

LAYERS = 2
SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "INFERENCE_NUM_THREADS": 1,
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


def compiled_layers(model: ov.Model) -> Counter[str]:
    """Layers that the plugin runs, by kind."""
    compiled = ov.Core().compile_model(model, "CPU", SETTINGS)
    return Counter(node.get_rt_info()["layerType"] for node in compiled.get_runtime_model().get_ops())


def read_through_gather(model: ov.Model) -> bool:
    reads = [node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue"]
    targets = [target.get_node() for read in reads for target in read.output(0).get_target_inputs()]
    return all(node.get_type_name() == "Gather" for node in targets)


def test_a_missing_gather_is_put_in_and_the_cache_is_fused() -> None:
    bare, injected = without_beams(tiny_model(LAYERS)), without_beams(tiny_model(LAYERS))
    assert gather_beams(injected) == 2 * LAYERS
    assert gather_beams(injected) == 0
    assert read_through_gather(injected)
    fused, unfused = compiled_layers(injected), compiled_layers(bare)
    assert fused["ScaledDotProductAttention"] == LAYERS
    assert fused == compiled_layers(tiny_model(LAYERS))
    # Unfused, each cache is concatenated for itself.
    assert unfused["Concatenation"] >= fused["Concatenation"] + 2 * LAYERS


@pytest.mark.parametrize("prepare", [lambda model: model, without_beams])
def test_a_shard_over_cells_keeps_the_fused_attention(prepare: Any) -> None:
    shard = attend_over_cells(cut(prepare(tiny_model(3)), 1, 3))
    assert compiled_layers(shard.model)["ScaledDotProductAttention"] == 2
    assert {"beam_idx", "cells", "rows", "mask.0"} <= {port.get_any_name() for port in shard.model.inputs}


@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 7), (5, 1), (5, 3)])
@pytest.mark.parametrize("first", [0, 1])
def test_the_mask_is_the_models_own_in_logical_positions(first: int, start: int, rows: int) -> None:
    masks = ov.Core().compile_model(attend_over_cells(cut(tiny_model(2), first, 2)).masks, "CPU")
    total = start + rows
    given = {"lengths": np.array([rows, total]), "attention_mask": np.ones((1, total), np.int64)}
    found = masks({name: value for name, value in given.items() if name in names(masks)})[0]
    assert found.shape == (1, 1, rows, total)
    causal = np.arange(total)[None] <= np.arange(start, total)[:, None]
    assert ((found[0, 0] == 0) == causal).all()


def names(model: Any) -> set[str]:
    return {name for port in model.inputs for name in port.get_names()}


def test_rows_and_cells_are_apart() -> None:
    """Two rows are fed, one of them is appended, behind three cells that are left out."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 2))
    plain = ov.Core().compile_model(tiny_model(LAYERS), "CPU", SETTINGS)
    expected = plain(
        {
            "input_ids": ids[:, :1],
            "attention_mask": np.ones((1, 1), np.int64),
            "position_ids": np.zeros((1, 1), np.int64),
            "beam_idx": np.zeros(1, np.int32),
        }
    )[0]
    shard = attend_over_cells(tiny_model(LAYERS))
    request = ov.Core().compile_model(shard.model, "CPU", SETTINGS).create_infer_request()
    values = {
        "input_ids": ids,
        "position_ids": np.zeros((1, 2), np.int64),
        "beam_idx": np.zeros(1, np.int32),
        "cells": np.array([0, 0, 0, 0]),
        "rows": np.array([3, 3]),
        "mask.0": np.array([[[[0, 0, 0, 0]] * 3 + [[-65504, -65504, -65504, 0]]]], np.float32),
    }
    found = request.infer({name: values[name] for name in names(request.get_compiled_model())})[0]
    assert found.shape == (1, 2, VOCABULARY)
    assert np.abs(found[:, :1] - expected).max() < 1e-4
    assert {variable.state.shape[2] for variable in request.query_state()} == {4}


def test_attention_without_a_mask_is_refused() -> None:
    model = tiny_model(1)
    (node,) = [n for n in model.get_ordered_ops() if n.get_type_name() == "ScaledDotProductAttention"]
    causal = ops.scaled_dot_product_attention(*(node.input_value(i) for i in range(3)), causal=True)
    for target in list(node.output(0).get_target_inputs()):
        target.replace_source_output(causal.output(0))
    with pytest.raises(UnsupportedModelError, match="--engine paged"):
        attend_over_cells(model)
