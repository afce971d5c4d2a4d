"""The fenced blocks of the project's Markdown pages, for the tests that hold them against the code."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELLS = ("sh", "bat")


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block; none of another."""
        return [line for line in self.text.splitlines() if line.strip()] if self.language in _SHELLS else []


def blocks(*pages: Path) -> list[Block]:
    """In order, of `pages` or of all."""
    return [
        Block(page, language, text)
        for page in pages or PAGES
        for language, text in _FENCE.findall(page.read_text(encoding="utf-8"))
    ]


def node_words(command: str) -> list[list[str]]:
    """What follows ``node.py`` in each part of a shell line, as the program gets it."""
    found: list[list[str]] = []
    for part in re.split(r"\s(?:&&|\|)\s", command):
        words = shlex.split(part.replace("\\", "/"))
        for index, word in enumerate(words[:3]):
            if word == "node.py":
                found.append(words[index + 1 :])
    return found
