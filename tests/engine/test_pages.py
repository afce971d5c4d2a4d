"""Which memory goes to huge pages, which pages go, and that nothing in it changes."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from swarm.engine.pages import drop_mapped_pages, large_anonymous, read_only_files, use_huge_pages

MAPS = """\
560000000000-560000400000 rw-p 00000000 fe:00 131    /usr/bin/python3
7f0000000000-7f0001000000 r--p 00000000 fe:00 132    /store/blob
7f0010000000-7f0010800000 rw-p 00000000 00:00 0
7f0020000000-7f0020800000 ---p 00000000 00:00 0
7f0030000000-7f0030300000 rw-p 00000000 00:00 0
7f0040001000-7f0040700000 rw-p 00000000 00:00 0
5f0040000000-5f0040800000 rw-p 00000000 00:00 0                          [heap]
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
7f0050000000-7f0050800000 rw-s 00000000 00:01 77   /dev/zero (deleted)
"""


def test_only_large_private_anonymous_memory_is_meant() -> None:
    assert list(large_anonymous(MAPS.splitlines())) == [
        (0x7F0010000000, 0x7F0010800000),
        (0x7F0040200000, 0x7F0040600000),
        (0x5F0040000000, 0x5F0040800000),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_memory_keeps_its_content_and_moves_to_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.is_file() or "[never]" in enabled.read_text(encoding="ascii"):
        pytest.skip("this system has no huge pages")
    expected = np.random.default_rng(0).bytes(32 << 20)
    with mmap.mmap(-1, len(expected), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = expected
        before = huge_bytes()
        use_huge_pages()
        assert memory[:] == expected
        assert huge_bytes() - before >= len(expected) // 2


def huge_bytes() -> int:
    return rolled_up("AnonHugePages")


def rolled_up(what: str) -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith(f"{what}:"))


def test_only_read_only_files_of_the_folder_are_meant() -> None:
    assert list(read_only_files(MAPS.splitlines(), Path("/store"))) == [(0x7F0000000000, 0x7F0001000000)]
    assert list(read_only_files(MAPS.splitlines(), Path("/sto"))) == []
    assert list(read_only_files(MAPS.splitlines(), Path("/usr"))) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_pages_of_mapped_files_go_and_come_back(tmp_path: Path) -> None:
    expected = np.random.default_rng(0).integers(0, 256, 32 << 20, np.uint8)
    expected.tofile(tmp_path / "blob")
    mapped = np.memmap(tmp_path / "blob", np.uint8, "r")
    assert np.array_equal(mapped, expected)
    before = rolled_up("Rss")
    drop_mapped_pages(tmp_path)
    assert before - rolled_up("Rss") > len(expected) * 9 // 10
    assert np.array_equal(mapped, expected)
