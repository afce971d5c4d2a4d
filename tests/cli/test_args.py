"""The command line: flags, the environment, what wins; and each bad input as one line with status 2."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.cli import args
from swarm.cli.args import Models, parse
from swarm.cli.main import USAGE_STATUS, main
from swarm.protocol.config import DEFAULT_PORT, DEFAULT_SWARM, Settings
from swarm.protocol.errors import UsageError
from swarm.ring.identity import hold_home

EVERY_FLAG = [
    *("--home", "there", "--model", "m.gguf", "--name", "PC-1", "--memory", "8GB", "--port", "7000"),
    *("--api-port", "7001", "--swarm", "office", "--code", "K7QM-2RXW-9DFT", "--device", "GPU", "--engine", "stateful"),
    "--headless",
    *("--disk", "50GB", "--peer", "pc-2:7420", "--peer", "10.0.0.7", "--interface", "eth0", "--interface", "eth1"),
    *("--draft", "small.gguf", "--speculation", "off"),
]
EVERY_VARIABLE = {
    "SWARM_HOME": "there",
    "SWARM_MODEL": "m.gguf",
    "SWARM_NAME": "PC-1",
    "SWARM_MEMORY": "8GB",
    "SWARM_DISK": "50GB",
    "SWARM_PORT": "7000",
    "SWARM_API_PORT": "7001",
    "SWARM_SWARM": "office",
    "SWARM_CODE": "K7QM-2RXW-9DFT",
    "SWARM_DEVICE": "GPU",
    "SWARM_ENGINE": "stateful",
    "SWARM_HEADLESS": "1",
    "SWARM_PEER": "pc-2:7420, 10.0.0.7",
    "SWARM_INTERFACE": "eth0 eth1",
    "SWARM_DRAFT": "small.gguf",
    "SWARM_SPECULATION": "off",
}
EVERYTHING = Settings(
    home=Path("there").absolute(),
    model="m.gguf",
    name="PC-1",
    memory_bytes=8 * 1000**3,
    disk_bytes=50 * 1000**3,
    port=7000,
    api_port=7001,
    swarm="office",
    code="K7QM-2RXW-9DFT",
    peers=(("pc-2", 7420), ("10.0.0.7", DEFAULT_PORT)),
    interfaces=("eth0", "eth1"),
    device="GPU",
    engine="stateful",
    headless=True,
    draft="small.gguf",
    speculation=False,
)


def test_nothing_is_a_node_with_the_defaults() -> None:
    command = parse([], {})
    assert command.name == "run"
    assert command.settings == Settings(home=platformdirs.user_data_path("swarm", appauthor=False))
    assert command.settings.swarm == DEFAULT_SWARM


@pytest.mark.parametrize("words", [EVERY_FLAG, ["run", *EVERY_FLAG], ["doctor", *EVERY_FLAG]])
def test_every_flag(words: list[str]) -> None:
    assert parse(words, {}).settings == EVERYTHING


def test_every_flag_has_a_variable() -> None:
    assert parse([], EVERY_VARIABLE).settings == EVERYTHING
    assert parse([], {"SWARM_OPEN": "yes"}).settings.open


@pytest.mark.parametrize(("text", "on"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)])
def test_switches_in_the_environment(text: str, on: bool) -> None:
    settings = parse([], {"SWARM_HEADLESS": text, "SWARM_OPEN": text}).settings
    assert (settings.headless, settings.open) == (on, on)


def test_a_flag_wins_over_its_variable_and_leaves_the_others() -> None:
    other = {**EVERY_VARIABLE, "SWARM_NAME": "other", "SWARM_PORT": "1", "SWARM_PEER": "x", "SWARM_INTERFACE": "y"}
    words = ["--name", "PC-1", "--port", "7000", "--peer", "pc-2:7420", "--peer", "10.0.0.7"]
    words += ["--interface", "eth0", "--interface", "eth1"]
    assert parse(words, other).settings == EVERYTHING


def test_an_empty_variable_is_none() -> None:
    assert parse([], dict.fromkeys(EVERY_VARIABLE, "")).settings == parse([], {}).settings


def test_home_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert parse(["--home", "~/swarm"], {}).settings.home == tmp_path / "swarm"


def test_ask() -> None:
    command = parse(["ask", "Why?", "--max-tokens", "5", "--temperature", "0.5", "--seed", "7", "--json"], {})
    assert command.ask is not None
    assert (command.ask.prompt, command.ask.max_tokens, command.ask.seeded, command.ask.json) == ("Why?", 5, True, True)
    assert (command.ask.sampling.temperature, command.ask.sampling.seed) == (0.5, 7)
    plain = parse(["ask", "Why?"], {"SWARM_HOME": "there"})
    assert plain.ask is not None
    assert (plain.ask.sampling.greedy, plain.ask.seeded, plain.ask.max_tokens) == (True, False, None)
    assert plain.settings.home == Path("there").absolute()
    piped = parse(["ask", "-"], {}, "from a pipe").ask
    assert piped is not None
    assert piped.prompt == "from a pipe"


@pytest.mark.parametrize(
    ("words", "models"),
    [
        ([], Models()),
        (["list"], Models("list")),
        (["rm", "SmolLM2"], Models("rm", "SmolLM2")),
        (["pull", "org/name@v1"], Models("pull", "org/name@v1")),
    ],
)
def test_models(words: list[str], models: Models) -> None:
    command = parse(["models", *words, "--home", "there", "--disk", "2GB", "--json"], {})
    assert (command.name, command.models, command.json) == ("models", models, True)
    assert (command.settings.home, command.settings.disk_bytes) == (Path("there").absolute(), 2 * 1000**3)
    assert parse(["models", *words], {"SWARM_DISK": "2GB"}).settings.disk_bytes == 2 * 1000**3


def test_status() -> None:
    assert parse(["status", "--json"], {}).json
    assert not parse(["status"], {}).json


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["ask", "--help"], ["run", "--help"], ["--version"]])
def test_help_and_version_end_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out


@given(
    st.lists(
        st.sampled_from(
            [*EVERY_FLAG, "run", "ask", "status", "models", "rm", "doctor", "--json", "--open", "-", "", "ä\n"]
        )
    )
)
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    with contextlib.suppress(UsageError):
        assert parse(words, {}).name in args.COMMANDS


# --- bad input: one line, status 2, no traceback ----------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, and nothing else in the environment."""
    for name in [*EVERY_VARIABLE, "SWARM_OPEN"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWARM_SWARM", "test of bad input")
    monkeypatch.setenv("SWARM_HEADLESS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "home"


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that somebody listens on, on every address."""
    with socket.create_server(("", 0)) as server:
        yield str(server.getsockname()[1])


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that `words` are refused with."""
    assert main(words) == USAGE_STATUS
    out, err = capsys.readouterr()
    assert not out
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("swarm: ")
    return lines[0]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--model", "no-such-model"], ["no such model", "a .gguf file", "'no-such-model'", "Check the path"]),
        (["--model", "Org/Model"], ["Org/Model is not whole in the offline cache", "HF_HUB_OFFLINE"]),
        (["--port", "0"], ["port out of range", "1 to 65535", "'0'"]),
        (["--port", "65536"], ["port out of range", "'65536'"]),
        (["--api-port", "http"], ["port out of range", "'http'"]),
        (["--memory", "plenty"], ["size", "8GB", "'plenty'"]),
        (["--memory", "0GB"], ["positive", "'0GB'"]),
        (["--engine", "fast"], ["no such engine", "paged or stateful"]),
        (["--device", "TPU"], ["no device 'TPU'", "CPU", "Leave out --device"]),
        (["--interface", "no-such-card"], ["no such interface", "'no-such-card'", "--interface"]),
        (["--code", "1234"], ["not a pairing code", "K7QM-2RXW-9DFT", "'1234'", "on the screen"]),
        (["--code", "K7QM-2RXW-9DFU"], ["not a pairing code"]),
        (["--open", "--code", "K7QM-2RXW-9DFT"], ["--open and --code", "no pairing code"]),
        (["--name", "\t"], ["bad name"]),
        (["--swarm", "a/b"], ["bad name", "'a/b'"]),
        (["--peer", ":7420"], ["cannot read a peer", "HOST:PORT"]),
        (["--peer", "pc-2:0"], ["port out of range"]),
        (["start"], ["unknown command", "run, ask, status, models, doctor", "'start'"]),
        (["--frobnicate"], ["--frobnicate", "--help"]),
        (["--memory"], ["--memory", "--help"]),
        (["status", "--port", "7420"], ["--port", "--help"]),
        (["--disk", "all"], ["size", "8GB", "'all'"]),
        (["models", "show"], ["unknown action of models", "list, rm, pull", "'show'"]),
        (["models", "rm"], ["models rm", "a model"]),
        (["models", "list", "all"], ["models list", "nothing after it", "'all'"]),
        (["models", "rm", "nothing"], ["no model 'nothing' in the store", "there is none"]),
        (["models", "pull", "no-such-model"], ["no such model"]),
        (["models", "--port", "7420"], ["--port", "--help"]),
        (["ask"], ["prompt", "--help"]),
        (["ask", " "], ["empty question", "node.py ask"]),
        (["ask", "Why?", "--max-tokens", "0"], ["--max-tokens", "from 1", "'0'"]),
        (["ask", "Why?", "--temperature", "warm"], ["--temperature", "a number", "'warm'"]),
        (["ask", "Why?", "--temperature", "11"], ["temperature out of range", "0 to 10"]),
        (["ask", "Why?", "--seed", "-1"], ["--seed", "from 0"]),
        (["ask", "Why?"], ["no node runs", "python node.py"]),
        (["status", "--json"], ["no node runs", "python node.py"]),
    ],
)
def test_bad_words(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(words, capsys)
    assert [part for part in parts if part not in line] == []


@pytest.mark.usefixtures("home")
def test_a_bad_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SWARM_MEMORY", "plenty")
    assert "'plenty'" in refusal([], capsys)


@pytest.mark.usefixtures("home")
def test_a_directory_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(["--model", str(tmp_path)], capsys)
    assert "holds no model that can be used; expected an OpenVINO IR" in line
    assert "found no files" in line


@pytest.mark.usefixtures("home")
def test_an_ir_that_is_no_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stem in ("openvino_model", "openvino_tokenizer", "openvino_detokenizer"):
        (tmp_path / f"{stem}.xml").write_text(
            '<net><layers><layer type="Parameter" name="image"/></layers></net>', encoding="utf-8"
        )
        (tmp_path / f"{stem}.bin").write_bytes(b"")
    line = refusal(["--model", str(tmp_path)], capsys)
    assert "is not a language model" in line
    assert "inputs image" in line


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"PK\x03\x04 a zip", bytes(range(256))])
def test_a_broken_gguf(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert "broken.gguf" in refusal(["--model", str(path)], capsys)


@pytest.mark.usefixtures("home")
def test_a_port_in_use(taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(["--open", "--port", taken], capsys)
    assert f"cannot listen on port {taken}" in line
    assert "--port" in line


@pytest.mark.usefixtures("home")
def test_an_api_port_in_use(taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(["--open", "--api-port", taken], capsys)
    assert "the API cannot listen" in line
    assert "--api-port" in line


def test_a_home_in_use(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hold_home(home):
        line = refusal(["--open"], capsys)
    assert str(home) in line
    assert "--home" in line


@pytest.mark.usefixtures("home")
def test_a_home_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")
    assert "--home" in refusal(["--home", str(path)], capsys)
