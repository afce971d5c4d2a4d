"""The layer store: content-addressed blobs on disk. Blocking; call it from a worker thread.

::

    root/blobs/<2 hex>/<64 hex>    whole blobs, named by the SHA-256 of their bytes
    root/partial/<64 hex>          the beginning of a blob, kept for resuming
    root/manifests/<64 hex>        which blobs are manifests: {"name", "spec", "added"}
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
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeAlias

from swarm.model.scratch import is_abandoned, owned_name
from swarm.protocol.errors import StoreError
from swarm.protocol.ids import BlobId, is_blob_id
from swarm.protocol.limits import MAX_BLOB_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

_CHUNK_BYTES = 4 * 1024 * 1024
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


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
        self.pin: Path | None = None
        """Where this process says what it works with, once it has."""

    def open(self) -> None:
        """Makes the directories and clears what dead processes left; partial blobs are kept. Raises `StoreError`."""
        with _disk(self.root, 0):
            for name in ("blobs", "partial", "manifests", "pins", "tmp"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            for leftover in (self.root / "tmp").iterdir():
                if is_abandoned(leftover.name):
                    with contextlib.suppress(OSError):
                        leftover.unlink()
            for claim in (self.root / "partial").glob("*.*"):
                _give_back(claim)

    def has(self, blob: BlobId) -> bool:
        return self.path_of(blob).is_file()

    def path(self, blob: BlobId) -> Path:
        """The file that holds a blob. Raises `StoreError` where there is none."""
        place = self.path_of(blob)
        if not place.is_file():
            raise StoreError("a blob is not here", found=f"none at {place}", action="Fetch it from a peer that has it.")
        return place

    def read(self, blob: BlobId) -> bytes:
        """The bytes of a small blob, verified. Raises `StoreError`; a damaged blob is removed."""
        path = self.path(blob)
        with _disk(self.root, 0):
            data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != blob:
            self._remove_damaged(path)
        return data

    def verify(self, blob: BlobId) -> None:
        """Reads a blob of any size and compares its hash. Raises `StoreError`; a damaged blob is removed."""
        path = self.path(blob)
        with _disk(self.root, 0):
            digest = _hash_file(path)
        if digest != blob:
            self._remove_damaged(path)

    def put_bytes(self, data: Buffer) -> BlobId:
        """Stores `data` and returns its id. Raises `StoreError` where the disk is full."""
        with self.writer() as writer:
            writer.write(data)
            return writer.commit()

    def adopt(self, path: Path) -> BlobId:
        """Moves the file at `path` into the store; nobody may write to it any more. Raises `StoreError`."""
        with _disk(self.root, path.stat().st_size if path.is_file() else 0):
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
        """A blob of `size` bytes that comes in pieces; goes on where an earlier one stopped.

        Raises `StoreError` where the rest does not fit on the disk.
        """
        if not 0 <= size <= MAX_BLOB_BYTES:
            raise StoreError("bad size of a blob", expected=f"0 to {MAX_BLOB_BYTES} bytes", found=str(size))
        return PartialBlob(self, blob, size)

    def mark_manifest(self, blob: BlobId, name: str, spec: str) -> None:
        """Notes that a blob of the store is a manifest: the model's name, and the source it was made from."""
        self.path(blob)
        entry = json.dumps({"name": name, "spec": spec, "added": time.time()})
        temporary = self.temporary()
        with _disk(self.root, len(entry)):
            temporary.write_text(entry, encoding="utf-8")
            temporary.replace(self.root / "manifests" / blob)

    def unmark_manifest(self, blob: BlobId) -> None:
        """Takes the note back; the blob stays."""
        (self.root / "manifests" / blob).unlink(missing_ok=True)

    def mark_used(self, blob: BlobId) -> None:
        """Notes that the model of a manifest is used now."""
        with contextlib.suppress(OSError):  # it is not marked as one yet
            os.utime(self.root / "manifests" / blob)

    def write_pin(self, entry: str) -> None:
        """Replaces what this process says it works with."""
        temporary = self.temporary()
        with _disk(self.root, len(entry)):
            temporary.write_text(entry, encoding="utf-8")
            self.pin = self.pin or self.root / "pins" / owned_name()
            temporary.replace(self.pin)

    def manifests(self) -> tuple[StoredManifest, ...]:
        """Those whose blob is here, newest first."""
        found = []
        with _disk(self.root, 0):
            for path in (self.root / "manifests").glob("*"):
                entry = _read_entry(path)
                if entry is not None and self.has(entry.blob):
                    found.append(entry)
        return tuple(sorted(found, key=lambda entry: (-entry.added, entry.blob)))

    def usage_bytes(self) -> int:
        """Disk space taken by blobs, whole and partial."""
        total = 0
        for folder, _, files in os.walk(self.root):  # unlike `rglob` it goes on where a folder is gone by now
            for name in files:
                with contextlib.suppress(OSError):  # and so may a file
                    total += Path(folder, name).stat().st_size
        return total

    def temporary(self) -> Path:
        """A name for a file of this process that nobody else uses."""
        return self.root / "tmp" / owned_name()

    def path_of(self, blob: BlobId) -> Path:
        """Where the blob is, or would be."""
        if not is_blob_id(blob):
            raise ValueError(f"not a blob id: {blob!r}")
        return self.root / "blobs" / blob[:2] / blob

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
        with contextlib.suppress(OSError):  # Windows refuses while somebody has it open
            path.unlink()
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
        with _disk(self._store.root, 0):
            self._file = self._path.open("xb")
        return self

    def write(self, data: Buffer) -> None:
        """Raises `StoreError` where the disk is full."""
        with _disk(self._store.root, len(data)):
            self._open_file().write(data)
        self._hash.update(data)

    def commit(self) -> BlobId:
        """Brings the blob to disk and into the store. Once."""
        with _disk(self._store.root, 0):
            _close_durably(self._open_file())
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


class PartialBlob:
    """The part of a blob that is here. Leaving the ``with`` without `finish` or `discard` keeps it for resuming."""

    def __init__(self, store: Store, blob: BlobId, size: int) -> None:
        self.blob = blob
        self.size = size
        self.have = 0
        """Bytes on disk so far."""
        self._store = store
        self._home = store.root / "partial" / blob
        self._claim = self._home.with_name(f"{blob}.{owned_name()}")
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None

    def __enter__(self) -> PartialBlob:
        with _disk(self._store.root, self.size):
            for claim in self._home.parent.glob(f"{self.blob}.*"):
                _give_back(claim)
            with contextlib.suppress(FileNotFoundError, PermissionError):  # none yet, or somebody was faster
                self._home.rename(self._claim)
            self._file = self._claim.open("a+b")
        try:
            self._resume(self._file)
        except BaseException:
            self.close()
            raise
        return self

    def append(self, data: Buffer) -> None:
        """The next bytes. Raises `StoreError` on too many, and where the disk is full: it is closed then, and kept."""
        if self.have + len(data) > self.size:
            found = f"{self.have + len(data)} bytes"
            raise StoreError("a blob is longer than it should be", expected=f"{self.size} bytes", found=found)
        try:
            with _disk(self._store.root, self.size - self.have):
                self._open_file().write(data)
        except StoreError:
            self.close()  # how much of `data` was written is not known; resuming reads what is there
            raise
        self._hash.update(data)
        self.have += len(data)

    def finish(self) -> None:
        """Verifies the blob and moves it into the store. Raises `StoreError`; wrong bytes are removed."""
        if self.have != self.size:
            raise StoreError("a blob is not complete", expected=f"{self.size} bytes", found=f"{self.have} bytes")
        digest = self._hash.hexdigest()
        if digest != self.blob:
            self.discard()
            raise StoreError(
                "a fetched blob is not the one asked for",
                expected=f"SHA-256 {self.blob}",
                found=digest,
                action="It was removed; fetch it from another peer.",
            )
        with _disk(self._store.root, 0):
            _close_durably(self._open_file())
            self._file = None
            self._store._land(self._claim, self.blob)

    def discard(self) -> None:
        """Removes what is here of it."""
        self._shut()
        self._claim.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of it; what is here stays for resuming."""
        if self._file is not None:
            self._shut()
            with contextlib.suppress(OSError):  # it is lost, and fetched from its start
                _keep(self._claim)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resume(self, file: BinaryIO) -> None:
        """Hashes what an earlier owner left; more than the whole blob cannot be right and goes."""
        with _disk(self._store.root, self.size):
            file.seek(0)
            while chunk := file.read(_CHUNK_BYTES):
                self._hash.update(chunk)
                self.have += len(chunk)
            if self.have > self.size:
                file.truncate(0)
                self._hash, self.have = hashlib.sha256(), 0
        free = shutil.disk_usage(self._store.root).free
        if free < self.size - self.have:
            raise _full(self._store.root, self.size - self.have, free)

    def _shut(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk fails again when the buffer is flushed
                self._file.close()
            self._file = None

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("the partial blob is not open")
        return self._file


def _give_back(claim: Path) -> None:
    """Makes a partial blob of a process that is gone free to be resumed."""
    if is_abandoned(claim.name.partition(".")[2]):
        with contextlib.suppress(OSError):  # another process does the same
            _keep(claim)


def _keep(claim: Path) -> None:
    """Renames a claimed partial blob to its free name; of two, the longer stays."""
    home = claim.with_name(claim.name.partition(".")[0])
    size = claim.stat().st_size
    if size == 0 or (home.is_file() and home.stat().st_size >= size):
        claim.unlink()
    else:
        claim.replace(home)


def _close_durably(file: BinaryIO) -> None:
    with file:
        file.flush()
        os.fsync(file.fileno())


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


@contextlib.contextmanager
def _disk(root: Path, needed: int) -> Iterator[None]:
    """Turns what the disk refuses into a `StoreError`; a full disk names the numbers."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _full(root, needed, shutil.disk_usage(root).free) from None
        raise StoreError(
            "the store cannot be used",
            expected=f"to read and write under {root}",
            found=f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else ""),
            action="Check the directory and its permissions, or choose another with --home.",
        ) from error


def _full(root: Path, needed: int, free: int) -> StoreError:
    return StoreError(
        "the disk is full",
        expected=f"{needed} more bytes",
        found=f"{free} bytes free at {root}",
        action="Make room, or choose another place with --home.",
    )
