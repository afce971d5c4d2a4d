"""The file by which commands find the node of a home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.cli import running
from swarm.protocol.errors import UsageError

API = "http://127.0.0.1:7480"


def test_announced_and_found(tmp_path: Path) -> None:
    running.announce(tmp_path, API)
    running.announce(tmp_path, API)
    assert running.find(tmp_path) == running.RunningNode(os.getpid(), API)
    running.withdraw(tmp_path)
    running.withdraw(tmp_path)
    with pytest.raises(UsageError, match="no node runs"):
        running.find(tmp_path)


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "node.json").write_text(json.dumps({"pid": gone.pid, "api": API}), encoding="utf-8")
    with pytest.raises(UsageError, match="Start one"):
        running.find(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "api": ""}', '{"pid": null, "api": ""}'])
def test_a_file_of_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="no node runs"):
        running.find(tmp_path)


def test_no_home_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no node runs with the home .*nowhere"):
        running.find(tmp_path / "nowhere")
