"""Holds docs/protocol.md against the code: every message, tag, field, value and limit, with the right number."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.protocol import limits, messages
from swarm.protocol.codec import encode
from swarm.protocol.config import DEFAULT_PORT
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.messages import MESSAGE_TYPES, DraftOffer, Member, MemberState, Phase, RowKind
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.sampling import SamplingParams
from swarm.protocol.tensors import _DTYPES, Array
from swarm.protocol.version import PROTOCOL_VERSION
from swarm.ring.link import CONTROL

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)[^\n]*\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
RECORDS: tuple[type[Any], ...] = (*MESSAGE_TYPES, Epoch, Stage, Plan, SamplingParams, Member, DraftOffer)
ENUMS = (MemberState, Phase, RowKind)

FOR_PEOPLE = ("MAX_API_", "API_", "MAX_STOP_", "MAX_PROMPT_")
"""Limits of the HTTP API, which no peer meets."""


def rows(text: str) -> list[list[str]]:
    """The cells of a table's body, ticks aside."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def written(hint: Any) -> str:
    """A field's type as the page writes it."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if arm is type(None) else written(arm) for arm in typing.get_args(hint))
    if origin is tuple:
        return f"list of {written(typing.get_args(hint)[0])}"
    return "tensor" if hint == Array else str(hint.__name__)


def default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, (int, float)) else str(value or "empty")


@pytest.mark.parametrize("kind", RECORDS)
def test_fields(kind: type[Any]) -> None:
    hints = typing.get_type_hints(kind)
    expected = [[f.name, written(hints[f.name]), default(f)] for f in dataclasses.fields(kind)]
    table = rows(SECTIONS[kind.__name__])
    assert [row[:3] for row in table] == expected
    assert all(row[3] for row in table), "every field says what it is"


def test_tags() -> None:
    on_page = {name: int(tag) for name, tag in re.findall(r"^### (\w+) \(tag (\d+)\)", PAGE, re.MULTILINE)}
    assert on_page == {kind.__name__: kind.TAG for kind in (*MESSAGE_TYPES, Member)}


def test_nothing_else_is_on_the_page() -> None:
    assert set(SECTIONS) == {kind.__name__ for kind in (*RECORDS, *ENUMS)}
    defined = {kind.__name__ for kind in vars(messages).values() if isinstance(kind, type) and hasattr(kind, "TAG")}
    assert defined <= set(SECTIONS)


@pytest.mark.parametrize("kind", ENUMS)
def test_values(kind: type[IntEnum]) -> None:
    table = rows(SECTIONS[kind.__name__])
    assert [(int(row[0]), row[1]) for row in table] == [(int(value), value.name) for value in kind]
    assert all(row[2] for row in table)


def test_limits() -> None:
    table = rows(PAGE.split("\n## Limits\n")[1].split("\n## ")[0])
    on_page = {name: float(value.replace(",", "")) for name, value, _ in table}
    in_code = {
        name: float(value) for name, value in vars(limits).items() if name.isupper() and not name.startswith(FOR_PEOPLE)
    }
    assert on_page == in_code
    assert all(row[2] for row in table)


def test_the_numbers_in_the_text() -> None:
    assert f"version {PROTOCOL_VERSION}." in PAGE
    assert f"port {DEFAULT_PORT}" in PAGE
    names = {"<f4": "f32", "<f2": "f16", "<i4": "i32", "<i8": "i64"}
    assert "types are " + ", ".join(f"{code} ({names[d.str]})" for code, d in _DTYPES.items()) + "." in PAGE


def test_the_control_lane() -> None:
    sentence = re.search(r"two lanes: (.*?) overtake", PAGE, re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == {kind.__name__ for kind in CONTROL}


def test_the_worked_exchange() -> None:
    names = {**vars(messages), "np": np, "NodeId": NodeId, "SessionId": SessionId}
    exchanges = re.findall(r"^```exchange\n(.*?)\n([0-9a-f\n]+)```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(exchanges) == 6
    for source, frames in exchanges:
        message = eval(source, {"__builtins__": {}}, names)
        assert [bytes(frame).hex() for frame in encode(message)] == frames.split()
