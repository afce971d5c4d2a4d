"""Facts about the PC: memory to offer, control groups, speed, name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.config import parse_name
from swarm.protocol.errors import DeviceError
from swarm.ring.machine import (
    MAX_SHARE,
    MIN_SYSTEM_BYTES,
    RUNTIME_BYTES,
    Memory,
    advertised_memory,
    default_name,
    friendly_name,
    measure_speed,
    memory,
    resident_bytes,
    within_control_group,
)

GIB = 1024**3
MACHINE = Memory(16 * GIB, 12 * GIB)


def test_memory_to_offer_by_example() -> None:
    assert advertised_memory(16 * GIB, 9 * GIB) == 9 * GIB - RUNTIME_BYTES - int(0.8 * GIB)
    assert advertised_memory(4 * GIB, 2 * GIB) == GIB
    assert advertised_memory(64 * GIB, 64 * GIB) == int(64 * GIB * MAX_SHARE)
    assert advertised_memory(2 * GIB, GIB // 2) == 0


@given(st.integers(0, 2**42), st.integers(0, 2**42))
def test_memory_to_offer_leaves_headroom(total: int, available: int) -> None:
    available = min(total, available)
    offered = advertised_memory(total, available)
    assert 0 <= offered <= total * MAX_SHARE
    if offered:
        assert available - offered >= RUNTIME_BYTES + MIN_SYSTEM_BYTES


def test_memory_of_this_machine() -> None:
    now = memory()
    assert 0 < now.available <= now.total
    assert 1024**2 < resident_bytes() < now.total


def group(root: Path, lines: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": lines, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_control_group_version_2(tmp_path: Path) -> None:
    root = group(
        tmp_path,
        "0::/user/job\n",
        {
            "sys/fs/cgroup/user/job/memory.max": "max\n",
            "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/user/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert within_control_group(MACHINE, root) == Memory(4 * GIB, 3 * GIB)


def test_control_group_version_1(tmp_path: Path) -> None:
    root = group(
        tmp_path,
        "9:name=systemd:/\n4:memory:/job\n1:cpu:/\n0::/\n",
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert within_control_group(MACHINE, root) == Memory(2 * GIB, GIB)


def test_control_group_of_a_container_that_sees_only_itself(tmp_path: Path) -> None:
    root = group(
        tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": f"{GIB}", "sys/fs/cgroup/memory.current": f"{2 * GIB}"}
    )
    assert within_control_group(MACHINE, root) == Memory(GIB, 0)


@pytest.mark.parametrize("lines", ["", "0::/\n", "0::/../../outside\n", "4:memory:/none\n", "rubbish\n"])
def test_no_limit(tmp_path: Path, lines: str) -> None:
    assert within_control_group(MACHINE, group(tmp_path, lines, {})) == MACHINE
    assert within_control_group(MACHINE, tmp_path / "nothing") == MACHINE


@pytest.mark.parametrize(
    ("hostname", "name"),
    [
        ("office-7.example.org", "office-7"),
        ("Küche", "Küche"),
        ("a b", "a b"),
        ("", "node"),
        ("--", "node"),
        ("x" * 90, "x" * 64),
    ],
)
def test_friendly_name(hostname: str, name: str) -> None:
    assert friendly_name(hostname) == name


@given(st.text(max_size=100))
def test_friendly_names_are_names(hostname: str) -> None:
    assert parse_name(friendly_name(hostname)) == friendly_name(hostname)
    assert parse_name(default_name())


def test_speed_is_plausible() -> None:
    assert 1e8 < measure_speed() < 1e13


def test_speed_of_an_unknown_device() -> None:
    with pytest.raises(DeviceError, match="the device XPU"):
        measure_speed("XPU")
