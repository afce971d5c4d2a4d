"""A PC of the test LAN: a home, and the process of ``node.py`` that runs with it, seen from inside its namespace."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from tests.netns.lan import Namespace

ROOT = Path(__file__).parents[2]
NODE = ROOT / "node.py"
READY_S = 180.0
"""Two cores, and three nodes that compile at once."""

POLL_S = 0.25
_CLONE_NEWNET = 0x40000000

Status: TypeAlias = dict[str, Any]


class Pc:
    """One at a time runs; `start` again after `stop` or `kill` is the same PC switched on again."""

    def __init__(self, space: Namespace, home: Path, name: str, *flags: str, script: Path = NODE) -> None:
        """`flags` go to every start of `script`."""
        self.space = space
        self.home = home
        self.name = name
        self._flags = flags
        self._script = script
        self.log = home.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        home.mkdir(parents=True, exist_ok=True)

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self, *flags: str) -> None:
        assert self._process is None, "it runs already"
        # No way out: what it needs it has, or gets from its peers.
        nowhere = {"PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        words = ("--home", self.home, "--name", self.name, "--headless")
        with self.log.open("ab") as log:
            self._process = self.space.run(
                [sys.executable, self._script, *words, *self._flags, *flags],
                env=nowhere,
                stdout=log,
                stderr=log,
            )

    def ended(self, timeout_s: float) -> int:
        """The exit status, once it ends by itself."""
        assert self._process is not None
        status = self._process.wait(timeout_s)
        self._process = None
        return status

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def tail(self) -> str:
        """The end of its log, for failures."""
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log.exists() else []
        return "\n".join([f"--- {self.name}:", *lines[-40:]])

    # --- what it says -----------------------------------------------------------------------------------------------

    def status(self) -> Status | None:
        """``GET /status``; None while it does not answer."""
        try:
            port = int(json.loads((self.home / "node.json").read_text("utf-8"))["api"].rpartition(":")[2])
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
                connection.sock = _connect_inside(self.space, port)
                connection.request("GET", "/status")
                found: Status = json.loads(connection.getresponse().read())
                return found
        except (OSError, ValueError, http.client.HTTPException):
            return None

    def until(self, wanted: Callable[[Status], bool], what: str, timeout_s: float = READY_S) -> Status:
        """The first status that is as `wanted`."""
        deadline = time.monotonic() + timeout_s
        found: Status | None = None
        while time.monotonic() < deadline:
            found = self.status()
            if found is not None and wanted(found):
                return found
            if self._process is not None and self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended, waiting for {what}\n{self.tail()}")
            time.sleep(POLL_S)
        raise AssertionError(f"{self.name}: no {what} within {timeout_s:g} s; last {found}\n{self.tail()}")

    def command(self, *words: str, timeout_s: float = READY_S) -> subprocess.CompletedProcess[str]:
        """``node.py`` with `words` and this home, on this PC."""
        process = self.space.run([*_node(*words), "--home", self.home], stderr=subprocess.PIPE)
        with process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"{words} on {self.name} took over {timeout_s} s\n{self.tail()}") from None
        return subprocess.CompletedProcess(words, process.returncode, out.decode(), err.decode())

    def ask(self, question: str, tokens: int, *flags: str) -> str:
        """The answer that ``ask`` prints."""
        result = self.command("ask", question, "--max-tokens", str(tokens), *flags)
        assert result.returncode == 0, f"{result.stderr}\n{self.tail()}"
        return result.stdout

    def asking(self, question: str, tokens: int) -> subprocess.Popen[bytes]:
        """``ask``, under way: its stdout is the answer as it comes."""
        words = ("ask", question, "--max-tokens", str(tokens))
        return self.space.run([*_node(*words), "--home", self.home], stderr=subprocess.PIPE)


@contextlib.contextmanager
def ended_at_last(pcs: list[Pc]) -> Iterator[None]:
    """Ends what still runs, and shows the logs where the test failed."""
    try:
        yield
    except BaseException:
        for pc in pcs:
            sys.stderr.write(pc.tail() + "\n")
        raise
    finally:
        for pc in pcs:
            pc.kill()


def _node(*words: str) -> list[str | Path]:
    return [sys.executable, NODE, *words]


def _connect_inside(space: Namespace, port: int) -> socket.socket:
    """A connection to `port` on the loopback of a namespace: a socket stays where it was made."""

    def connect() -> socket.socket:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/var/run/netns", space.name).open("rb") as there:
            if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot enter the namespace")
        return socket.create_connection(("127.0.0.1", port), timeout=10)

    # A thread of its own enters the namespace, and ends in it.
    with ThreadPoolExecutor(1) as one:
        return one.submit(connect).result()
