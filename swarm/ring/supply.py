"""Where a node gets a model from: its store, its peers, and only then from outside."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio.from_thread
import anyio.to_thread

from swarm.model.exporting import Exporter, held, remember
from swarm.model.inventory import make_room
from swarm.model.manifest import BlobRef, Manifest
from swarm.model.publish import publish
from swarm.model.sources import ProgressCallback, Source, acquire, pin, resolve
from swarm.model.store import Store
from swarm.model.tokenizer import Tokenizer, unpack
from swarm.protocol.errors import ModelError, StoreError, SwarmError, UsageError
from swarm.protocol.ids import BlobId
from swarm.protocol.messages import Phase
from swarm.ring.fit import ModelShape

Report = Callable[[Phase, str, int, int, float], None]
"""(phase, what, done, total, rate)"""


@dataclass(frozen=True, slots=True)
class Model:
    """A model this node knows: it can plan with it and take prompts for it."""

    id: BlobId
    bytes: int
    """Of the manifest itself."""
    manifest: Manifest
    tokenizer: Tokenizer

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.id, self.manifest)


def shape_of(model: BlobId, manifest: Manifest) -> ModelShape:
    """What planning needs to know of the model of a manifest."""
    return ModelShape(
        manifest=model,
        layer_bytes=tuple(layer.bytes for layer in manifest.layers),
        embedding_bytes=manifest.embedding.bytes,
        head_bytes=manifest.head.bytes,
        head_uses_embedding=manifest.tied,
        kv_bytes_per_token=manifest.kv_bytes_per_token,
        hidden_size=manifest.hidden_size,
        context_tokens=manifest.context_tokens,
    )


def model_source(wanted: str) -> Source:
    """What ``--model`` names; empty: the embedded default. Raises `UsageError`."""
    return resolve(wanted or None)


def peers_source(named: str) -> Source:
    """What another node named. Raises `UsageError`, also for a network path: Windows would show that server this PC's
    credentials."""
    if named.startswith(("\\\\", "//")):
        raise UsageError(
            "a network path that another PC named is not opened",
            expected="a directory, a file, or a name on the Hugging Face hub",
            found=named[:80],
            action="Map it to a drive letter, or start that model on this PC with --model.",
        )
    return model_source(named)


def pinned_source(manifest: Manifest) -> Source:
    """What a model was made from, at the revision it was made from. Blocking. Raises `UsageError`, `ModelError`."""
    source = peers_source(manifest.source)
    if source.on_hub and manifest.revision:
        source = replace(source, on_hub=replace(source.on_hub, revision=manifest.revision))
    return pin(source)


def open_exporter(source: Source, store: Store, progress: ProgressCallback) -> Exporter:
    """For a pinned checkpoint; fetches its small files. Blocking. Raises as `sources.acquire`."""
    workdir = store.root / "work"
    return Exporter(acquire(source, workdir, progress), source, store, workdir, progress)


def load_model(store: Store, model: BlobId) -> Model:
    """Read a manifest and its tokenizer, which are in the store; blocking. Raises `StoreError`, `ModelError`."""
    data = store.read(model)
    manifest = Manifest.decode(data)
    store.pin("language", [model], [manifest.graph.id, manifest.tokenizer.id])
    store.mark_used(model)
    folder = store.root / "tokenizers" / manifest.tokenizer.id
    if not folder.is_dir():
        fresh = folder.with_name(f"{folder.name}.{time.monotonic_ns()}")
        fresh.mkdir(parents=True)
        unpack(store.read(manifest.tokenizer.id), fresh)
        try:
            fresh.replace(folder)
        except OSError:  # another process of this home was first
            shutil.rmtree(fresh, ignore_errors=True)
    return Model(model, len(data), manifest, Tokenizer.load(folder))


def check_source(wanted: str, store: Store) -> None:
    """Refuse at once what only fails later; blocking. Raises `UsageError`.

    A name on the hub that is known here is not asked for again, and a hub that cannot be reached is no reason to stop:
    another node may have the model.
    """
    source = resolve(wanted or None)
    if source.on_hub and all(entry.spec != source.spec for entry in store.manifests()):
        with contextlib.suppress(ModelError):
            pin(source)


async def acquire_model(wanted: str, store: Store, report: Report, *, newest: bool = False) -> BlobId:
    """The id of the manifest of what `wanted` names, whole in the store; from outside where it is not here yet.

    A model of the hub stays at the revision that is here, unless `newest` is asked for. Raises `SwarmError` with what
    to do. May be cancelled; what was downloaded stays.
    """
    source = await anyio.to_thread.run_sync(model_source, wanted)
    if newest:
        source = await anyio.to_thread.run_sync(pin, source, abandon_on_cancel=True)
    known = await anyio.to_thread.run_sync(stored, store, source)
    return known or await acquire_source(source, store, report)


async def acquire_source(source: Source, store: Store, report: Report) -> BlobId:
    """The same from outside, whatever is here."""
    meter = Meter(report)

    def work() -> BlobId:
        workdir = store.root / "work"
        pinned = pin(source, lambda: meter.progress(Phase.DOWNLOAD, source.name, 0, 0))
        if pinned.is_checkpoint:
            exporter = open_exporter(pinned, store, meter.progress)
            return remember(store, exporter.export_all(held(store, exporter.outline())))
        if pinned.found and pinned.found.directory is None:
            make_room(store, 2 * pinned.found.total_bytes)  # the download, and the blobs
        made = acquire(pinned, workdir, meter.progress)
        convert = partial(meter.progress, Phase.CONVERT, pinned.name)
        marks = {"revision": pinned.revision, "quantization": pinned.quantization}
        model = publish(made, store, pinned.name, pinned.spec, convert, **marks)
        if made.is_relative_to(workdir):  # ours, and all of it is in the store now
            shutil.rmtree(made, ignore_errors=True)
        return model

    return await anyio.to_thread.run_sync(work)


def recall(wanted: str, store: Store) -> BlobId | None:
    """The manifest of what `wanted` names that an earlier start left here, with graph and tokenizer; blocking.

    Its weights need not all be here: the peers have them, or its source.
    """
    return _recall(wanted, store, lambda manifest: (manifest.graph, manifest.tokenizer))


def recall_whole(wanted: str, store: Store) -> BlobId | None:
    """The same, with all its weights."""
    return _recall(wanted, store, Manifest.blobs)


def _recall(wanted: str, store: Store, needed: Callable[[Manifest], Iterable[BlobRef]]) -> BlobId | None:
    try:
        source = model_source(wanted)
    except SwarmError:
        return None
    return _find(store, source, needed)


def stored(store: Store, source: Source) -> BlobId | None:
    """The manifest of a source that is whole in the store; blocking."""
    return _find(store, source, Manifest.blobs)


def _find(store: Store, source: Source, needed: Callable[[Manifest], Iterable[BlobRef]]) -> BlobId | None:
    """The newest manifest of `source` of which every `needed` blob is here."""
    for found in sorted(store.manifests(), key=lambda found: -found.added):
        if found.spec == source.spec and not _changed_since(source.path, found.added):
            try:
                manifest = Manifest.decode(store.read(found.blob))
            except (StoreError, ModelError):
                continue
            if not manifest.is_whole or (source.revision and manifest.revision != source.revision):
                continue
            if all(store.has(blob.id) for blob in needed(manifest)):
                return found.blob
    return None


def _changed_since(path: Path | None, when: float) -> bool:
    """Whether the file, or what the directory's model is described by, is newer than `when`."""
    if path is None:
        return False
    places = [path / "openvino_model.xml", path / "config.json"] if path.is_dir() else [path]
    return next(place for place in places if place.is_file()).stat().st_mtime > when


class Meter:
    """Progress of work in a thread: adds the rate, hands it to the event loop, stops the work when it is cancelled."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._phase = Phase.IDLE
        self._began = (0.0, 0)

    def progress(self, phase: Phase, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase is not self._phase:
            self._phase, self._began = phase, (now, done)
        elapsed = now - self._began[0]
        rate = (done - self._began[1]) / elapsed if elapsed > 0.2 else 0.0
        anyio.from_thread.check_cancelled()
        anyio.from_thread.run_sync(self._report, phase, label, done, total, rate)
