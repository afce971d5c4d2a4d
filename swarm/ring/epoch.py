"""The last epoch that this node proposed, on its disk: a restart must not use a number twice."""

from __future__ import annotations

from pathlib import Path

from swarm.ring.identity import write_private

_FILE = "epoch"


def read_epoch(home: Path) -> int:
    """0 where there is none."""
    try:
        return int((home / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def write_epoch(home: Path, number: int) -> None:
    write_private(home / _FILE, str(number).encode())
