"""How commands find the node that runs with a home: one small file beside its identity."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarm.protocol.errors import UsageError

_FILE = "node.json"


@dataclass(frozen=True, slots=True)
class RunningNode:
    pid: int
    api: str
    """``http://127.0.0.1:7480``"""


def announce(home: Path, api: str) -> None:
    """Write the file; for the node itself, once its API listens."""
    place = home / _FILE
    fresh = place.with_suffix(".new")
    fresh.write_text(json.dumps({"pid": os.getpid(), "api": api}), encoding="utf-8")
    fresh.replace(place)


def withdraw(home: Path) -> None:
    (home / _FILE).unlink(missing_ok=True)


def find(home: Path) -> RunningNode:
    """The node that runs with `home`. Raises `UsageError` where there is none."""
    try:
        found = json.loads((home / _FILE).read_text(encoding="utf-8"))
        node = RunningNode(int(found["pid"]), str(found["api"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise nobody(home) from None
    if not psutil.pid_exists(node.pid):
        raise nobody(home)
    return node


def nobody(home: Path) -> UsageError:
    return UsageError(
        f"no node runs with the home {home}",
        action="Start one: python node.py (with the same --home, where you give one).",
    )
