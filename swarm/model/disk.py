"""What a disk refuses, as errors with numbers."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from swarm.protocol.errors import StoreError

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


@contextlib.contextmanager
def disk_errors(root: Path, needed: int) -> Iterator[None]:
    """Turns an ``OSError`` under `root` into a `StoreError`; `needed` is how many bytes were to be written."""
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


def require_free(root: Path, needed: int) -> None:
    """Raises `StoreError` where `needed` more bytes do not fit on the disk of `root`."""
    free = shutil.disk_usage(root).free
    if free < needed:
        raise _full(root, needed, free)


def bytes_under(directory: Path) -> int:
    """Sizes of all files, those aside that others remove meanwhile."""
    total = 0
    for folder, _, files in os.walk(directory):  # unlike `rglob` it goes on where a folder is gone by now
        for name in files:
            with contextlib.suppress(OSError):  # and so may a file
                total += Path(folder, name).stat().st_size
    return total


def close_durably(file: BinaryIO) -> None:
    """Closes a file whose bytes are on disk then."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def _full(root: Path, needed: int, free: int) -> StoreError:
    return StoreError(
        "the disk is full",
        expected=f"{needed} more bytes",
        found=f"{free} bytes free at {root}",
        action="Make room, or choose another place with --home.",
    )
