"""Which cell of a stateful cache holds which position: bookkeeping of one session. Pure.

The cache only grows. A rewind leaves cells behind that nobody looks at any more (they are *masked*), so a position's
cell is its number plus an offset that grows with every rewind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

ALIGN = 16
"""Offsets are multiples of this. Attention sums the weights of a row in lanes, cell modulo lane: where every position
keeps its lane, masked cells only add zeros and the sum stays the same to the last bit. AVX-512 has 16 lanes of f32,
other instruction sets a divisor of it."""


@dataclass(slots=True)
class Layout:
    """Positions ``[0, held)`` in `cells` cells. The first `ALIGN` cells are nobody's: a cache is never empty."""

    held: int = 0
    cells: int = ALIGN
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(first position, offset): positions from there on, up to the next run's first, lie `offset` cells further."""

    @property
    def masked(self) -> int:
        """Cells that nobody looks at, the first `ALIGN` aside."""
        return self.cells - ALIGN - self.held

    def rewind(self, start: int) -> None:
        """Look at positions ``[0, start)`` alone from now on."""
        while self.runs and self.runs[-1][0] >= start:
            self.runs.pop()
        self.held = start

    def append(self, rows: int) -> int:
        """Append positions ``[held, held + rows)``; how many cells are left out before them, for `ALIGN`."""
        gap = (self.held - self.cells) % ALIGN
        offset = self.cells + gap - self.held
        if not self.runs or self.runs[-1][1] != offset:
            self.runs.append((self.held, offset))
        self.held += rows
        self.cells += gap + rows
        return gap

    def compact(self) -> None:
        """As if the positions held had been appended to a new cache."""
        self.cells = ALIGN + self.held
        self.runs = [(0, ALIGN)] if self.held else []

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """(positions, their cells), in order."""
        ends = [first for first, _ in self.runs[1:]]
        for (first, offset), end in zip(self.runs, [*ends, self.held], strict=False):
            yield slice(first, end), slice(first + offset, end + offset)

    def validate_state(self) -> None:
        """Positions are covered once and in order, by cells that rise, each in its position's lane."""
        covered, last = 0, ALIGN - 1
        for positions, cells in self.spans():
            assert positions.start == covered < positions.stop
            assert last < cells.start
            assert cells.start % ALIGN == positions.start % ALIGN
            covered, last = positions.stop, cells.stop - 1
        assert covered == self.held
        assert last < self.cells or not self.held
        assert self.masked >= 0
