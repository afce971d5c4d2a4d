"""The layer store: content-addressed blobs on disk. Blocking; call it from a worker thread.

::

    root/blobs/<2 hex>/<64 hex>    whole blobs, named by the SHA-256 of their bytes
    root/partial/<64 hex>          the pieces of a blob that are here, see `partial`
    root/manifests/<64 hex>        which blobs are manifests: {"name", "spec", "added"}
    root/compiled/<64 hex>/        what a device's plugin keeps of the compiled shards of a model (its manifest's id)
    root/pins/<pid>-<random>       what the process <pid> works with, see `inventory`
    root/tmp/<pid>-<random>        being written by the process <pid>

A blob appears in one step, by a rename, after its bytes are on disk: whatever is under `blobs` is whole. Several
processes and tasks may share a store. A partial blob has one owner at a time, who renames it to
``<64 hex>.<pid>-<random>`` while working on it; a second one starts its own from zero, and the first to finish wins.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from swarm.model.disk import bytes_under, close_durably, disk_errors
from swarm.model.partial import Buffer, PartialBlob, give_back
from swarm.model.scratch import is_abandoned, owned_name
from swarm.protocol.errors import StoreError
from swarm.protocol.ids import BlobId, is_blob_id
from swarm.protocol.limits import MAX_BLOB_BYTES

_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest in the store: its blob, and where it came from."""

    blob: BlobId
    name: str
    spec: str
    added: float
    """Seconds since the epoch."""
    used: float
    """Likewise; see `Store.mark_used`."""


class Store:
    """Blobs under `root`, which `inventory.make_room` keeps under `limit_bytes`. Nothing happens before `open`."""

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self._pin: Path | None = None
        self._pinned: dict[str, tuple[frozenset[BlobId], frozenset[BlobId]]] = {}
        self._pin_lock = threading.Lock()

    def open(self) -> None:
        """Makes the directories and clears what dead processes left; partial blobs are kept. Raises `StoreError`."""
        with disk_errors(self.root, 0):
            for name in ("blobs", "partial", "manifests", "pins", "tmp"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            for leftover in (self.root / "tmp").iterdir():
                if is_abandoned(leftover.name):
                    with contextlib.suppress(OSError):
                        leftover.unlink()
            for claim in (self.root / "partial").glob("*.*"):
                give_back(claim)

    def has(self, blob: BlobId) -> bool:
        return self.path_of(blob).is_file()

    def is_whole(self, blob: BlobId, size: int) -> bool:
        """Whether a blob of `size` bytes is here. One of another size, as a damaged file system leaves, is removed."""
        path = self.path_of(blob)
        try:
            if path.stat().st_size == size:
                return True
            path.unlink()
        except OSError:  # not here; or Windows: somebody has it open
            pass
        return False

    def path(self, blob: BlobId) -> Path:
        """The file that holds a blob. Raises `StoreError` where there is none."""
        place = self.path_of(blob)
        if not place.is_file():
            raise StoreError("a blob is not here", found=f"none at {place}", action="Fetch it from a peer that has it.")
        return place

    def read(self, blob: BlobId) -> bytes:
        """The bytes of a small blob, verified. Raises `StoreError`; a damaged blob is removed."""
        path = self.path(blob)
        with disk_errors(self.root, 0):
            data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != blob:
            self._remove_damaged(path)
        return data

    def verify(self, blob: BlobId) -> None:
        """Reads a blob of any size and compares its hash. Raises `StoreError`; a damaged blob is removed."""
        path = self.path(blob)
        with disk_errors(self.root, 0):
            digest = _hash_file(path)
        if digest != blob:
            self._remove_damaged(path)

    def drop(self, blob: BlobId) -> None:
        """Removes a blob whose bytes are not those of its name."""
        with contextlib.suppress(OSError):  # gone already; or Windows refuses while somebody has it open
            self.path_of(blob).unlink()

    def put_bytes(self, data: Buffer) -> BlobId:
        """Stores `data` and returns its id. Raises `StoreError` where the disk is full."""
        with self.writer() as writer:
            writer.write(data)
            return writer.commit()

    def adopt(self, path: Path) -> BlobId:
        """Moves the file at `path` into the store; nobody may write to it any more. Raises `StoreError`."""
        with disk_errors(self.root, path.stat().st_size if path.is_file() else 0):
            blob = BlobId(_hash_file(path))
            with path.open("r+b") as file:
                os.fsync(file.fileno())
            try:
                self._land(path, blob)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                with self.writer() as writer, path.open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        writer.write(chunk)
                    blob = writer.commit()
                path.unlink()
        return blob

    def writer(self) -> BlobWriter:
        """For a blob whose id is known only at its end: ``with store.writer() as w: w.write(…); id = w.commit()``."""
        return BlobWriter(self)

    def partial(self, blob: BlobId, size: int) -> PartialBlob:
        """A blob of `size` bytes that comes in pieces; goes on with those that an earlier owner left.

        Raises `StoreError` where the rest does not fit on the disk.
        """
        if not 0 <= size <= MAX_BLOB_BYTES:
            raise StoreError("bad size of a blob", expected=f"0 to {MAX_BLOB_BYTES} bytes", found=str(size))
        return PartialBlob(self._partial_of(blob), blob, size, self._land)

    def begun_bytes(self, blob: BlobId) -> int:
        """Disk space that the pieces of a blob take already, its whole size as a rule; 0 where there are none."""
        with contextlib.suppress(OSError):
            return self._partial_of(blob).stat().st_size
        return 0

    def mark_manifest(self, blob: BlobId, name: str, spec: str) -> None:
        """Notes that a blob of the store is a manifest: the model's name, and the source it was made from."""
        self.path(blob)
        entry = json.dumps({"name": name, "spec": spec, "added": time.time()})
        temporary = self.temporary()
        with disk_errors(self.root, len(entry)):
            temporary.write_text(entry, encoding="utf-8")
            temporary.replace(self.root / "manifests" / blob)

    def unmark_manifest(self, blob: BlobId) -> None:
        """Takes the note back; the blob stays."""
        (self.root / "manifests" / blob).unlink(missing_ok=True)

    def mark_used(self, blob: BlobId) -> None:
        """Notes that the model of a manifest is used now."""
        with contextlib.suppress(OSError):  # it is not marked as one yet
            os.utime(self.root / "manifests" / blob)

    def pin(self, purpose: str, models: Iterable[BlobId] = (), blobs: Iterable[BlobId] = ()) -> None:
        """Says what this process works with for a purpose, in the place of what it said for it before."""
        with self._pin_lock:
            self._pinned[purpose] = frozenset(models), frozenset(blobs)
            every_model = {model for models, _ in self._pinned.values() for model in models}
            every_blob = {blob for _, blobs in self._pinned.values() for blob in blobs}
            entry = json.dumps({"models": sorted(every_model), "blobs": sorted(every_model | every_blob)})
            temporary = self.temporary()
            with disk_errors(self.root, len(entry)):
                temporary.write_text(entry, encoding="utf-8")
                self._pin = self._pin or self.root / "pins" / owned_name()
                temporary.replace(self._pin)

    def compiled(self, model: BlobId) -> Path:
        """Where a plugin may keep compiled shards of a model."""
        return self.root / "compiled" / model

    def manifests(self) -> tuple[StoredManifest, ...]:
        """Those whose blob is here, newest first."""
        found = []
        with disk_errors(self.root, 0):
            for path in (self.root / "manifests").glob("*"):
                entry = _read_entry(path)
                if entry is not None and self.has(entry.blob):
                    found.append(entry)
        return tuple(sorted(found, key=lambda entry: (-entry.added, entry.blob)))

    def usage_bytes(self) -> int:
        """Disk space taken by all that is here: blobs, whole and partial, compiled models, downloads."""
        return bytes_under(self.root)

    def temporary(self) -> Path:
        """A name for a file of this process that nobody else uses."""
        return self.root / "tmp" / owned_name()

    def path_of(self, blob: BlobId) -> Path:
        """Where the blob is, or would be."""
        if not is_blob_id(blob):
            raise ValueError(f"not a blob id: {blob!r}")
        return self.root / "blobs" / blob[:2] / blob

    def _partial_of(self, blob: BlobId) -> Path:
        if not is_blob_id(blob):
            raise ValueError(f"not a blob id: {blob!r}")
        return self.root / "partial" / blob

    def _land(self, path: Path, blob: BlobId) -> None:
        """Renames a finished file to its place. Where the blob is already there, the file goes."""
        place = self.path_of(blob)
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.replace(place)
            except PermissionError:  # Windows: another process landed it meanwhile and has it open
                if not place.is_file():
                    raise
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def _remove_damaged(self, path: Path) -> None:
        self.drop(BlobId(path.name))
        raise StoreError(
            "a blob is damaged",
            expected=f"SHA-256 {path.name}",
            found=f"other bytes at {path}",
            action="It was removed; fetch it again.",
        )


class BlobWriter:
    """Hashes while it writes. Leaving the ``with`` without `commit` drops what was written."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = store.temporary()
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None

    def __enter__(self) -> BlobWriter:
        with disk_errors(self._store.root, 0):
            self._file = self._path.open("xb")
        return self

    def write(self, data: Buffer) -> None:
        """Raises `StoreError` where the disk is full."""
        with disk_errors(self._store.root, len(data)):
            self._open_file().write(data)
        self._hash.update(data)

    def commit(self) -> BlobId:
        """Brings the blob to disk and into the store. Once."""
        with disk_errors(self._store.root, 0):
            close_durably(self._open_file())
            self._file = None
            blob = BlobId(self._hash.hexdigest())
            self._store._land(self._path, blob)
        return blob

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk fails again when the buffer is flushed
                self._file.close()
            self._file = None
        self._path.unlink(missing_ok=True)

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("the writer is not open")
        return self._file


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_entry(path: Path) -> StoredManifest | None:
    """None for a file that is not an entry, or a damaged one: the manifest is published or fetched again."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        name, spec, added = str(entry["name"]), str(entry["spec"]), float(entry["added"])
        used = path.stat().st_mtime
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return StoredManifest(BlobId(path.name), name, spec, added, used) if is_blob_id(path.name) else None
