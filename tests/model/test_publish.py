"""From an IR directory to blobs: the same every time, nothing left out, nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import cbor2
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from swarm.model.layers import Graph, map_layers
from swarm.model.manifest import BlobRef, Manifest
from swarm.model.publish import (
    ALIGNMENT,
    DEFAULT_CONTEXT_TOKENS,
    WEIGHT_MIN_BYTES,
    _write_blob,
    kv_bytes_per_token,
    publish,
)
from swarm.model.store import Store
from swarm.model.tiny import HIDDEN, VOCABULARY
from swarm.protocol.errors import ModelError, StoreError, UnsupportedModelError
from tests.engine.chains import Published, published, write_tiny_ir
from tests.model.graphs import edited, sharing

LAYERS = 3


@pytest.fixture(scope="module")
def ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_ir(tmp_path_factory.mktemp("ir") / "tiny", LAYERS)


@pytest.fixture(scope="module")
def untied(ir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(ir, tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def tied(tiny_ir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A GGUF whose head is its embedding."""
    return published(tiny_ir, tmp_path_factory.mktemp("tied"))


def opened(root: Path) -> Store:
    store = Store(root)
    store.open()
    return store


def large_constants(ir: Path) -> list[int]:
    """Sizes of the constants that are weights."""
    model = ov.Core().read_model(ir / "openvino_model.xml")
    sizes = [node.get_byte_size() for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    return sorted(size for size in sizes if size >= WEIGHT_MIN_BYTES)


def weight_blobs(manifest: Manifest) -> list[BlobRef]:
    return [manifest.embedding, *manifest.layers, manifest.head]


def test_the_same_model_gets_the_same_id(ir: Path, untied: Published, tmp_path: Path) -> None:
    """On every node: two who convert one model have the same blobs."""
    again = published(ir, tmp_path / "again")
    assert again.manifest == untied.manifest
    other = published(write_tiny_ir(tmp_path / "tiny", LAYERS, seed=8), tmp_path / "other")
    assert other.manifest.layers[0].id != untied.manifest.layers[0].id


def test_what_the_manifest_says_of_the_model(untied: Published) -> None:
    manifest = untied.manifest
    assert (manifest.hidden_size, manifest.vocabulary, len(manifest.layers)) == (HIDDEN, VOCABULARY, LAYERS)
    assert manifest.kv_bytes_per_token == (2 * 2 * 64 * 2,) * LAYERS, "keys and values of two heads of 64 in f16"
    assert not manifest.tied
    assert manifest.context_tokens == DEFAULT_CONTEXT_TOKENS


@pytest.mark.parametrize("which", ["untied", "tied"])
def test_every_weight_is_in_exactly_one_blob(which: str, request: pytest.FixtureRequest) -> None:
    model: Published = request.getfixturevalue(which)
    tensors = [tensor for blob in weight_blobs(model.manifest) for tensor in blob.tensors]
    assert sorted(tensor.bytes for tensor in tensors) == large_constants(model.ir)
    assert len({tensor.name for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize("which", ["untied", "tied"])
def test_sizes_are_those_on_disk(which: str, request: pytest.FixtureRequest) -> None:
    model: Published = request.getfixturevalue(which)
    for blob in model.manifest.blobs():
        assert model.store.path(blob.id).stat().st_size == blob.bytes
        model.store.verify(blob.id)
        end = 0
        for tensor in blob.tensors:
            assert tensor.offset % ALIGNMENT == 0
            assert end <= tensor.offset < end + ALIGNMENT, "one behind the other"
            end = tensor.offset + tensor.bytes
        assert end <= blob.bytes


def test_tensors_of_odd_sizes_begin_at_a_cache_line(tmp_path: Path) -> None:
    """They are used where they lie in the mapped file."""
    store = opened(tmp_path)
    values = [np.full(size, size % 251, np.uint8) for size in (4097, 5000, 64)]
    blob, _ = _write_blob(store, [ops.constant(value) for value in values], 0)
    assert [tensor.offset for tensor in blob.tensors] == [0, 4160, 9216]
    data = store.path(blob.id).read_bytes()
    assert len(data) == blob.bytes
    for tensor, value in zip(blob.tensors, values, strict=True):
        assert data[tensor.offset : tensor.offset + tensor.bytes] == value.tobytes()


def test_a_tied_head_has_no_weights_of_its_own(tied: Published) -> None:
    manifest = tied.manifest
    assert manifest.tied
    assert manifest.embedding in manifest.weights(1, 2)
    assert sum(tensor.bytes for tensor in manifest.head.tensors) < manifest.embedding.bytes / 10


def test_the_graph_that_everybody_gets_has_no_weights(untied: Published) -> None:
    assert untied.manifest.graph.bytes < 1_000_000
    xml, _ = cbor2.loads(untied.store.read(untied.manifest.graph.id))
    graph = ov.Core().read_model(xml, cbor2.loads(untied.store.read(untied.manifest.graph.id))[1])
    sizes = [node.get_byte_size() for node in graph.get_ordered_ops() if node.get_type_name() == "Constant"]
    assert max(sizes) < WEIGHT_MIN_BYTES


def test_progress_counts_the_weights(ir: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    publish(ir, opened(tmp_path), "tiny", "", lambda done, total: seen.append((done, total)))
    total = sum(large_constants(ir))
    assert len(seen) == LAYERS + 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_the_store_remembers_where_a_model_came_from(ir: Path, tmp_path: Path) -> None:
    store = opened(tmp_path)
    identity = publish(ir, store, "tiny", "/models/tiny", lambda *_: None)
    (entry,) = store.manifests()
    assert (entry.blob, entry.name) == (identity, "tiny")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (json.dumps({"max_position_embeddings": 777}), 777),
        (json.dumps({"max_position_embeddings": 0}), DEFAULT_CONTEXT_TOKENS),
        (json.dumps({"max_position_embeddings": "777"}), DEFAULT_CONTEXT_TOKENS),
        (json.dumps([1]), DEFAULT_CONTEXT_TOKENS),
        ("{", DEFAULT_CONTEXT_TOKENS),
    ],
)
def test_the_context_is_the_models_own(tmp_path: Path, config: str, expected: int) -> None:
    ir = write_tiny_ir(tmp_path / "ir", 1)
    (ir / "config.json").write_text(config, encoding="utf-8")
    assert published(ir, tmp_path / "store").manifest.context_tokens == expected


def test_revision_and_quantization_are_kept(ir: Path, untied: Published, tmp_path: Path) -> None:
    sizes: dict[str, int] = {}
    for tensor in (tensor for layer in untied.manifest.layers for tensor in layer.tensors):
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.bytes
    assert untied.manifest.quantization == max(sizes, key=lambda kind: sizes[kind])
    store = opened(tmp_path)
    identity = publish(ir, store, "tiny", "", lambda *_: None, revision="abc", quantization="Q4_K")
    manifest = Manifest.decode(store.read(identity))
    assert (manifest.revision, manifest.quantization) == ("abc", "Q4_K")


def test_a_graph_that_cannot_be_cut_is_not_published(tmp_path: Path) -> None:
    ir = write_tiny_ir(tmp_path / "ir", 2)
    model = ov.Core().read_model(ir / "openvino_model.xml")
    spoiled = edited(model, tmp_path, ("past_key_values.1.", "past_key_values.4."))
    del model
    ov.serialize(spoiled, ir / "openvino_model.xml", ir / "openvino_model.bin")
    with pytest.raises(UnsupportedModelError, match="without gaps"):
        publish(ir, opened(tmp_path / "store"), "tiny", "", lambda *_: None)


def test_a_model_without_its_tokenizer_is_not_published(tmp_path: Path) -> None:
    ir = write_tiny_ir(tmp_path / "ir", 1)
    (ir / "openvino_detokenizer.xml").unlink()
    store = opened(tmp_path / "store")
    with pytest.raises(ModelError, match="tokenizer"):
        publish(ir, store, "tiny", "", lambda *_: None)
    assert store.manifests() == ()


def test_a_missing_blob_is_a_store_error(untied: Published, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        opened(tmp_path).read(untied.manifest.graph.id)


def test_a_cache_that_later_layers_read_counts_where_it_is_copied() -> None:
    graph = Graph.of(sharing(1, 1, 3))
    own = 2 * 2 * 64 * 2
    assert kv_bytes_per_token(graph, map_layers(graph)) == (own, own, own, 2 * own)
