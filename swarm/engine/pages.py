"""Large memory on huge pages: fewer address translations while weights stream through the processor.

A decoded token reads every weight of the shard once, front to back. With pages of 4 KiB the walks through the page
tables cost about a tenth of that in a virtual machine. Only Linux lets a program without privileges ask for it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_HUGE = 2 << 20
_LARGE = 4 << 20
"""Smaller regions are not worth a call."""

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1; older kernels collapse the pages that were advised by and by
_MAPS = Path("/proc/self/maps")


def use_huge_pages() -> None:
    """Move this process's large anonymous memory to huge pages where the system allows it; blocking, some 2 s a GB.

    Call it when a shard has run once: the plugin packs its weights at the first forward. Does nothing where it cannot.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for start, end in large_anonymous(lines):
        if madvise(start, end - start, _MADV_HUGEPAGE) == 0:
            madvise(start, end - start, _MADV_COLLAPSE)


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
