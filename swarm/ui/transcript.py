"""What was said, wrapped to the window's width and scrolled. No terminal in here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from io import StringIO
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from swarm.ui import figures

MAX_ENTRIES = 2000
"""Older ones are dropped from the screen; the conversation itself keeps them."""

_MARGIN = 2


class Kind(Enum):
    """Who speaks; the value is the style's name."""

    YOU = "you"
    ANSWER = "answer"
    NOTE = "note"
    ERROR = "error"


Line: TypeAlias = tuple[str, str]
"""(style, text) of one line of the window; the text is at most as wide as the window."""


@dataclass(slots=True)
class _Entry:
    kind: Kind
    text: str
    wrapped: list[Line] | None = None
    width: int = 0


class Transcript:
    """Entries, the newest at the end. Shows the end until someone scrolls back, and from there stays where it is."""

    def __init__(self) -> None:
        self.activity = ""
        """What is going on just now; shown behind the last entry."""
        self._entries: deque[_Entry] = deque(maxlen=MAX_ENTRIES)
        self._top: int | None = None
        """First line shown; None follows the end."""
        self._height = 1
        self._width = 80
        self._count = 0

    def add(self, kind: Kind, text: str = "") -> None:
        self._entries.append(_Entry(kind, _clean(text)))

    def extend(self, text: str) -> None:
        """More of the last entry."""
        last = self._entries[-1]
        last.text += _clean(text)
        last.wrapped = None

    def drop_empty(self) -> None:
        """Take the last entry away where nothing came."""
        if self._entries and not self._entries[-1].text.strip():
            self._entries.pop()

    def clear(self) -> None:
        self._entries.clear()
        self._top = None

    @property
    def text_width(self) -> int:
        """Columns that a text has in the last view."""
        return max(1, self._width - _MARGIN)

    def follow(self) -> None:
        """Go to the end and stay there."""
        self._top = None

    @property
    def scrolled(self) -> bool:
        return self._top is not None

    def scroll(self, pages: int) -> None:
        """Pages down, negative up; at the end it follows again. Goes by the size of the last `view`."""
        bottom = max(0, self._count - self._height)
        at = bottom if self._top is None else self._top
        at = max(0, at + pages * max(1, self._height - 1))
        self._top = None if at >= bottom else at

    def view(self, width: int, height: int) -> list[Line]:
        """The lines to show in a window of this size."""
        self._width = width
        lines: list[Line] = []
        for entry in self._entries:
            lines += _wrapped(entry, width)
        if self.activity:
            lines += _wrap(Kind.NOTE, figures.clean(self.activity), width)
        self._count, self._height = len(lines), max(1, height)
        bottom = max(0, len(lines) - height)
        if self._top is not None and self._top >= bottom:
            self._top = None
        first = bottom if self._top is None else self._top
        return lines[first : first + height]


def _clean(text: str) -> str:
    """Line ends stay; what would steer the terminal goes."""
    return "\n".join(figures.clean(line.expandtabs(4)) for line in text.replace("\r\n", "\n").split("\n"))


def _wrapped(entry: _Entry, width: int) -> list[Line]:
    if entry.wrapped is None or entry.width != width:
        entry.wrapped, entry.width = [*_wrap(entry.kind, entry.text, width), ("", "")], width
    return entry.wrapped


_MEASURE = Console(file=StringIO(), width=80)


def _wrap(kind: Kind, text: str, width: int) -> list[Line]:
    """`text` by words into lines; what a person said is marked, everything else indented."""
    room = max(1, width - _MARGIN)
    lines: list[Line] = []
    for paragraph in text.rstrip().split("\n"):
        for piece in Text(paragraph).wrap(_MEASURE, room, overflow="fold"):
            mark = "> " if kind is Kind.YOU and not lines else "  "
            lines.append((kind.value, mark + piece.plain.rstrip()))
    return lines
