"""How the rows of recent conversations were run: a memory that outlives their caches. Pure.

A row that is decoded and the same row prefilled differ in the last bits, so a turn depends on how the rows of the turn
before were run. Its cache may be gone by then, because others needed the room or because the ring changed, and the
answer must be the same. So a prompt's beginning that is remembered is run as it was the first time, for as long as a
conversation alone would find its cache; afterwards all of a prompt is prefilled.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.coordinator.token_log import TokenLog, common_prefix
from swarm.protocol.messages import RowKind

MAX_POSITIONS = 1 << 20
"""Of all conversations together, five bytes each; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class _History:
    ended: float
    ids: array[int]
    kinds: bytes
    decoded: int
    """Rows before the first that was decoded: what begins with fewer of them is prefilled anyhow."""


class Histories:
    def __init__(self, seconds: float, positions: int = MAX_POSITIONS) -> None:
        """`seconds`: as long as a cache is kept."""
        self._seconds = seconds
        self._most = positions
        self._known: deque[_History] = deque()
        self._positions = 0

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, log: TokenLog, now: float) -> None:
        """A turn ended with `log`. What `log` goes on from is forgotten, and what is too old or too much."""
        kinds = log.kind_bytes()
        decoded = kinds.find(RowKind.DECODE)
        if decoded < 0:
            return
        new = _History(now, array("i", log.ids(0, len(log))), kinds, decoded)
        self._known = deque((*(old for old in self._known if not _goes_on(new, old)), new))
        self._positions = sum(len(one.ids) for one in self._known)
        self._forget(now)

    def kinds(self, prompt: Sequence[int], now: float) -> bytes:
        """How to run the first rows of `prompt`, the longest beginning that is known, by `RowKind`.

        Its last two rows are prefilled always, and so is all behind what is told.
        """
        self._forget(now)
        ids, best = array("i", prompt), b""
        for history in self._known:
            if ids[: history.decoded] != history.ids[: history.decoded]:
                continue
            same = common_prefix(history.ids, ids, max(0, min(len(history.ids), len(ids) - 2)))
            if same >= len(best):
                best = history.kinds[:same]
        return best.rstrip(bytes((RowKind.PREFILL,)))

    def clear(self) -> None:
        """Ids mean something else from now on."""
        self._known.clear()
        self._positions = 0

    def _forget(self, now: float) -> None:
        while self._known and (self._positions > self._most or self._known[0].ended <= now - self._seconds):
            self._positions -= len(self._known.popleft().ids)


def _goes_on(new: _History, old: _History) -> bool:
    """`new` begins with all of `old`, run in the same way."""
    rows = len(old.ids)
    return rows <= len(new.ids) and new.kinds[:rows] == old.kinds and new.ids[:rows] == old.ids
