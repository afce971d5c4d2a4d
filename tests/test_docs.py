"""The pages say what is: links lead somewhere, commands are read by the real parser, settings are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swarm.cli import args
from swarm.cli.args import parse
from swarm.cli.doctor import firewall
from swarm.coordinator import draft_model
from swarm.model import drafts, gguf, routes
from swarm.protocol.config import DEFAULT_API_PORT, DEFAULT_PORT, DEFAULT_SWARM
from swarm.protocol.limits import DRAIN_TIMEOUT_S
from swarm.ring import draft_supply, exclusion, forming, machine, plan
from tests.pages import PAGES, ROOT, Block, blocks, node_words

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SHELL = [(block, command) for block in blocks() for command in block.commands]

OTHER_PROGRAMS = ("curl", "netsh", "sudo ufw", "sudo firewall-cmd", "pip wheel", "pip install", "python -m pip")
"""Commands that the pages name and this project does not define; test_readme.py runs those of the README."""


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.casefold()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_somebodys_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w/])(?:/home/|/root|/tmp/|/Users/|/work/|[A-Z]:\\)[^\s`]*", text)
    assert str(ROOT) not in text


@pytest.mark.parametrize(("block", "command"), SHELL, ids=[command[:60] for _, command in SHELL])
def test_commands_are_read(block: Block, command: str) -> None:
    ours = node_words(command)
    for words in ours:
        assert parse(words, {}, "a question from a pipe").name in args.COMMANDS
    if not ours and block.page.name != "README.md":
        assert command.startswith(OTHER_PROGRAMS), f"what is this? {command}"


def test_commands_in_sentences_are_read() -> None:
    named = [text for page in PAGES for text in re.findall(r"`(python node\.py[^`]*)`", page.read_text("utf-8"))]
    assert named
    for text in named:
        for words in node_words(text):
            parse([word for word in words if word != "…"], {})


def flags(command: str) -> dict[str, str]:
    """From a flag of `command` to its placeholder, as the parser has them."""
    parser = next(
        action.choices[command]
        for action in args._parser()._actions
        if isinstance(action.choices, dict) and command in action.choices
    )
    return {
        action.option_strings[-1]: f"{action.option_strings[-1]} {action.metavar or ''}".rstrip()
        for action in parser._actions
        if action.option_strings[-1:] not in ([], ["--help"])
    }


def test_the_table_of_settings_is_the_parsers() -> None:
    rows = re.findall(r"^\| `(--[^`]+)` \| `(SWARM_\w+)` \| ([^|]*) \|", OPERATIONS, re.MULTILINE)
    assert [flag for flag, _, _ in rows] == list(flags("run").values())
    for flag, variable, default in rows:
        name = flag.split()[0]
        assert variable == f"SWARM_{name.lstrip('-').replace('-', '_').upper()}"
        if name == "--swarm":
            assert default == f"`{DEFAULT_SWARM}`"
        elif name in ("--port", "--api-port"):
            assert default == f"{DEFAULT_PORT if name == '--port' else DEFAULT_API_PORT} or the next free"


def test_every_flag_of_ask_is_named() -> None:
    for flag in flags("ask").values():
        assert f"`{flag}`" in OPERATIONS


def test_every_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the table changes the settings, and so does no other name of the pages."""
    values = {"PORT": "7000", "API_PORT": "7001", "MEMORY": "8GB", "DISK": "50GB", "OPEN": "1", "HEADLESS": "1"}
    values["SPECULATION"] = "off"
    values["ENGINE"] = "stateful"
    for name in re.findall(r"`SWARM_(\w+)` \|", OPERATIONS):
        assert parse([], {f"SWARM_{name}": values.get(name, "something")}).settings != parse([], {}).settings
    for variable in set(re.findall(r"SWARM_\w+", "".join(page.read_text("utf-8") for page in PAGES))):
        assert f"`{variable}` |" in OPERATIONS or variable == "SWARM_TEST_CACHE", variable


def test_firewall_rules_are_the_doctors() -> None:
    page = " ".join(OPERATIONS.split())
    linux = re.findall(r"sudo [^(,]*", firewall("linux", DEFAULT_PORT))
    windows = firewall("win32", DEFAULT_PORT).removesuffix(" (as administrator)").split(" & ")
    assert (len(linux), len(windows)) == (2, 2)
    for command in (*linux, *windows):
        assert command.strip() in page


def test_figures_of_the_page_are_the_codes() -> None:
    page = " ".join(OPERATIONS.split())
    assert f"less {machine.RUNTIME_BYTES // 2**20} MiB for its own runtime" in page
    assert (
        f"less {machine.SYSTEM_SHARE:.0%} of the PC's memory (at least {machine.MIN_SYSTEM_BYTES // 2**20} MiB)" in page
    )
    assert f"at most {machine.MAX_SHARE:.0%} of all" in page
    assert plan.KV_PROMISES == ((4, 4096), (2, 4096), (1, 4096), (1, 2048))
    assert "4 of 4,096 tokens, else 2, else 1, else 1 of 2,048" in page
    assert f"Once the ring has served for {draft_supply.CALM_S:.0f} seconds" in page
    assert f"tried again after {draft_supply.RETRY_S / 60:.0f} minutes" in page
    assert draft_model.ASK_S == 1.0
    assert "A draft that takes over a second" in page
    assert plan.PROMISE_COST == 1.25
    assert "nor more than a quarter of the speed" in page
    assert plan.PROMISE_COST == 1.25
    assert "by over a quarter" in page
    assert f"at most {DRAIN_TIMEOUT_S:.0f} seconds" in page
    assert f"after {exclusion.EXCLUDE_S:.0f} s" in page
    assert f"for {['zero', 'one', 'two', 'three'][int(forming.LOOK_AROUND_S)]} seconds" in page


def test_the_ways_of_a_model_are_the_codes() -> None:
    page = " ".join((ROOT / "docs" / "models.md").read_text(encoding="utf-8").split())
    rows = dict(re.findall(r"\| (OpenVINO IR|GGUF|checkpoint) \| ([^|]*) \|", page))
    assert tuple(re.findall(r"`(\w+)`", rows["GGUF"])) == gguf.ARCHITECTURES
    assert tuple(re.findall(r"`(\w+)`", rows["checkpoint"])) == routes.CHECKPOINT_ARCHITECTURES
    preference = page.partition("the first of ")[2].partition(" in its name")[0]
    assert tuple(re.findall(r"`(\w+)`", preference)) == routes.GGUF_PREFERENCE
    for pair in drafts.PAIRS:
        assert f"| {pair.family} | `{pair.draft}` |" in page


def test_every_room_is_on_the_plan() -> None:
    """docs/architecture.md names every file of the floors that it lists, and no other."""
    rooms = ARCHITECTURE.partition("## The rooms")[2].partition("\n## ")[0]
    for floor in ("model", "engine", "ring", "coordinator"):
        text = rooms.partition(f"**{floor}**")[2].partition("\n**")[0]
        named = set(re.findall(r"`([a-z_]+)`", text)) - {"api", "ui"}
        there = {path.stem for path in (ROOT / "swarm" / floor).glob("*.py")} - {"__init__"}
        assert there - named <= {"tiny", "scratch"}, f"{floor}: not on the page"
        assert named - there == set(), f"{floor}: only on the page"


def test_the_readme_is_short_at_the_top() -> None:
    """What it is, in words, before the first heading, in twenty lines beside the picture."""
    top = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    words = re.sub(r"```.*?```", "", top, flags=re.DOTALL)
    assert len([line for line in words.splitlines() if line.strip()]) <= 20
    assert all(len(line) <= 100 for line in top.splitlines() if line.startswith(" ")), "the picture is 100 columns wide"
