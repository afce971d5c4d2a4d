"""Groups of weights, and of the activations that go with them."""

from __future__ import annotations

from pathlib import Path

import openvino as ov
import pytest
from openvino import opset13 as ops

from swarm.model.grouping import MAX_GROUP, MIN_GROUP, weight_group, weights_of_graph, weights_of_manifest
from swarm.model.manifest import Manifest
from swarm.model.publish import publish
from swarm.model.store import Store
from swarm.model.tiny import GROUP, tiny_model


def test_most_4_bit_weights_decide() -> None:
    weights = [("u4", (8, 2, 32), 100), ("i4", (8, 1, 128), 900), ("u8", (8, 4, 16), 5000), ("f16", (8, 8), 9000)]
    assert weight_group(weights) == 128


@pytest.mark.parametrize(("group", "found"), [(16, MIN_GROUP), (64, 64), (1024, MAX_GROUP)])
def test_kernels_know_some_groups_only(group: int, found: int) -> None:
    assert weight_group([("i4", (8, 2, group), 1)]) == found


def test_a_model_without_groups_gets_the_largest() -> None:
    x = ops.parameter([1, 4], ov.Type.f32)
    assert weight_group(weights_of_graph(ov.Model([ops.relu(x)], [x], "none"))) == MAX_GROUP


def test_the_graph_and_its_zero_points() -> None:
    assert weight_group(weights_of_graph(tiny_model())) == GROUP


@pytest.mark.model
def test_a_manifest_says_what_the_graph_says(smollm2_ir: Path, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()
    manifest = Manifest.decode(store.read(publish(smollm2_ir, store, "smol", "", lambda done, total: None)))
    whole = ov.Core().read_model(smollm2_ir / "openvino_model.xml")
    assert weight_group(weights_of_manifest(manifest)) == weight_group(weights_of_graph(whole)) == 32
