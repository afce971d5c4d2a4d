"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.messages import Phase
from swarm.ui import figures
from tests.ui.snapshots import fetching, member, ring, rings


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1.0 MB"), (61_000_000, "61 MB"), (8e9, "8.0 GB"), (12.34e12, "12 TB")],
)
def test_sizes(value: float, text: str) -> None:
    assert figures.size(value) == text


def test_sizes_of_a_pair_share_the_unit() -> None:
    assert figures.size_of(26_000_000, 61_000_000) == "26 of 61 MB"
    assert figures.size_of(400_000_000, 8_000_000_000) == "0.4 of 8.0 GB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (3.4, "3 s"), (99.4, "99 s"), (720, "12 min"), (7500, "2 h 5 min"), (7200, "2 h"), (3e5, "3 d")],
)
def test_durations(seconds: float, text: str) -> None:
    assert figures.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.82, "0.8 ms"), (31.2, "31 ms"), (12_000, "12 s"), (float("inf"), "")]
)
def test_milliseconds(value: float | None, text: str) -> None:
    assert figures.milliseconds(value) == text


def test_a_fetch_has_amount_rate_and_time_left() -> None:
    one = fetching(2)
    assert (figures.amount(one), figures.speed(one), figures.time_left(one)) == ("26 of 61 MB", "12 MB/s", "3 s left")


def test_a_compile_counts_steps_and_an_unknown_total_shows_what_is_done() -> None:
    compiling = member(1, phase=Phase.COMPILE, done=3, total=10, rate=0.5)
    assert (figures.amount(compiling), figures.speed(compiling)) == ("3 of 10", "")
    assert figures.amount(fetching(1, total=0)) == "26 MB"
    assert figures.time_left(fetching(1, rate=0)) == ""
    assert figures.time_left(fetching(1, rate=53)) == "", "days: nothing that anybody waits for"


@given(st.floats(-1, 2), st.integers(1, 60))
def test_bars_have_their_width(part: float, width: int) -> None:
    assert len("".join(figures.bar(part, width))) == width
    assert len("".join(figures.sweep(abs(part) * 100, width))) == width


def test_bars_are_half_a_cell_exact() -> None:
    assert figures.bar(0.5, 4) == ("━━", "──")
    assert figures.bar(0.375, 4) == ("━╸", "──")


@given(st.integers(1, 200), st.integers(1, 60), st.data())
def test_a_span_has_its_width_and_is_seen(total: int, width: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(start + 1, total))
    before, own, after = figures.span(start, end, total, width)
    assert own
    assert len(before + own + after) == width


def test_sparklines_show_the_highest_at_the_top() -> None:
    assert figures.sparkline((0.0, 1.0, 2.0, 4.0), 4) == "▁▃▅█"
    assert figures.sparkline((0.0, 0.0), 8) == "▁▁"
    assert figures.sparkline((), 8) == ""
    assert len(figures.sparkline(tuple(float(i) for i in range(60)), 13)) == 13


def test_clean_keeps_letters_and_drops_what_steers() -> None:
    assert figures.clean("Büro 二 ☕\t1") == "Büro 二 ☕ 1"
    assert figures.clean("a\x1b[31mb\x9bc\u202ed\ud800") == "a[31mbcd"


def test_rings_are_told_apart_in_a_line() -> None:
    assert figures.stages(rings(ring(2, 20), ring(1, 20))) == "PC-1 [0, 10) PC-2 [10, 20) | PC-3 [0, 20)"
