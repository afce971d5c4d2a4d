"""The models in a store: what is here, what is removed, what makes room; beside other processes and full limits."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.model.inventory import SETTLING_S, StoredModel, make_room, models_in, pins, remove
from swarm.model.manifest import Manifest
from swarm.model.partial import PIECE_BYTES
from swarm.model.publish import publish
from swarm.model.store import Store
from swarm.protocol.errors import StoreError
from swarm.protocol.ids import BlobId
from tests.engine.chains import write_tiny_ir

LAYERS = 3


@pytest.fixture(scope="module")
def irs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with the same tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("irs")
    return [write_tiny_ir(folder / name, LAYERS, seed) for seed, name in enumerate(("one", "two"), 7)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.open()
    return store


def put(store: Store, ir: Path, used: float) -> StoredModel:
    model = publish(ir, store, ir.name, str(ir), lambda *_: None)
    os.utime(store.root / "manifests" / model, (used, used))
    return find(store, model)


def find(store: Store, model: BlobId) -> StoredModel:
    return next(found for found in models_in(store) if found.id == model)


def manifest_of(store: Store, model: StoredModel) -> Manifest:
    return Manifest.decode(store.read(model.id))


def whole(store: Store, model: StoredModel) -> bool:
    return all(store.has(blob) for blob in model.blobs)


def test_what_is_here(store: Store, irs: list[Path]) -> None:
    one, two = put(store, irs[0], 100.0), put(store, irs[1], 200.0)
    assert [model.id for model in models_in(store)] == [two.id, one.id]  # the last used first
    manifest = manifest_of(store, one)
    assert (one.name, one.source, one.layers, one.layers_here, one.used) == ("one", str(irs[0]), LAYERS, LAYERS, 100.0)
    assert one.bytes == one.here_bytes == sum({blob.id: blob.bytes for blob in manifest.blobs()}.values())
    store.path(manifest.layers[1].id).unlink()
    partly = find(store, one.id)
    assert (partly.layers_here, partly.bytes) == (LAYERS - 1, one.bytes)
    assert partly.here_bytes == one.bytes - manifest.layers[1].bytes
    store.mark_used(one.id)
    assert models_in(store)[0].id == one.id


def test_a_damaged_manifest_is_left_out(store: Store, irs: list[Path]) -> None:
    one = put(store, irs[0], 100.0)
    store.path(one.id).write_bytes(b"damaged")
    assert models_in(store) == ()


def test_removal_frees_what_no_other_model_has(store: Store, irs: list[Path]) -> None:
    one, two = put(store, irs[0], 100.0), put(store, irs[1], 200.0)
    shared = one.blobs & two.blobs
    assert shared  # the tokenizer
    before = store.usage_bytes()
    freed = remove(store, one)
    assert before - store.usage_bytes() - freed < 1000  # the entry beside it
    assert freed > one.bytes // 2
    assert [model.id for model in models_in(store)] == [two.id]
    assert whole(store, two)
    remove(store, two)
    assert models_in(store) == ()
    assert not [path for path in (store.root / "blobs").rglob("*") if path.is_file()]


def test_a_model_in_use_is_known_to_other_processes(store: Store, irs: list[Path]) -> None:
    one = put(store, irs[0], 100.0)
    assert not one.in_use
    program = f"""
import sys
from pathlib import Path
from swarm.model.store import Store
Store(Path({str(store.root)!r})).pin("stage", [{one.id!r}])
print("pinned", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"pinned"
        assert find(store, one.id).in_use
        process.communicate()
    assert not find(store, one.id).in_use  # it is gone, and what it said with it
    assert list((store.root / "pins").iterdir()) == []


def test_pins_of_a_purpose_replace_each_other(store: Store) -> None:
    one, two, three = (BlobId(f"{number:064x}") for number in (1, 2, 3))
    store.pin("stage", [one], [two])
    store.pin("language", [three])
    assert (pins(store).models, pins(store).blobs) == ({one, three}, {one, two, three})
    store.pin("stage", [one], [])
    assert pins(store).blobs == {one, three}
    store.pin("language")
    assert (pins(store).models, pins(store).blobs) == ({one}, {one})
    (file,) = (store.root / "pins").iterdir()
    for damaged in ("", "[]", '{"models": 5, "blobs": []}', '{"models": [5], "blobs": []}'):
        file.write_text(damaged, encoding="utf-8")
        assert pins(store).models == frozenset(), damaged


def test_room_is_made_by_the_longest_unused_model(store: Store, irs: list[Path]) -> None:
    one, two = put(store, irs[0], 100.0), put(store, irs[1], 200.0)
    used = store.usage_bytes()
    make_room(store, 10**18)  # no limit, nothing goes
    store.limit_bytes = used + 10
    make_room(store, 10)
    assert whole(store, one)
    make_room(store, 11)
    assert [model.id for model in models_in(store)] == [two.id]
    assert whole(store, two)


def test_what_is_worked_with_stays(store: Store, irs: list[Path]) -> None:
    one, two = put(store, irs[0], 100.0), put(store, irs[1], 200.0)
    manifest = manifest_of(store, one)
    kept = {manifest.graph.id, manifest.tokenizer.id, manifest.layers[0].id}
    store.pin("stage", [one.id], kept)
    store.limit_bytes = store.usage_bytes()
    make_room(store, 1)
    assert [model.id for model in models_in(store)] == [one.id]  # the newer one goes, since nobody uses it
    assert whole(store, one)
    rest = find(store, one.id).here_bytes - sum(store.path(blob).stat().st_size for blob in kept)
    store.limit_bytes = store.usage_bytes()
    make_room(store, rest // 2)
    assert all(store.has(blob) for blob in kept)
    assert find(store, one.id).layers_here < LAYERS
    assert not whole(store, two)


def test_a_limit_that_cannot_be_kept_is_an_error_with_numbers(store: Store, irs: list[Path]) -> None:
    one = put(store, irs[0], 100.0)
    used = store.usage_bytes()
    store.limit_bytes = used
    with pytest.raises(
        StoreError, match=rf"no room left; expected {10 * used} more bytes; found {used} of {used} used"
    ):
        make_room(store, 10 * used)
    assert whole(store, find(store, one.id))
    with pytest.raises(StoreError, match="no room left"):
        make_room(store, 1, keep=one.blobs)


def test_blobs_that_have_just_come_stay(store: Store, irs: list[Path]) -> None:
    """They belong to a model that is being fetched: its manifest is marked at the end."""
    young, old = store.put_bytes(b"y" * 100), store.put_bytes(b"o" * 100)
    long_ago = time.time() - SETTLING_S - 1
    os.utime(store.path(old), (long_ago, long_ago))
    store.limit_bytes = store.usage_bytes()
    with pytest.raises(StoreError, match="100 that can go"):
        make_room(store, 150)
    make_room(store, 100)
    assert (store.has(young), store.has(old)) == (True, False)


def test_pieces_of_a_fetch_that_was_given_up_make_room(store: Store) -> None:
    data = b"d" * 5000
    blob = BlobId(hashlib.sha256(data).hexdigest())
    with store.partial(blob, 10 * PIECE_BYTES):
        pass
    with store.partial(blob, 2 * PIECE_BYTES) as partial:
        partial.put(0, bytes(PIECE_BYTES))
    begun = store.begun_bytes(blob)
    assert begun > 2 * PIECE_BYTES
    store.limit_bytes = store.usage_bytes()
    with pytest.raises(StoreError, match="0 that can go"):
        make_room(store, 1)
    long_ago = time.time() - SETTLING_S - 1
    os.utime(store.root / "partial" / blob, (long_ago, long_ago))
    with pytest.raises(StoreError, match="0 that can go"):
        make_room(store, 1, keep=[blob])
    make_room(store, begun)
    assert store.begun_bytes(blob) == 0


def test_compiled_forms_are_counted_and_go_with_their_model(store: Store, irs: list[Path]) -> None:
    one = put(store, irs[0], 100.0)
    store.compiled(one.id).mkdir(parents=True)
    (store.compiled(one.id) / "1.blob").write_bytes(bytes(5000))
    found = find(store, one.id)
    assert found.compiled_bytes == 5000
    used = store.usage_bytes()
    store.pin("stage", [one.id], one.blobs)
    store.limit_bytes = used + 1000
    make_room(store, 2000)  # it is in use, but that can be made again
    assert find(store, one.id).compiled_bytes == 0
    assert whole(store, one)
    store.pin("stage")
    store.compiled(one.id).mkdir(parents=True)
    (store.compiled(one.id) / "1.blob").write_bytes(bytes(5000))
    assert remove(store, find(store, one.id)) > 5000
    assert not store.compiled(one.id).exists()


def test_layers_that_others_have_go_first(store: Store, irs: list[Path]) -> None:
    one = put(store, irs[0], 100.0)
    manifest = manifest_of(store, one)
    store.pin("stage", [one.id], one.blobs - {layer.id for layer in manifest.layers})
    for layer in sorted(manifest.layers, key=lambda layer: layer.id, reverse=True)[:2]:
        store.limit_bytes = store.usage_bytes()
        make_room(store, 1, elsewhere=[layer.id])
        assert not store.has(layer.id)
    assert find(store, one.id).layers_here == LAYERS - 2


def test_publishing_keeps_the_limit(store: Store, irs: list[Path]) -> None:
    one = put(store, irs[0], 100.0)
    store.limit_bytes = store.usage_bytes() + one.bytes // 2
    two = put(store, irs[1], 200.0)
    assert [model.id for model in models_in(store)] == [two.id]
    assert store.usage_bytes() <= store.limit_bytes
    store.limit_bytes = 1000
    with pytest.raises(StoreError, match="no room left"):
        publish(irs[0], store, "one", "", lambda *_: None)
    assert whole(store, replace(two))
