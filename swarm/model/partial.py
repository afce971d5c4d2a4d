"""A blob in the making: its pieces come in any order, and a file remembers which are here. Blocking.

The file holds the blob's bytes, then the SHA-256 of every piece that is here, and zeros for the others. A piece is
written before its digest, and read again on resuming: whatever a power loss took, or left half done, is fetched again.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeAlias

from swarm.model.disk import close_durably, disk_errors, require_free
from swarm.model.scratch import is_abandoned, owned_name
from swarm.protocol.errors import StoreError
from swarm.protocol.ids import BlobId

Buffer: TypeAlias = bytes | bytearray | memoryview

PIECE_BYTES = 1024 * 1024
"""What is asked for, verified against a peer's list, and fetched again at once. The last one of a blob is shorter."""

DIGEST_BYTES = 32
_ABSENT = bytes(DIGEST_BYTES)


def piece_count(size: int) -> int:
    """Of a blob of `size` bytes."""
    return -(-size // PIECE_BYTES)


def piece_span(size: int, index: int) -> tuple[int, int]:
    """The half-open range of bytes of a piece."""
    return index * PIECE_BYTES, min(size, (index + 1) * PIECE_BYTES)


class PartialBlob:
    """The pieces of a blob that are here. Leaving the ``with`` before `finish` keeps them for resuming.

    One owner at a time; its threads may call `put` at once.
    """

    def __init__(self, home: Path, blob: BlobId, size: int, land: Callable[[Path, BlobId], None]) -> None:
        """`home` is where it lies while nobody works on it; `land` moves a finished file into the store."""
        self.blob = blob
        self.size = size
        self._home = home
        self._claim = home.with_name(f"{home.name}.{owned_name()}")
        self._land = land
        self._lock = threading.Lock()
        self._digests = [_ABSENT] * piece_count(size)
        self._whole = hashlib.sha256()
        self._hashed = 0
        """Pieces from the start that `_whole` has seen."""
        self._file: BinaryIO | None = None

    @property
    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every piece; zeros for one that is not here."""
        return tuple(self._digests)

    @property
    def missing(self) -> list[int]:
        """Indices of the pieces that are not here."""
        return [index for index, digest in enumerate(self._digests) if digest == _ABSENT]

    def __enter__(self) -> PartialBlob:
        with disk_errors(self._home.parent, self.size):
            for claim in self._home.parent.glob(f"{self.blob}.*"):
                give_back(claim)
            with contextlib.suppress(FileNotFoundError, PermissionError):  # none yet, or somebody was faster
                self._home.rename(self._claim)
            # Unbuffered: what a killed process has written is in the file, in that order.
            self._file = self._claim.open("r+b" if self._claim.is_file() else "x+b", buffering=0)
        try:
            with disk_errors(self._home.parent, self.size):
                self._resume(self._file)
            require_free(self._home.parent, sum(self._length(index) for index in self.missing))
        except BaseException:
            self.close()
            raise
        return self

    def put(self, index: int, data: Buffer) -> None:
        """A piece that came. Raises `StoreError` on another length, and where the disk is full: it is not here then."""
        if len(data) != self._length(index):
            expected = f"{self._length(index)} bytes"
            raise StoreError("a piece of another length", expected=expected, found=f"{len(data)} bytes")
        digest = hashlib.sha256(data).digest()
        with self._lock, disk_errors(self._home.parent, len(data)):
            file = self._open_file()
            _write(file, index * PIECE_BYTES, data)
            _write(file, self.size + index * DIGEST_BYTES, digest)
            self._digests[index] = digest
            if index == self._hashed:  # else it is read back when those before it are here
                self._whole.update(data)
                self._hashed += 1
            self._hash_on(file)

    def forget(self, indices: Iterable[int]) -> None:
        """These pieces are wrong: they count as missing from now on."""
        with self._lock, disk_errors(self._home.parent, 0):
            for index in indices:
                _write(self._open_file(), self.size + index * DIGEST_BYTES, _ABSENT)
                self._digests[index] = _ABSENT
            self._whole, self._hashed = hashlib.sha256(), 0

    def recheck(self) -> list[int]:
        """Reads everything again and forgets the pieces that the disk does not hold as they were written."""
        with self._lock, disk_errors(self._home.parent, 0):
            file = self._open_file()
            lost = [
                index
                for index, digest in enumerate(self._digests)
                if digest != _ABSENT and hashlib.sha256(self._read(file, index)).digest() != digest
            ]
        self.forget(lost)
        return lost

    def finish(self) -> bool:
        """Moves the blob into the store; False where its bytes are not those of its name.

        Raises `StoreError` where pieces are missing.
        """
        if self.missing:
            found = f"{len(self.missing)} of {len(self._digests)} pieces missing"
            raise StoreError("a blob is not complete", expected=f"{self.size} bytes", found=found)
        with self._lock, disk_errors(self._home.parent, 0):
            file = self._open_file()
            self._hash_on(file)
            if self._whole.hexdigest() != self.blob:
                return False
            file.truncate(self.size)
            close_durably(file)
            self._file = None
            self._land(self._claim, self.blob)
        return True

    def close(self) -> None:
        """Lets go of it; what is here stays for resuming."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
                with contextlib.suppress(OSError):  # it is lost, and fetched from its start
                    _keep(self._claim)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resume(self, file: BinaryIO) -> None:
        """Finds out what an earlier owner left. A file of another length is none of ours and starts anew."""
        length = self.size + len(self._digests) * DIGEST_BYTES
        if file.seek(0, 2) != length:
            file.truncate(0)
            file.truncate(length)
            return
        file.seek(self.size)
        written = file.read(length - self.size)
        for index in range(len(self._digests)):
            digest = written[index * DIGEST_BYTES :][:DIGEST_BYTES]
            if digest != _ABSENT and hashlib.sha256(data := self._read(file, index)).digest() == digest:
                self._digests[index] = digest
                if index == self._hashed:
                    self._whole.update(data)
                    self._hashed += 1

    def _hash_on(self, file: BinaryIO) -> None:
        """The hash of the whole follows the pieces that are here without a gap."""
        while self._hashed < len(self._digests) and self._digests[self._hashed] != _ABSENT:
            self._whole.update(self._read(file, self._hashed))
            self._hashed += 1

    def _read(self, file: BinaryIO, index: int) -> bytes:
        start, stop = piece_span(self.size, index)
        file.seek(start)
        return file.read(stop - start)

    def _length(self, index: int) -> int:
        start, stop = piece_span(self.size, index)
        return stop - start

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("the partial blob is not open")
        return self._file


def give_back(claim: Path) -> None:
    """Makes a partial blob of a process that is gone free to be resumed."""
    if is_abandoned(claim.name.partition(".")[2]):
        with contextlib.suppress(OSError):  # another process does the same
            _keep(claim)


def _keep(claim: Path) -> None:
    """Renames a claimed partial blob to its free name; of two, the one with more pieces stays."""
    home = claim.with_name(claim.name.partition(".")[0])
    have = _pieces_of(claim)
    if have == 0 or (home.is_file() and _pieces_of(home) >= have):
        claim.unlink()
    else:
        claim.replace(home)


def _pieces_of(path: Path) -> int:
    """How many pieces a file says it holds."""
    count = -(-path.stat().st_size // (PIECE_BYTES + DIGEST_BYTES))
    with path.open("rb") as file:
        file.seek(-min(count * DIGEST_BYTES, path.stat().st_size), 2)
        written = file.read()
    return sum(written[start : start + DIGEST_BYTES] != _ABSENT for start in range(0, len(written), DIGEST_BYTES))


def _write(file: BinaryIO, at: int, data: Buffer) -> None:
    file.seek(at)
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
