"""The dashboard and the chat in a real terminal: a node in tmux, keys typed, the screen read."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.homes import whole_store

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]

ROOT = Path(__file__).parents[2]
WAIT_S = 180.0
COLUMNS, ROWS = 120, 40


class Terminal:
    """A tmux server of its own with one window; its program's exit status is shown when it ends."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "tmux"

    def start(self, command: list[str]) -> None:
        shown = f"{shlex.join(command)}; echo ended with $?; exec cat"
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), shown)

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def until(self, wanted: Callable[[str], bool], what: str) -> str:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            screen = self.screen()
            if wanted(screen):
                return screen
            time.sleep(0.2)
        raise AssertionError(f"no {what} on the screen:\n{self.screen()}")

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], capture_output=True, timeout=30)

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, encoding="utf-8")
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def test_ask_stop_and_leave(terminal: Terminal, tmp_path: Path, smollm2_gguf: Path) -> None:
    home = tmp_path / "home"
    whole_store(home, smollm2_gguf)
    swarm = f"tmux-{secrets.token_hex(4)}"
    command = [sys.executable, str(ROOT / "node.py"), "--home", str(home), "--name", "PC-1", "--open"]
    terminal.start([*command, "--swarm", swarm, "--interface", "lo"])
    screen = terminal.until(lambda screen: "● ready" in screen, "ring that is ready")
    assert swarm in screen
    assert "PC-1" in screen
    assert max(map(len, screen.splitlines())) <= COLUMNS

    question = "Write a very long story about the sea."
    terminal.press(question, "Enter")
    terminal.until(lambda screen: len(below(screen, question)) > 40, "answer")
    terminal.press("C-c")
    terminal.until(lambda screen: "stopped" in below(screen, question), "word that it stopped")
    terminal.press("C-c")
    terminal.until(lambda screen: "again leaves" in screen, "question whether to leave")
    terminal.press("C-c")
    terminal.until(lambda screen: "ended with 0" in screen, "end")


def below(screen: str, question: str) -> str:
    """What stands between a question and the line to type in."""
    return screen.partition(question)[2].partition("\n>")[0].strip()
