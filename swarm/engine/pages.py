"""What is done with memory once a shard has run and the plugin has packed its weights. Linux only.

Huge pages: a decoded token reads every weight of the shard once, front to back, and with pages of 4 KiB the walks
through the page tables cost about a tenth of that in a virtual machine. Mapped files: what was packed is not read from
its file any more, and its pages would count a second time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_HUGE = 2 << 20
_LARGE = 4 << 20
"""Smaller regions are not worth a call."""

_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1; older kernels collapse the pages that were advised by and by
_MAPS = Path("/proc/self/maps")


def use_huge_pages() -> None:
    """Move this process's large anonymous memory to huge pages where the system allows it; blocking, some 2 s a GB.

    Call it when a shard has run once: the plugin packs its weights at the first forward. Does nothing where it cannot.
    """
    for start, end in large_anonymous(_maps()):
        if _advise(start, end, _MADV_HUGEPAGE):
            _advise(start, end, _MADV_COLLAPSE)


def drop_mapped_pages(folder: Path) -> None:
    """Take the pages of files under `folder` out of this process's memory; blocking, milliseconds.

    Whatever is read again comes back from the file, or from the system's cache of it. Does nothing where it cannot.
    """
    for start, end in read_only_files(_maps(), folder.resolve()):  # the system names files by their real path
        _advise(start, end, _MADV_DONTNEED)


def _maps() -> list[str]:
    """Nothing where this cannot be done."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return []
    try:
        return _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _advise(start: int, end: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, end - start, advice) == 0)


def read_only_files(lines: Iterable[str], folder: Path) -> Iterator[tuple[int, int]]:
    """``[start, end)`` of read-only mappings of files under `folder`, out of ``/proc/*/maps``."""
    for line in lines:
        # 7f5a75e00000-7f5a7c600000 r--s 00000000 08:01 1234    /a/file
        span, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights.startswith("r--") and name and name[0].startswith(f"{folder}/"):
            low, high = (int(number, 16) for number in span.split("-"))
            yield low, high


def large_anonymous(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """``[start, end)`` of large writable regions without a file, in whole huge pages, out of ``/proc/*/maps``."""
    for line in lines:
        # 7f5a75e00000-7f5a7c600000 rw-p 00000000 00:00 0    [heap]
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        if inode != "0" or not rights.startswith("rw-p") or (name and name[0] != "[heap]"):
            continue
        low, high = (int(number, 16) for number in span.split("-"))
        start, end = -(-low // _HUGE) * _HUGE, high // _HUGE * _HUGE
        if end - start >= _LARGE:
            yield start, end
