"""The README's commands, run: in a fresh copy of the project, with only Python, as a reader would.

What is run for real is in `FOR_REAL`; what needs a second PC, a model of the reader's own or another system is in
`ONLY_READ` and goes through the real parser in test_docs.py. A command in neither list fails here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pages import ROOT, blocks

README = ROOT / "README.md"
PYTHON = ".venv/bin/python"
RUN = f"python3 -m venv .venv && .venv/bin/pip install . && {PYTHON} node.py"
TEST = "pip install '.[test]' && python -m pytest"
ASK = f'{PYTHON} node.py ask "What is the capital of France?"'
PIPED = f'echo "Name three fruits." | {PYTHON} node.py ask - --max-tokens 30'
DRAWN = f'{PYTHON} node.py ask "Write a title for a story." --max-tokens 20 --temperature 0.8 --seed 7 --json'
STATUS = f"{PYTHON} node.py status"
CURL = (
    'curl -s http://127.0.0.1:7480/v1/chat/completions -H "Content-Type: application/json" '
    '-d \'{"messages": [{"role": "user", "content": "What is the capital of France?"}]}\''
)
MODELS = "curl -s http://127.0.0.1:7480/v1/models"
OPENAI = ".venv/bin/pip install openai"
DOCTOR = f"{PYTHON} node.py doctor"
FOR_REAL = [RUN, ASK, PIPED, DRAWN, STATUS, f"{STATUS} --json", CURL, MODELS, OPENAI, DOCTOR]

ONLY_READ = [
    # Windows
    *("py -m venv .venv", ".venv\\Scripts\\pip install .", ".venv\\Scripts\\python node.py"),
    # a second PC, or another swarm
    f"{PYTHON} node.py --headless --code K7QM-2RXW-9DFT",
    f"{PYTHON} node.py --code K7QM-2RXW-9DFT --peer 192.168.1.20",
    f"{PYTHON} node.py --open",
    f"{PYTHON} node.py --swarm research",
    # a model of the reader's own
    f"{PYTHON} node.py --model path/to/model.gguf",
    f"{PYTHON} node.py --model path/to/openvino-model",
    # this very run: it is compared with .ci/run
    TEST,
]

READY_TIMEOUT_S = 420.0
COMMAND_TIMEOUT_S = 180.0
LEAVE_TIMEOUT_S = 60.0


def test_every_command_is_run_or_read() -> None:
    commands = [command for block in blocks(README) for command in block.commands]
    assert sorted(commands) == sorted([*FOR_REAL, *ONLY_READ])


def test_ci_calls_the_test_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "pytest" in line][-1] == TEST
    assert lines[-1] == TEST


@dataclass(frozen=True)
class Reader:
    """Somebody with a fresh copy of the project, a home folder without a swarm in it, and a node that runs."""

    folder: Path
    environment: dict[str, str]
    api: str

    def run(self, command: str) -> str:
        """What a command of the README prints. Addresses of the API are those of the reader's own screen."""
        assert any(command in block.text for block in blocks(README)), "not a command of the README"
        done = shell(command.replace("http://127.0.0.1:7480", self.api), self.folder, self.environment)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def shell(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Runs the README's first command, headless for want of a terminal, and stops it by the signal of Ctrl-C."""
    if sys.platform == "win32":
        pytest.skip("the commands for Linux")
    place = tmp_path_factory.mktemp("reader")
    folder = place / "swarm"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=ignored)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    # The user's data folder and a swarm of its own: nothing of this PC's nodes is met. No bytecode: only time.
    environment |= {"XDG_DATA_HOME": str(place / "data"), "SWARM_SWARM": f"readme {os.getpid()}"}
    environment |= {"PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    log = place / "node.log"
    with log.open("wb") as lines:
        process = subprocess.Popen(
            ["bash", "-c", RUN], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=lines, stderr=lines
        )
        try:
            found = until_ready(process, place / "data" / "swarm" / "node.json", log)
            yield Reader(folder, environment, found["api"])
            os.kill(found["pid"], signal.SIGINT)
            assert process.wait(LEAVE_TIMEOUT_S) == 0, log.read_text(encoding="utf-8")
        finally:
            end(process)
    assert not (place / "data" / "swarm" / "node.json").exists()


def until_ready(process: subprocess.Popen[bytes], announced: Path, log: Path) -> dict[str, Any]:
    """The node's process and API, once its log says that it is ready."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8", errors="replace")
        assert process.poll() is None, text
        if "ready on http://" in text and announced.exists():
            found: dict[str, Any] = json.loads(announced.read_text(encoding="utf-8"))
            return found
        time.sleep(0.2)
    raise AssertionError(f"not ready after {READY_TIMEOUT_S:.0f} s:\n{log.read_text(encoding='utf-8')}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing running, whatever failed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    if process.poll() is None:
        process.kill()
    process.wait(LEAVE_TIMEOUT_S)


pytestmark = pytest.mark.timeout(900)


@pytest.mark.model
def test_a_reader_gets_answers(reader: Reader) -> None:
    assert "Paris" in reader.run(ASK)
    assert reader.run(PIPED).strip()
    drawn = json.loads(reader.run(DRAWN))
    assert drawn["text"]
    assert json.loads(reader.run(DRAWN))["text"] == drawn["text"]


@pytest.mark.model
def test_a_reader_sees_the_swarm(reader: Reader) -> None:
    found = json.loads(reader.run(f"{STATUS} --json"))
    assert found["ready"]
    assert found["model"] == "SmolLM2-135M-Instruct"
    assert found["api"] == reader.api
    (member,) = found["members"]
    (stage,) = found["stages"]
    assert found["node"] == {"id": member["id"], "name": member["name"]}
    assert (stage["node"], stage["start"], stage["end"], stage["device"]) == (member["id"], 0, 30, "CPU")
    assert member["state"] == "alive"
    assert member["memory_bytes"] > 0
    assert ": ready" in reader.run(STATUS)


@pytest.mark.model
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_reader_uses_the_api(reader: Reader) -> None:
    assert "Paris" in json.loads(reader.run(CURL))["choices"][0]["message"]["content"]
    assert [card["id"] for card in json.loads(reader.run(MODELS))["data"]] == ["SmolLM2-135M-Instruct"]


@pytest.mark.model
def test_a_reader_uses_the_openai_client(reader: Reader) -> None:
    (program,) = [block.text for block in blocks(README) if block.language == "python"]
    reader.run(OPENAI)
    script = reader.folder / "question.py"
    script.write_text(program.replace("http://127.0.0.1:7480", reader.api), encoding="utf-8")
    done = shell(f"{PYTHON} question.py", reader.folder, reader.environment)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.model
def test_a_reader_asks_the_doctor(reader: Reader) -> None:
    """Its exit status is this machine's matter, not the README's."""
    done = shell(DOCTOR, reader.folder, reader.environment)
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 8
    assert all(line.startswith(("ok  ", "!!  ")) for line in lines)
    for what in ("python", "openvino", "self-test CPU", "memory", "interface", "multicast", "port", "store", "pairing"):
        assert any(line[4:].startswith(what) for line in lines), what
