"""From blobs to a shard: only its own weights, mapped from the store, and nothing that does not fit."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cbor2
import numpy as np
import openvino as ov
import pytest

from swarm.engine.selftest import Chain
from swarm.model.manifest import BlobRef, Manifest, TensorRef
from swarm.model.shard import load_shard
from swarm.model.store import Store
from swarm.protocol.errors import ModelError, StoreError
from tests.engine.chains import Published, assert_same_bits, plain, published, write_tiny_ir
from tests.model.graphs import SHARING, sharing

LAYERS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("tiny")
    return published(write_tiny_ir(folder / "ir", LAYERS), folder / "store")


@pytest.fixture(scope="module")
def tied(tiny_ir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(tiny_ir, tmp_path_factory.mktemp("tied"))


@pytest.mark.parametrize(("which", "cuts"), [("tiny", []), ("tiny", [1]), ("tiny", [2]), ("tiny", [1, 2])])
def test_a_chain_out_of_the_store_is_the_whole_model(
    which: str, cuts: list[int], request: pytest.FixtureRequest
) -> None:
    compare(request.getfixturevalue(which), cuts)


@pytest.mark.parametrize("cuts", [[], [1]])
def test_a_tied_head_reads_the_embedding(tied: Published, cuts: list[int]) -> None:
    compare(tied, cuts)


def test_layers_that_share_a_cache_out_of_the_store(tmp_path: Path) -> None:
    """The layer that feeds the cache stays out of the shard that reads it."""
    ir = write_tiny_ir(tmp_path / "ir")
    ov.save_model(sharing(0), ir / "openvino_model.xml", compress_to_fp16=False)
    model = published(ir, tmp_path / "store")
    assert model.layers == SHARING
    assert len({blob.bytes for blob in model.manifest.layers[:-1]}) == 1
    compare(model, [1, 3])


def compare(model: Published, cuts: list[int]) -> None:
    prompt = np.random.default_rng(2).integers(0, model.manifest.vocabulary, 30).tolist()
    whole = plain(model.whole(256), 1, prompt, 8)
    chain = model.chain(cuts, 256)
    gc.collect()
    found = plain(chain, 1, prompt, 8)
    assert found.tokens == whole.tokens
    assert_same_bits(found.logits, whole.logits, f"cut before {cuts}")


def test_weights_are_mapped_from_the_store(tiny: Published) -> None:
    shard = load_shard(tiny.manifest, tiny.store, 1, 2)
    assert sum(weights.nbytes for weights in shard.weights) == sum(t.bytes for t in tiny.manifest.layers[1].tensors)
    files = {str(tiny.store.path(blob.id)) for blob in tiny.manifest.weights(1, 2)}
    assert {str(weights.filename) for weights in shard.weights if isinstance(weights, np.memmap)} == files
    assert all(isinstance(weights, np.memmap) and weights.mode == "r" for weights in shard.weights)


def test_a_shard_needs_no_blob_of_other_layers(tiny: Published, tmp_path: Path) -> None:
    few = Store(tmp_path)
    few.open()
    for blob in (tiny.manifest.graph, *tiny.manifest.weights(1, 2)):
        shutil.copy(tiny.store.path(blob.id), tmp_path / "copy")
        assert few.adopt(tmp_path / "copy") == blob.id
    assert load_shard(tiny.manifest, few, 1, 2).weights
    with pytest.raises(StoreError):
        load_shard(tiny.manifest, few, 0, 2)


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_damaged_graph_is_noticed(tmp_path: Path) -> None:
    model = published(write_tiny_ir(tmp_path / "ir", 1), tmp_path / "store")
    path = model.store.path(model.manifest.graph.id)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        load_shard(model.manifest, model.store, 0, 1)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x82\x41",
        b"not CBOR at all",
        cbor2.dumps(7),
        cbor2.dumps([b"", b""]),
        cbor2.dumps([b"<net", b""]),
        cbor2.dumps(["/some/model.xml", "/some/model.bin"]),
        cbor2.dumps([b"<net/>", b"", b""]),
        cbor2.dumps({"a": 1, "b": 2}),
    ],
)
def test_a_graph_that_is_none_is_a_model_error(tiny: Published, packed: bytes) -> None:
    manifest = replace(tiny.manifest, graph=BlobRef(tiny.store.put_bytes(packed), len(packed)))
    with pytest.raises(ModelError, match="cannot be read"):
        load_shard(manifest, tiny.store, 0, 1)


def with_tensor(manifest: Manifest, change: Callable[[TensorRef], TensorRef]) -> Manifest:
    """Layer 0 with its first tensor changed."""
    first, *others = manifest.layers
    tensor, *rest = first.tensors
    return replace(manifest, layers=(replace(first, tensors=(change(tensor), *rest)), *others))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: replace(t, shape=(t.shape[0] * 1000, *t.shape[1:])), "wrong size"),
        (lambda t: replace(t, shape=(2**62, 2**62)), "wrong size"),
        (lambda t: replace(t, bytes=t.bytes // 2), "wrong size"),
        (lambda t: replace(t, type="f64"), "wrong size"),
        (lambda t: replace(t, type="no such type"), "element type"),
        (lambda t: replace(t, type="__class__"), "element type"),
        (lambda t: replace(t, name="weight.99999"), "does not fit its manifest"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    tiny: Published, change: Callable[[TensorRef], TensorRef], reason: str
) -> None:
    """It comes from a peer: OpenVINO would read on behind the mapped bytes."""
    with pytest.raises(ModelError, match=reason):
        load_shard(with_tensor(tiny.manifest, change), tiny.store, 0, 1)


def test_the_chain_helper_runs_what_it_is_given(tiny: Published) -> None:
    """Another model's layers in between are noticed by the comparison."""
    prompt = list(range(30))
    expected = plain(tiny.whole(256), 1, prompt, 4)
    swapped = Chain([tiny.engine(0, 1, 256), tiny.engine(1, 2, 256), tiny.engine(1, 2, 256), tiny.engine(2, 3, 256)])
    with pytest.raises(AssertionError, match="the first that differs"):
        assert_same_bits(plain(swapped, 1, prompt, 4).logits, expected.logits, "one layer twice")
