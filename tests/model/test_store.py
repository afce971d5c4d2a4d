"""The layer store: what is in it is whole, whatever happened on the way."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.model.store import Store
from swarm.protocol.errors import StoreError
from swarm.protocol.ids import BlobId

DATA = bytes(range(256)) * 40
ID = BlobId(hashlib.sha256(DATA).hexdigest())
# No process has this id: it is over every system's maximum.
DEAD = "999999999-0"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.open()
    return store


def fresh() -> Iterator[Store]:
    """For hypothesis, which wants a new one for every example."""
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        store.open()
        yield store


def litter(store: Store) -> list[str]:
    return [path.name for name in ("tmp", "partial") for path in (store.root / name).iterdir()]


def test_a_constructor_makes_nothing(tmp_path: Path) -> None:
    Store(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_put_and_read(store: Store) -> None:
    assert not store.has(ID)
    assert store.put_bytes(DATA) == ID
    assert store.put_bytes(memoryview(DATA)) == ID
    assert store.has(ID)
    assert store.read(ID) == DATA
    assert store.path(ID) == store.root / "blobs" / ID[:2] / ID
    store.verify(ID)
    assert litter(store) == []


def test_a_missing_blob_says_what_to_do(store: Store) -> None:
    for call in (store.path, store.read, store.verify):
        with pytest.raises(StoreError, match="Fetch it from a peer"):
            call(ID)


@pytest.mark.parametrize("blob", ["", "x", "../" * 20 + "a", ID.upper(), ID + "0"])
def test_only_ids_name_blobs(store: Store, blob: str) -> None:
    with pytest.raises(ValueError, match="not a blob id"):
        store.has(BlobId(blob))


@given(st.binary(max_size=200), st.data())
@settings(max_examples=50)
def test_a_damaged_blob_is_noticed_and_removed(data: bytes, draw: st.DataObject) -> None:
    for store in fresh():
        blob = store.put_bytes(data)
        damaged = draw.draw(st.binary(max_size=200).filter(lambda other: other != data))
        store.path(blob).write_bytes(damaged)
        with pytest.raises(StoreError, match="damaged"):
            (store.read if draw.draw(st.booleans()) else store.verify)(blob)
        assert not store.has(blob)


@given(st.integers(0, len(DATA) - 1))
@settings(max_examples=30)
def test_a_blob_cut_at_any_byte_is_not_taken_for_whole(length: int) -> None:
    for store in fresh():
        store.put_bytes(DATA)
        assert store.is_whole(ID, len(DATA))
        os.truncate(store.path(ID), length)
        assert not store.is_whole(ID, len(DATA))
        assert not store.has(ID)
        assert not store.is_whole(ID, len(DATA))


def test_a_writer_hashes_as_it_goes(store: Store) -> None:
    with store.writer() as writer:
        for start in range(0, len(DATA), 100):
            writer.write(DATA[start : start + 100])
        assert writer.commit() == ID
    assert store.read(ID) == DATA


def test_a_writer_that_is_left_early_leaves_nothing(store: Store) -> None:
    with store.writer() as writer:
        writer.write(DATA)
    assert litter(store) == []
    assert store.usage_bytes() == 0


def test_adopt_moves_the_file(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        file = tmp_path / "file"
        file.write_bytes(DATA)
        assert store.adopt(file) == ID
        assert not file.exists()
        assert store.read(ID) == DATA
    with pytest.raises(StoreError):
        store.adopt(tmp_path / "none")


def test_adopt_from_another_file_system(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(DATA)
    rename = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if self == file:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert store.adopt(file) == ID
    assert store.read(ID) == DATA
    assert not file.exists()


def test_what_dead_processes_were_writing_goes(store: Store) -> None:
    (store.root / "tmp" / DEAD).write_bytes(DATA)
    with store.writer() as writer:
        writer.write(DATA)
        store.open()
        assert len(litter(store)) == 1
        assert writer.commit() == ID


def test_many_writers_of_the_same_blobs(store: Store) -> None:
    blobs = [bytes([i]) * 50_000 for i in range(10)]

    def work(number: int) -> None:
        for turn in range(20):
            data = blobs[(number + turn) % len(blobs)]
            if number % 2:
                store.put_bytes(data)
            else:
                with store.partial(BlobId(hashlib.sha256(data).hexdigest()), len(data)) as partial:
                    partial.put(0, data)
                    assert partial.finish()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()
    for data in blobs:
        assert store.read(BlobId(hashlib.sha256(data).hexdigest())) == data
    assert litter(store) == []
    assert store.usage_bytes() == 500_000


class FullDisk:
    """A file on a disk that is full."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_names_the_numbers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = Path.open

    def open_full(self: Path, mode: str = "r") -> Any:
        file = open_file(self, mode)
        return FullDisk(file) if mode == "xb" else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=77_777))
        with pytest.raises(StoreError, match=f"disk is full; expected {len(DATA)} more bytes; found 77777 bytes free"):
            store.put_bytes(DATA)
    assert litter(store) == []
    assert store.put_bytes(DATA) == ID


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="--home"):
        Store(tmp_path / "file" / "store").open()


def test_manifests(store: Store) -> None:
    first, second = store.put_bytes(b"one"), store.put_bytes(b"two")
    store.mark_manifest(first, "One", "default")
    store.mark_manifest(second, "Zwei ü", "/models/two")
    assert [(entry.blob, entry.name, entry.spec) for entry in store.manifests()] == [
        (second, "Zwei ü", "/models/two"),
        (first, "One", "default"),
    ]
    store.mark_manifest(first, "Once more", "default")
    assert [entry.name for entry in store.manifests()] == ["Once more", "Zwei ü"]
    with pytest.raises(StoreError):
        store.mark_manifest(ID, "not here", "")


@given(st.binary(max_size=60) | st.sampled_from([b"[1]", b'{"name": 1}', b'{"name":"","spec":"","added":"x"}']))
@settings(max_examples=50)
def test_damaged_entries_are_left_out(entry: bytes) -> None:
    for store in fresh():
        blob = store.put_bytes(b"manifest")
        store.mark_manifest(blob, "good", "default")
        (store.root / "manifests" / ID).write_bytes(entry)
        (store.root / "manifests" / "note.txt").write_bytes(entry)
        assert [found.name for found in store.manifests()] == ["good"]


def test_a_manifest_whose_blob_is_gone_is_left_out(store: Store) -> None:
    blob = store.put_bytes(b"manifest")
    store.mark_manifest(blob, "gone", "default")
    store.path(blob).unlink()
    assert store.manifests() == ()
