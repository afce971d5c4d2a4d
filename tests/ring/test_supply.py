"""Where a model comes from: the store first, from outside only where it is not there or has changed."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import anyio
import pytest

from swarm.model import sources
from swarm.model.manifest import Manifest
from swarm.model.sources import Source
from swarm.model.store import Store
from swarm.protocol.errors import ModelError, StoreError, UsageError
from swarm.protocol.ids import BlobId
from swarm.protocol.messages import Phase
from swarm.ring import supply
from swarm.ring.choice import same_model
from swarm.ring.supply import acquire_model, load_model, recall
from tests.model.gguf_files import tiny_llama

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An IR directory of a model with two layers."""
    folder = tmp_path_factory.mktemp("converted")
    (folder / "tiny.gguf").write_bytes(tiny_llama())
    return sources.acquire(sources.resolve(str(folder / "tiny.gguf")), folder, lambda *_: None)


@pytest.fixture
def ir(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "tiny-ir"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.open()
    return store


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """The sources that were asked for; asking still works."""
    asked: list[Source] = []

    def acquire(source: Source, workdir: Path, progress: sources.ProgressCallback) -> Path:
        asked.append(source)
        return sources.acquire(source, workdir, progress)

    monkeypatch.setattr(supply, "acquire", acquire)
    return asked


def quiet(*_: object) -> None:
    pass


async def test_a_model_is_whole_in_the_store_and_known(ir: Path, store: Store) -> None:
    told: list[Phase] = []
    found = await acquire_model(str(ir), store, lambda phase, *_: told.append(phase))
    model = load_model(store, found)
    assert all(store.has(blob.id) for blob in model.manifest.blobs())
    assert Phase.CONVERT in told
    assert (model.id, model.manifest.source) == (found, str(ir))
    assert len(model.shape.layer_bytes) == len(model.manifest.layers) == 2
    assert model.bytes == len(store.read(found))
    assert model.tokenizer.encode("a")
    assert load_model(store, found).shape == model.shape  # its tokenizer is unpacked by now


async def test_a_stored_model_is_found_without_outside(ir: Path, store: Store, outside: list[Source]) -> None:
    first = await acquire_model(str(ir), store, quiet)
    assert len(outside) == 1
    assert await acquire_model(str(ir), store, quiet) == first
    assert len(outside) == 1


async def test_a_changed_model_is_not(ir: Path, store: Store, outside: list[Source]) -> None:
    await acquire_model(str(ir), store, quiet)
    later = time.time() + 60
    os.utime(ir / "openvino_model.xml", (later, later))
    await acquire_model(str(ir), store, quiet)
    assert len(outside) == 2


async def test_nor_one_that_lost_a_layer(ir: Path, store: Store, outside: list[Source]) -> None:
    found = await acquire_model(str(ir), store, quiet)
    layer = Manifest.decode(store.read(found)).layers[1].id
    store.path(layer).unlink()
    assert await acquire_model(str(ir), store, quiet) == found
    assert len(outside) == 2
    assert store.has(layer)


async def test_nor_one_whose_manifest_is_damaged(ir: Path, store: Store, outside: list[Source]) -> None:
    found = await acquire_model(str(ir), store, quiet)
    store.path(found).write_bytes(b"not a manifest")
    assert await acquire_model(str(ir), store, quiet) == found
    assert len(outside) == 2


async def test_what_an_earlier_start_left_is_recalled_even_without_its_layers(ir: Path, store: Store) -> None:
    assert recall(str(ir), store) is None
    found = await acquire_model(str(ir), store, quiet)
    manifest = Manifest.decode(store.read(found))
    store.path(manifest.layers[0].id).unlink()
    assert recall(str(ir), store) == found
    assert recall("", store) is None
    assert recall(str(ir / "nothing"), store) is None
    store.path(manifest.tokenizer.id).unlink()
    assert recall(str(ir), store) is None


async def test_what_cannot_be_a_model(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such model"):
        await acquire_model(str(tmp_path / "nothing"), store, quiet)
    with pytest.raises(StoreError):
        load_model(store, BlobId("0" * 64))
    with pytest.raises(ModelError):
        load_model(store, store.put_bytes(b"not a manifest"))


async def test_a_cancelled_acquisition_stops(ir: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, began = threading.Event(), threading.Event()

    def acquire(_source: Source, _workdir: Path, progress: sources.ProgressCallback) -> Path:
        try:
            for done in range(1000):
                progress(Phase.DOWNLOAD, "tiny", done, 1000)
                began.set()
                stopped.wait(0.02)
        finally:
            stopped.set()
        raise AssertionError("it went on to the end")

    monkeypatch.setattr(supply, "acquire", acquire)
    rates: list[float] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acquire_model, str(ir), store, lambda *words: rates.append(words[4]))
        with anyio.fail_after(20):
            await anyio.to_thread.run_sync(began.wait)
        tasks.cancel_scope.cancel()
    assert stopped.is_set()
    assert len(rates) < 1000


def test_a_network_path_that_another_pc_named_is_not_opened(tmp_path: Path) -> None:
    for path in ("\\\\server\\share\\model", "//server/share/model.gguf"):
        with pytest.raises(UsageError, match=r"a network path .* drive letter"):
            supply.peers_source(path)
    (tmp_path / "a.gguf").write_bytes(tiny_llama())
    assert supply.peers_source(str(tmp_path / "a.gguf")).kind == "gguf"


def test_what_was_named_is_known_again_by_the_models_name(converted: Path, tmp_path: Path) -> None:
    """Else a ring waits for a model that it has: the GGUF here calls itself something else than its file."""
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "My-Model.Q8_0.gguf", tmp_path / "folder" / "a.gguf"):
        place.write_bytes(tiny_llama())
    given = [str(tmp_path / "My-Model.Q8_0.gguf"), str(tmp_path / "folder"), str(converted)]
    for name in [*given, "org/name", "org/name@v1", "org/name@refs/pr/3", "org/name/sub/file-Q4_0.gguf"]:
        assert same_model(name, supply.model_source(name).name), name
