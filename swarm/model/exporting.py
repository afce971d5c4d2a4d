"""From a Hugging Face checkpoint to blobs in the store, by ``swarm.model.export`` in its own process, slice by slice.

Its memory, torch's among it, goes back when a slice ends, and a crash in native code is only an error. A *slice* is a
few layers: their tensors are fetched where the checkpoint is on the hub, exported, and removed, so that disk and memory
do not grow with the model. What is made is remembered in the store as a *part*: the model's manifest with the ids that
are known so far. An export that was stopped goes on from there, and peers are told of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swarm.model import hub
from swarm.model.checkpoint import INDEX, is_weights
from swarm.model.convert import REFUSED
from swarm.model.inventory import make_room
from swarm.model.manifest import Manifest, merge
from swarm.model.scratch import owned_name
from swarm.model.sources import ProgressCallback, Source
from swarm.model.store import Store
from swarm.model.watched import module_command, package_path, run_watched
from swarm.protocol.errors import ModelError, StoreError, UsageError
from swarm.protocol.ids import BlobId
from swarm.protocol.messages import Phase

EXPORT_TIMEOUT_S = 2 * 3600.0
"""One slice; the largest layers take a minute, on a slow disk some."""

SLICE_BYTES = 2 * 1024**3
"""Of blobs; in 16 bits the tensors are four times as large. Each slice pays some ten seconds for torch to start."""

QUANTIZATION = "INT4"
"""What the exporter makes where it is not told otherwise."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """Exports layers of one checkpoint into a store. Its methods block."""

    checkpoint: Path
    """With ``config.json`` and the tokenizer, and the tensors where they are on a disk."""
    source: Source
    """Pinned."""
    store: Store
    workdir: Path
    progress: ProgressCallback
    """What it raises ends the work."""

    def outline(self) -> Manifest:
        """The manifest with no weights known: sizes, graph and tokenizer. Needs no tensors; some ten seconds.

        Raises `UsageError` where the checkpoint cannot be exported, `ModelError` where the exporter fails.
        """
        return self._export(self.checkpoint, 0, 0)

    def export(self, known: Manifest, start: int, end: int) -> Manifest:
        """`known` and the layers ``[start, end)``, a `slices` of them, put into the store and remembered there.

        Room is made for them. Raises `UsageError`, `ModelError`, and `StoreError` where there is none.
        """
        needed = sum(blob.bytes for blob in known.part(start, end))
        found = self.source.found
        remote = found is not None and found.directory is None
        if found is not None and remote:
            weights = sum(file.bytes for file in found.files if is_weights(file.name))
            needed += weights * needed // known.total_bytes  # a share of the tensors as large as that of the blobs
        make_room(self.store, needed)
        if found is None or not remote:
            made = self._export(self.checkpoint, start, end)
        else:
            with self._scratch() as scratch:
                for file in self.checkpoint.iterdir():
                    if file.is_file() and file.name != INDEX and not is_weights(file.name):
                        shutil.copyfile(file, scratch / file.name)
                label = f"{self.source.name}, {_layers(start, end)}"
                span = (start, end, len(known.layers))
                hub.fetch_parts(
                    found, self.checkpoint, scratch, span, lambda *count: self.progress(Phase.DOWNLOAD, label, *count)
                )
                made = self._export(scratch, start, end)
        known = merge([known, made])
        remember(self.store, known)
        return known

    def export_all(self, known: Manifest) -> Manifest:
        """The same for all layers that are not known."""
        for start, end in known.unknown(0, len(known.layers)):
            for first, last in slices(known, start, end):
                known = self.export(known, first, last)
        return known

    def _export(self, checkpoint: Path, start: int, end: int) -> Manifest:
        name = self.source.name
        label = f"{name}, {_layers(start, end)}" if end else name
        before = self.store.usage_bytes()
        with self._scratch() as scratch:
            result = scratch / "manifest"
            status, message = run_watched(
                module_command(
                    "swarm.model.export",
                    *(str(checkpoint.absolute()), str(self.store.root.absolute()), str(result.absolute())),
                    *("--layers", f"{start}:{end}", "--name", name, "--source", self.source.spec),
                ),
                EXPORT_TIMEOUT_S,
                lambda: self.progress(Phase.CONVERT, label, max(0, self.store.usage_bytes() - before), 0),
                scratch / "stderr",
                package_path(),
                scratch,
            )
            if status == REFUSED and message:
                raise UsageError(message)
            if status or not result.is_file():
                raise ModelError(
                    f"{name} cannot be exported",
                    found=f"the exporter ended with status {status}" + (f": {message}" if message else ""),
                    action="It may have run out of memory: close other programs, or take an OpenVINO IR of the model.",
                )
            made = Manifest.decode(result.read_bytes())
        return replace(made, revision=self.source.revision, quantization=made.quantization or QUANTIZATION)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        scratch = self.workdir / "tmp" / owned_name()
        scratch.mkdir(parents=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def slices(outline: Manifest, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The layers ``[start, end)`` in runs of at most `SLICE_BYTES`, or of one layer."""
    first, size = start, 0
    for layer in range(start, end):
        own = sum(blob.bytes for blob in outline.part(layer, layer + 1))
        if size + own > SLICE_BYTES and layer > first:
            yield first, layer
            first, size = layer, 0
        size += own
    if first < end:
        yield first, end


def remember(store: Store, part: Manifest) -> BlobId:
    """Keeps a part, or the whole, in the place of the parts of the same model that were kept before."""
    identity = store.put_bytes(part.encode())
    store.mark_manifest(identity, part.name, part.source)
    forget_parts(store, part, identity)
    return identity


def forget_parts(store: Store, model: Manifest, identity: BlobId) -> None:
    """Drops the parts of a model that were kept, but for the manifest `identity`. No blob goes."""
    for other, kept in _kept(store, model):
        if other != identity and not kept.is_whole:
            store.unmark_manifest(other)


def held(store: Store, known: Manifest) -> Manifest:
    """Of the model of `known` what is in the store, by what is known here of it and in the parts kept there."""
    for _, kept in _kept(store, known):
        with suppress(ModelError):  # made by another version
            known = merge([known, kept])
    return known.without({blob.id for blob in known.weights(0, len(known.layers)) if not store.has(blob.id)})


def _kept(store: Store, known: Manifest) -> Iterator[tuple[BlobId, Manifest]]:
    for entry in store.manifests():
        if entry.spec == known.source:
            with suppress(StoreError, ModelError):  # damaged
                kept = Manifest.decode(store.read(entry.blob))
                if kept.revision == known.revision:
                    yield entry.blob, kept


def _layers(start: int, end: int) -> str:
    return f"layer {start}" if end == start + 1 else f"layers {start} to {end - 1}"
