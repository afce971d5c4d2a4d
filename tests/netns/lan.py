"""A small LAN of network namespaces on one bridge: for tests with real multicast and real processes.

Needs Linux, root and ``ip``; mark such tests with `needs_netns`. Every name carries this process's id, so that nothing
but what was made here is ever touched::

    with lan(3) as net:
        process = net.nodes[0].run([sys.executable, "node.py", "--headless"])
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

_COUNTER = itertools.count()
_TIMEOUT_S = 30.0


@functools.cache
def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (package iproute2)"
    name = f"swarm-{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=_TIMEOUT_S).returncode != 0:
        return "this kernel refuses network namespaces"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_TIMEOUT_S)
    return ""


def needs_netns(test: object) -> object:
    """Mark a test: it is skipped, with the reason, where namespaces cannot be made."""
    reason = why_not()
    return pytest.mark.netns(pytest.mark.skipif(bool(reason), reason=reason)(test))


@dataclass(frozen=True)
class Namespace:
    """One machine of the LAN."""

    name: str
    address: str
    interface: str = "eth0"

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.STDOUT,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` inside; `env` is added to this process's. ``ip netns exec`` becomes the program, so that signals
        reach it.
        """
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *map(str, argv)],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )

    def ip(self, *arguments: str) -> str:
        """``ip …`` inside."""
        return _ip("-n", self.name, *arguments)

    def plug(self) -> None:
        """Give the cable back, with its address."""
        self.ip("link", "set", self.interface, "up")
        # A link that goes down loses its routes; multicast needs one, for there is no default route here.
        self.ip("route", "replace", "224.0.0.0/4", "dev", self.interface)

    def unplug(self) -> None:
        self.ip("link", "set", self.interface, "down")


@dataclass(frozen=True)
class Lan:
    """`nodes` on one bridge, itself in a namespace of its own: the machine's own network is not touched."""

    nodes: tuple[Namespace, ...]
    switch: str

    def isolate(self, index: int, isolated: bool) -> None:
        """Keep a node's packets from the other isolated nodes; its cable stays in."""
        port, state = f"port{index + 1}", "on" if isolated else "off"
        _ip("-n", self.switch, "link", "set", port, "type", "bridge_slave", "isolated", state)


@contextlib.contextmanager
def lan(count: int, *, subnet: str = "10.77.0") -> Iterator[Lan]:
    """`count` namespaces, ``subnet.1`` and up, /24. All is removed at the end, processes inside first."""
    prefix = f"swarm-{os.getpid()}-{next(_COUNTER)}"
    switch = f"{prefix}-switch"
    names: list[str] = []
    try:
        _add(switch, names)
        _ip("-n", switch, "link", "add", "name", "lan0", "type", "bridge", "mcast_snooping", "0")
        _ip("-n", switch, "link", "set", "lan0", "up")
        nodes = []
        for index in range(1, count + 1):
            node = Namespace(f"{prefix}-{index}", f"{subnet}.{index}")
            _add(node.name, names)
            port = f"port{index}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", node.interface, "netns", node.name)
            _ip("-n", switch, "link", "set", port, "master", "lan0", "up")
            node.ip("link", "set", "lo", "up")
            node.ip("address", "add", f"{node.address}/24", "dev", node.interface)
            node.plug()
            nodes.append(node)
        yield Lan(tuple(nodes), switch)
    finally:
        for name in reversed(names):
            _remove(name)


def _add(name: str, names: list[str]) -> None:
    _ip("netns", "add", name)
    names.append(name)


def _remove(name: str) -> None:
    """End what still runs inside, by process id, and delete the namespace (its links go with it)."""
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=_TIMEOUT_S)
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_TIMEOUT_S)


def _ip(*arguments: str) -> str:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S)
    if result.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout
