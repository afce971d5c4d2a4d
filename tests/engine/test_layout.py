"""The layout of a stateful cache against a plain list of cells."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.engine.layout import ALIGN, Layout


class Cells(RuleBasedStateMachine):
    """Every cell with the position it was made for, None where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = Layout()
        self.cells: list[int | None] = [None] * ALIGN

    @rule(rows=st.integers(1, 40))
    def append(self, rows: int) -> None:
        held = self.layout.held
        gap = self.layout.append(rows)
        assert 0 <= gap < ALIGN
        self.cells += [None] * gap + list(range(held, held + rows))

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.layout.held))
        self.layout.rewind(start)
        self.cells = [cell if cell is not None and cell < start else None for cell in self.cells]

    @rule()
    def compact(self) -> None:
        self.layout.compact()
        self.cells = [None] * ALIGN + [cell for cell in self.cells if cell is not None]

    @invariant()
    def holds(self) -> None:
        self.layout.validate_state()
        assert self.layout.cells == len(self.cells)
        assert self.layout.masked == self.cells.count(None) - ALIGN
        found = {
            position: cells.start + position - positions.start
            for positions, cells in self.layout.spans()
            for position in range(positions.start, positions.stop)
        }
        assert all(cells.stop - cells.start == p.stop - p.start for p, cells in self.layout.spans())
        assert found == {position: cell for cell, position in enumerate(self.cells) if position is not None}


TestLayout = Cells.TestCase
TestLayout.settings = settings(max_examples=100, stateful_step_count=30, derandomize=True, deadline=None)


def test_without_rewinds_nothing_is_left_out() -> None:
    layout = Layout()
    assert [layout.append(rows) for rows in (5, 1, 1, 30)] == [0, 0, 0, 0]
    assert (layout.held, layout.masked, layout.runs) == (37, 0, [(0, ALIGN)])


def test_a_rejected_row_moves_what_follows_by_whole_lanes() -> None:
    layout = Layout()
    layout.append(20)
    layout.rewind(18)
    assert layout.append(1) == ALIGN - 2
    assert list(layout.spans()) == [(slice(0, 18), slice(16, 34)), (slice(18, 19), slice(50, 51))]
