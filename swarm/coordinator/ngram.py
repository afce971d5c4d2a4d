"""Drafts without a model: what followed the last time these tokens stood here. Pure.

Prompt lookup (Saxena 2023; LLMA, Yang et al. 2023) with the hash chains of deflate (RFC 1951, section 4): every pair of
neighbours knows where it last stood, every place knows the place before it. A token costs one dictionary entry; a
rewind takes the entries back in order, so that drafted tokens are indexed like certain ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_MATCH = 2
"""Tokens: the length of the keys."""

MAX_MATCH = 8
"""A longer common context tells nothing more."""

CHAIN = 16
"""Places looked at for the longest match, newest first."""

_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Match:
    tokens: tuple[int, ...]
    """What followed there."""
    length: int
    """Tokens of context that are the same, ``MIN_MATCH`` to ``MAX_MATCH``."""


class NgramIndex:
    """A sequence that grows and shrinks at its end, searched by its own last tokens."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._last: dict[tuple[int, int], int] = {}
        """Pair of neighbours to the position of the second, where it stood last."""
        self._before: list[int] = []
        """For each position: where its pair stood the time before."""

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        for token in ids:
            before = _NOWHERE
            if self._ids:
                pair, here = (self._ids[-1], token), len(self._ids)
                before = self._last.get(pair, _NOWHERE)
                self._last[pair] = here
            self._ids.append(token)
            self._before.append(before)

    def truncate(self, length: int) -> None:
        while len(self._ids) > length:
            token, before = self._ids.pop(), self._before.pop()
            if before != _NOWHERE:
                self._last[self._ids[-1], token] = before
            elif self._ids:
                del self._last[self._ids[-1], token]

    def match(self, count: int) -> Match | None:
        """`count` tokens that followed the longest of the newest earlier places with the same last tokens."""
        if not self._ids or count < 1:
            return None
        best, length = _NOWHERE, 0
        place = self._before[-1]
        for _ in range(CHAIN):
            if place == _NOWHERE or length == MAX_MATCH:
                break
            common = self._common(place)
            if common > length:
                best, length = place, common
            place = self._before[place]
        if best == _NOWHERE:
            return None
        # A match that reaches the end of the sequence goes on into its own copy: a repetition is repeated.
        period = len(self._ids) - 1 - best
        return Match(tuple(self._ids[best + 1 + i % period] for i in range(count)), length)

    def _common(self, place: int) -> int:
        """How many tokens up to `place` are the same as the last ones; at least the pair is."""
        length = MIN_MATCH
        while length < min(MAX_MATCH, place + 1) and self._ids[place - length] == self._ids[-1 - length]:
            length += 1
        return length
