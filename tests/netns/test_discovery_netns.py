"""Discovery between machines: network namespaces on a bridge, with real multicast."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns.lan import Lan, lan, needs_netns

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "ring" / "discovery_node.py"
DEADLINE_S = 30.0


class Node:
    """One process that discovers, and the events it printed."""

    def __init__(self, net: Lan, index: int) -> None:
        self.id = secrets.token_hex(16)
        self.address = f"{net.nodes[index].address}:7420"
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.process = net.nodes[index].run(
            [sys.executable, SCRIPT, self.id, "7420", "0.5"],
            env={"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stderr=None,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            if wanted(event):
                return event

    def until_found(self, *others: Node) -> dict[str, tuple[str, ...]]:
        """The addresses that each of `others` was found at."""
        missing = {other.id for other in others}
        found = {}
        while missing:
            event = self.until(lambda e: e.get("found") in missing)
            missing.discard(event["found"])
            found[event["found"]] = event["addresses"]
        return found

    def until_lost(self, other: Node) -> None:
        self.until(lambda e: e.get("lost") == other.id)

    def leave(self) -> None:
        self.process.communicate(b"", timeout=DEADLINE_S)


@contextlib.contextmanager
def nodes(net: Lan) -> Iterator[list[Node]]:
    started: list[Node] = []
    try:
        started += [Node(net, index) for index in range(len(net.nodes))]
        yield started
    finally:
        for node in started:
            node.process.kill()
            node.process.wait(timeout=DEADLINE_S)


@needs_netns
def test_three_machines_find_each_other_and_hear_one_leave() -> None:
    with lan(3) as net, nodes(net) as (a, b, c):
        assert a.until_found(b, c) == {b.id: [b.address], c.id: [c.address]}
        assert b.until_found(a, c) == {a.id: [a.address], c.id: [c.address]}
        assert c.until_found(a, b) == {a.id: [a.address], b.id: [b.address]}
        c.leave()
        a.until_lost(c)
        b.until_lost(c)


@needs_netns
def test_a_cable_plugged_in_later() -> None:
    with lan(2) as net:
        net.nodes[1].unplug()
        with nodes(net) as (a, b):
            b.until(lambda e: "ready" in e)  # without its cable, on loopback alone
            net.nodes[1].plug()
            assert a.until_found(b) == {b.id: [b.address]}
            assert b.until_found(a) == {a.id: [a.address]}


@pytest.mark.slow
@needs_netns
def test_a_switch_that_lets_packets_through_later() -> None:
    with lan(2) as net:
        for index in range(2):
            net.isolate(index, True)
        with nodes(net) as (a, b):
            time.sleep(16)  # zeroconf has asked for the last time by now, and nothing arrived
            net.isolate(0, False)
            a.until_found(b)
            b.until_found(a)
