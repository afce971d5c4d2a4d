"""The models in a store: what is here of each, the removal of one, and room for another. Blocking.

Several processes may share a store. Each says with a pin what it works with: a file ``root/pins/<pid>-<random>`` that
counts as long as the process lives.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from swarm.model.disk import bytes_under
from swarm.model.eviction import Contents, Eviction, Held, evict, only_of
from swarm.model.manifest import Manifest
from swarm.model.scratch import is_abandoned
from swarm.model.store import Store
from swarm.protocol.errors import ModelError, StoreError
from swarm.protocol.ids import BlobId, is_blob_id

SETTLING_S = 3600.0
"""Blobs of no model that are younger than this stay: their model is being fetched or converted."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    id: BlobId
    name: str
    source: str
    revision: str
    quantization: str
    used: float
    """Seconds since the epoch."""
    bytes: int
    here_bytes: int
    layers: int
    layers_here: int
    blobs: frozenset[BlobId]
    compiled_bytes: int
    """What a device's plugin keeps of its compiled shards."""
    in_use: bool
    """A node that runs with this store works with it."""

    @property
    def held(self) -> Held:
        return Held(self.id, self.used, self.blobs, self.compiled_bytes)


@dataclass(frozen=True, slots=True)
class Pins:
    models: frozenset[BlobId] = frozenset()
    blobs: frozenset[BlobId] = frozenset()


def models_in(store: Store) -> tuple[StoredModel, ...]:
    """The last used first. A manifest that is damaged is left out."""
    in_use = pins(store).models
    found = []
    for entry in store.manifests():
        try:
            manifest = Manifest.decode(store.read(entry.blob))
        except (StoreError, ModelError):
            continue
        sizes = {blob.id: blob.bytes for blob in manifest.blobs()}
        here = {blob for blob in sizes if store.has(blob)}
        found.append(
            StoredModel(
                id=entry.blob,
                name=entry.name,
                source=entry.spec,
                revision=manifest.revision,
                quantization=manifest.quantization,
                used=entry.used,
                bytes=sum(sizes.values()),
                here_bytes=sum(sizes[blob] for blob in here),
                layers=len(manifest.layers),
                layers_here=sum(layer.id in here for layer in manifest.layers),
                blobs=frozenset({entry.blob, *sizes}),
                compiled_bytes=bytes_under(store.compiled(entry.blob)),
                in_use=entry.blob in in_use,
            )
        )
    return tuple(sorted(found, key=lambda model: (-model.used, model.id)))


def remove(store: Store, model: StoredModel) -> int:
    """Removes a model, but for the blobs that others have too; how many bytes that freed. Raises `StoreError`."""
    others = [other.held for other in models_in(store) if other.id != model.id]
    return _carry_out(store, Eviction((model.id,), tuple(sorted(only_of(model.held, others, pins(store).blobs)))))


def make_room(
    store: Store, needed_bytes: int, keep: Collection[BlobId] = (), elsewhere: Collection[BlobId] = ()
) -> None:
    """Where `needed_bytes` more would pass the store's limit, removes what was not used for longest, without `keep`.

    What is known to be `elsewhere` goes before what may be the only copy of the swarm. Raises `StoreError` with the
    numbers where that does not help; then nothing is removed.
    """
    if store.limit_bytes is None:
        return
    used, free = store.usage_bytes(), shutil.disk_usage(store.root).free
    over = max(used + needed_bytes - store.limit_bytes, needed_bytes - free)
    if over <= 0:
        return
    pinned = pins(store)
    held = [model.held for model in models_in(store)]
    sizes = _sizes(store.root / "blobs", "*/*", {blob for model in held for blob in model.blobs})
    partials = _sizes(store.root / "partial", "*", ())
    in_use = {*pinned.blobs, *keep}
    eviction = evict(Contents(held, sizes, partials, pinned.models, in_use, elsewhere), over)
    if eviction.freed_bytes < over:
        raise StoreError(
            "the store has no room left",
            expected=f"{needed_bytes} more bytes",
            found=f"{used} of {store.limit_bytes} used, {eviction.freed_bytes} that can go, {free} free on the disk",
            action="Give more --disk, or a smaller model.",
        )
    _carry_out(store, eviction)


def pins(store: Store) -> Pins:
    """What living processes work with."""
    models: set[BlobId] = set()
    blobs: set[BlobId] = set()
    for path in (store.root / "pins").glob("*"):
        if is_abandoned(path.name):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        said = _read_pin(path)
        models |= said.models
        blobs |= said.blobs
    return Pins(frozenset(models), frozenset(blobs))


def _read_pin(path: Path) -> Pins:
    """Nothing where it is damaged, or gone by now."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        models, blobs = ([BlobId(blob) for blob in entry[key] if is_blob_id(blob)] for key in ("models", "blobs"))
    except (OSError, ValueError, TypeError, KeyError):
        return Pins()
    return Pins(frozenset(models), frozenset(blobs))


def _sizes(folder: Path, pattern: str, known: Collection[BlobId]) -> dict[BlobId, int]:
    """Blobs that are there: those that are `known` to belong to a model, and others once they have settled."""
    found = {}
    settled = time.time() - SETTLING_S
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # it may be gone by now
            status = path.stat()
            if is_blob_id(path.name) and (path.name in known or status.st_mtime < settled):
                found[BlobId(path.name)] = status.st_size
    return found


def _carry_out(store: Store, eviction: Eviction) -> int:
    """Manifests first: stopped in the middle, it leaves blobs of no model, and no model without blobs."""
    for model in eviction.models:
        (store.root / "manifests" / model).unlink(missing_ok=True)
    freed = 0
    for model in (*eviction.models, *eviction.compiled):
        size = bytes_under(store.compiled(model))
        shutil.rmtree(store.compiled(model), ignore_errors=True)  # what Windows keeps open is counted again next time
        freed += size - bytes_under(store.compiled(model))
    for blob in eviction.partials:
        with contextlib.suppress(OSError):  # somebody took it up
            size = store.begun_bytes(blob)
            (store.root / "partial" / blob).unlink()
            freed += size
    for blob in eviction.blobs:
        with contextlib.suppress(OSError):  # gone already; or Windows: somebody reads it
            path = store.path_of(blob)
            size = path.stat().st_size
            path.unlink()
            freed += size
            shutil.rmtree(store.root / "tokenizers" / blob, ignore_errors=True)
    return freed
