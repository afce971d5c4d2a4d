"""The command itself: exit statuses, what goes to which stream, one line for every failure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm.cli import client
from swarm.cli.args import Ask
from swarm.cli.main import FAILURE_STATUS, INTERRUPTED_STATUS, USAGE_STATUS, first_error, main, status_lines
from swarm.protocol.config import Settings
from swarm.protocol.errors import SessionError, UsageError
from tests.ui.snapshots import DRAFTING, member, ring, snapshot

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

ROOT = Path(__file__).parents[2]


def node_py(*words: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "node.py"), *map(str, words)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, encoding="utf-8")


def one_line(result: subprocess.CompletedProcess[str], status: int) -> str:
    assert (result.returncode, result.stdout) == (status, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("swarm: ")
    return line


@pytest.mark.parametrize("words", [("ask", "Why?"), ("status",), ("status", "--json")])
def test_where_no_node_runs(tmp_path: Path, words: Sequence[str]) -> None:
    line = one_line(node_py(*words, "--home", tmp_path), USAGE_STATUS)
    assert "no node runs" in line
    assert "python node.py" in line


def test_a_question_on_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(_settings: Settings, request: Ask) -> None:
        asked.append(request.prompt)

    monkeypatch.setattr(client, "ask", ask)
    (tmp_path / "question").write_text("Why is\nthe sky blue?", encoding="utf-8")
    with (tmp_path / "question").open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["ask", "-", "--home", str(tmp_path)]) == 0
    assert asked == ["Why is\nthe sky blue?"]


def test_an_empty_question_on_standard_input(tmp_path: Path) -> None:
    assert "empty question" in one_line(node_py("ask", "-", "--home", tmp_path), USAGE_STATUS)


@pytest.mark.parametrize(
    ("error", "status"),
    [(SessionError("the ring is gone"), FAILURE_STATUS), (UsageError("no"), USAGE_STATUS), (KeyboardInterrupt(), 130)],
)
def test_exit_statuses(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: BaseException,
    status: int,
) -> None:
    async def fail(_settings: Settings) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(client, "status", fail)
    assert main(["status", "--home", str(tmp_path)]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("" if status == INTERRUPTED_STATUS else f"swarm: {error}\n")


def test_status_prints_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {"ready": True, "swarm": "büro"}

    async def status(_settings: Settings) -> dict[str, Any]:
        return found

    monkeypatch.setattr(client, "status", status)
    assert main(["status", "--json", "--home", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_status_for_people() -> None:
    from swarm.api.status import status

    plan = ring(2, 4)
    members = (member(1), member(2), member(3))
    picture = snapshot(plan=plan, members=members, notices=("Mind it.",), speculation=DRAFTING)
    shown = status_lines(status(picture))
    assert shown.splitlines() == [
        "PC-1 in swarm office: ready",
        "model Qwen2.5-Coder-1.5B-Instruct, epoch 3, API http://127.0.0.1:7480",
        "drafts by Qwen2.5-Coder-0.5B-Instruct and n-gram: 76% accepted, 1.6x plain",
        "  layers   0 to   1  PC-1 (CPU)",
        "  layers   2 to   3  PC-2 (CPU)",
        "  alive              PC-3",
        "Mind it.",
    ]


def test_of_several_errors_a_bug_is_shown_first() -> None:
    bug, known = ValueError("bug"), SessionError("known")
    assert first_error(BaseExceptionGroup("", [known, BaseExceptionGroup("", [bug])])) is bug
    assert first_error(BaseExceptionGroup("", [BaseExceptionGroup("", [known])])) is known


def test_version_and_help() -> None:
    assert node_py("--version").stdout.startswith("swarm ")
    result = node_py("run", "--help")
    assert result.returncode == 0
    assert "--memory" in result.stdout
