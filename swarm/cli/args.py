"""The command line and its ``SWARM_…`` twins in the environment; pure: texts in, settings out."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import platformdirs

from swarm.protocol.config import (
    DEFAULT_API_PORT,
    DEFAULT_PORT,
    DRAFT_AUTO,
    Settings,
    parse_engine,
    parse_name,
    parse_peer,
    parse_port,
    parse_size,
    parse_switch,
)
from swarm.protocol.errors import UsageError
from swarm.protocol.sampling import SamplingParams
from swarm.protocol.version import SOFTWARE_VERSION

COMMANDS = ("run", "ask", "status", "models", "doctor")
MODEL_ACTIONS = ("list", "rm", "pull")

_DESCRIPTION = """\
A swarm of PCs that together run one language model. Run this on every PC:

    python node.py

Nodes on one network find each other; any of them takes prompts.
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """``ask``: one prompt through the node that runs with a home."""

    prompt: str
    max_tokens: int | None
    sampling: SamplingParams
    seeded: bool
    """A seed was given; otherwise the node draws one where it needs one."""
    json: bool


@dataclass(frozen=True, slots=True)
class Models:
    """``models``: what is in the store, or a change to it."""

    action: str = "list"
    """One of `MODEL_ACTIONS`."""
    target: str = ""
    """A model that is here (``rm``), or what ``--model`` takes (``pull``)."""


@dataclass(frozen=True, slots=True)
class Command:
    """What the person wants."""

    name: str
    settings: Settings
    ask: Ask | None = None
    json: bool = False
    models: Models | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, action=f"See: {self.prog} --help")


def parse(argv: Sequence[str], environ: Mapping[str, str], stdin_prompt: str = "") -> Command:
    """Read a command line; a flag wins over the environment. Raises `UsageError`; ``--help`` exits."""
    words = list(argv)
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help", "--version")):
        if words and not words[0].startswith("-"):
            raise UsageError("unknown command", expected=", ".join(COMMANDS), found=repr(words[0])[:80])
        words.insert(0, "run")
    found = _parser().parse_args(words)
    given = {name: value for name, value in vars(found).items() if value not in (None, [], False)}
    settings = _settings(given, environ)
    ask = _ask(given, stdin_prompt) if found.command == "ask" else None
    models = _models(given) if found.command == "models" else None
    return Command(found.command, settings, ask, bool(given.get("json")), models)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="node.py", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"swarm {SOFTWARE_VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    home = _Parser(add_help=False)
    home.add_argument("--home", metavar="DIR", help="identity, pairing, models and settings of this node")
    disk = _Parser(add_help=False)
    disk.add_argument("--disk", metavar="SIZE", help="what models may take on the disk, such as 50GB (default: all)")
    node = _Parser(add_help=False)
    node.add_argument(
        "--model", metavar="M", help="a directory, a .gguf file, or org/name on Hugging Face (default: built in)"
    )
    node.add_argument(
        "--draft", metavar="M", help="a small model to draft with, as for --model; auto: the one known; none"
    )
    node.add_argument("--speculation", metavar="S", help="on: draft, and verify several tokens at once (default); off")
    node.add_argument("--name", metavar="N", help="how others see this PC (default: its host name)")
    node.add_argument("--memory", metavar="SIZE", help="what the swarm may use here, such as 8GB (default: measured)")
    node.add_argument("--port", metavar="P", help=f"for links between nodes (default: {DEFAULT_PORT} or the next free)")
    node.add_argument(
        "--api-port", metavar="P", help=f"for the HTTP API (default: {DEFAULT_API_PORT} or the next free)"
    )
    node.add_argument("--swarm", metavar="NAME", help="which swarm to join or found (default: swarm)")
    node.add_argument("--code", metavar="CODE", help="the pairing code shown on a PC of the swarm")
    node.add_argument("--open", action="store_true", help="no pairing code: anyone on this network can join")
    node.add_argument("--peer", metavar="HOST:PORT", action="append", help="a node to dial where multicast fails")
    node.add_argument("--interface", metavar="IF", action="append", help="network interface to use (default: chosen)")
    node.add_argument("--device", metavar="D", help="OpenVINO device for inference (default: CPU)")
    node.add_argument("--engine", metavar="E", help="paged or stateful; one for the whole ring (default: paged)")
    node.add_argument("--headless", action="store_true", help="plain log lines instead of the dashboard")
    commands.add_parser("run", parents=[home, disk, node], help="run a node (the default)")
    ask = commands.add_parser("ask", parents=[home], help="ask the swarm through the node that runs here")
    ask.add_argument("prompt", help="the question; - reads it from standard input")
    ask.add_argument("--max-tokens", metavar="N", help="new tokens at most")
    ask.add_argument("--temperature", metavar="T", help="0: always the likeliest token (the default)")
    ask.add_argument("--seed", metavar="S", help="the same seed draws the same answer")
    ask.add_argument("--json", action="store_true", help="print the whole answer with its figures as JSON")
    status = commands.add_parser("status", parents=[home], help="show the swarm as the node that runs here sees it")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    models = commands.add_parser("models", parents=[home, disk], help="list, remove or fetch the models that are here")
    models.add_argument("action", nargs="?", metavar="list|rm|pull", help="what to do (default: list)")
    models.add_argument("target", nargs="?", metavar="MODEL", help="a model of the list (rm), or one to fetch (pull)")
    models.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("doctor", parents=[home, disk, node], help="check this PC: devices, memory, network, store")
    return parser


def _settings(given: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    def text(name: str) -> str | None:
        value = given.get(name, environ.get(f"SWARM_{name.upper()}"))
        return str(value) if value not in (None, "") else None

    def many(name: str) -> list[str]:
        value = given.get(name)
        if isinstance(value, list):
            return [str(item) for item in value]
        return [item for item in environ.get(f"SWARM_{name.upper()}", "").replace(",", " ").split() if item]

    def flag(name: str) -> bool:
        return name in given or environ.get(f"SWARM_{name.upper()}", "").lower() in ("1", "true", "yes", "on")

    home, engine = text("home"), text("engine")
    settings = Settings(
        home=Path(home).expanduser().absolute() if home else platformdirs.user_data_path("swarm", appauthor=False),
        model=text("model"),
        code=text("code"),
        open=flag("open"),
        peers=tuple(parse_peer(peer) for peer in many("peer")),
        interfaces=tuple(many("interface")),
        device=text("device"),
        draft=text("draft") or DRAFT_AUTO,
        engine=parse_engine(engine) if engine else None,
        headless=flag("headless"),
    )
    name, memory, disk, swarm = text("name"), text("memory"), text("disk"), text("swarm")
    port, api_port, speculation = text("port"), text("api_port"), text("speculation")
    settings = replace(
        settings,
        name=parse_name(name) if name else None,
        memory_bytes=parse_size(memory) if memory else None,
        disk_bytes=parse_size(disk) if disk else None,
        swarm=parse_name(swarm) if swarm else settings.swarm,
        port=parse_port(port) if port else None,
        api_port=parse_port(api_port) if api_port else None,
        speculation=parse_switch("--speculation", speculation) if speculation else True,
    )
    if settings.open and settings.code:
        raise UsageError("--open and --code exclude each other", action="An open swarm has no pairing code.")
    return settings


def _ask(given: Mapping[str, object], stdin_prompt: str) -> Ask:
    prompt = str(given.get("prompt", ""))
    if prompt == "-":
        prompt = stdin_prompt
    if not prompt.strip():
        raise UsageError(
            "an empty question", expected="some text", action='Such as: node.py ask "Why is the sky blue?"'
        )
    tokens, temperature, seed = given.get("max_tokens"), given.get("temperature"), given.get("seed")
    sampling = SamplingParams(
        temperature=_number("--temperature", str(temperature)) if temperature is not None else 0.0,
        seed=_count("--seed", str(seed), 0) if seed is not None else 0,
    )
    most = _count("--max-tokens", str(tokens), 1) if tokens is not None else None
    return Ask(prompt, most, sampling, seed is not None, bool(given.get("json")))


def _models(given: Mapping[str, object]) -> Models:
    action, target = str(given.get("action", "list")), str(given.get("target", ""))
    if action not in MODEL_ACTIONS:
        raise UsageError("unknown action of models", expected=", ".join(MODEL_ACTIONS), found=repr(action)[:80])
    if (action == "list") == bool(target):
        expected = "nothing after it" if action == "list" else "a model"
        raise UsageError(f"cannot read models {action}", expected=expected, found=repr(target)[:80])
    return Models(action, target)


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"cannot read {flag}", expected="a number", found=repr(text)[:80]) from None


def _count(flag: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise UsageError(f"cannot read {flag}", expected=f"a whole number from {least}", found=repr(text)[:80])
    return value
