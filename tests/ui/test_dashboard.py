"""The dashboard on a console of fixed size, compared with stored screens.

``SWARM_WRITE_SCREENS=1 pytest tests/ui`` writes them anew: look at the difference before you commit it.
"""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from swarm.protocol.messages import MemberState, Phase
from swarm.protocol.snapshot import Snapshot
from swarm.ui.dashboard import Dashboard, deal, lines, missing
from tests.ui.snapshots import CASES, fetching, member, node_id, nothing_fits, ring, rings, snapshot

SCREENS = Path(__file__).parent / "screens"
SIZES = ((120, 40), (80, 24), (40, 20), (40, 9))


def draw(picture: Snapshot, width: int, height: int) -> str:
    console = Console(file=StringIO(), width=width, height=height, color_system=None, legacy_windows=False)
    console.print(Dashboard(picture, height))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("case", CASES)
def test_screens_are_as_stored(case: str, size: tuple[int, int]) -> None:
    width, height = size
    drawn = draw(CASES[case], width, height)
    stored = SCREENS / f"{case}-{width}x{height}.txt"
    if os.environ.get("SWARM_WRITE_SCREENS"):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(drawn, encoding="utf-8", newline="\n")
    assert drawn == stored.read_text(encoding="utf-8")


names = st.text(max_size=64)


@given(
    width=st.integers(20, 200),
    height=st.integers(4, 60),
    stages=st.integers(0, 12),
    further=st.lists(st.integers(1, 4), max_size=5),
    others=st.lists(st.tuples(names, st.sampled_from(MemberState), st.sampled_from(Phase)), max_size=6),
    total=st.sampled_from([0, 1, 10, 61_000_000]),
    done=st.integers(0, 2**62),
    notices=st.lists(names, max_size=5),
    known=st.booleans(),
)
def test_every_screen_fits_its_size(
    width: int,
    height: int,
    stages: int,
    further: list[int],
    others: list[tuple[str, MemberState, Phase]],
    total: int,
    done: int,
    notices: list[str],
    known: bool,
) -> None:
    members = [member(number) for number in range(1, stages + 1)] if known else []
    members += [
        member(50 + index, name or "?", state=state, phase=phase, label=name, done=done, total=total, rate=1.0)
        for index, (name, state, phase) in enumerate(others)
    ]
    picture = snapshot(
        ready=False,
        reason=" ".join(notices),
        plan=rings(ring(stages, 80), *(ring(count, 80) for count in further)) if stages else nothing_fits(done),
        members=tuple(members),
        notices=tuple(notices),
    )
    drawn = lines(picture, width, height)
    assert len(drawn) <= height
    for line in drawn:
        assert cell_len(line.plain) <= width
        assert "\n" not in line.plain
        assert "\x1b" not in line.plain


def test_a_name_cannot_take_over_the_terminal() -> None:
    picture = snapshot(members=(member(2, "\x1b[2Jevil\nready\u202e"),), plan=ring(1, 4))
    drawn = draw(picture, 80, 24)
    assert "[2Jevil ready" in drawn
    assert "\x1b" not in drawn


def test_the_own_stage_and_the_unwell_ones_stay_when_room_is_short() -> None:
    members = [member(number) for number in range(1, 41)]
    members[30] = member(31, state=MemberState.SUSPECT)
    picture = snapshot(plan=ring(40, 80), node=node_id(20), name="PC-20", members=tuple(members))
    drawn = draw(picture, 80, 12)
    assert "▸ PC-20 " in drawn
    assert "PC-31 " in drawn
    assert "suspect" in drawn
    assert "more" in drawn


def test_without_a_limit_everything_is_shown() -> None:
    drawn = "\n".join(line.plain for line in lines(CASES["forty"], 100))
    assert all(f"PC-{number} " in drawn for number in range(1, 41))
    assert "more" not in drawn


def test_missing_memory_is_said_in_plain_words() -> None:
    text = missing(CASES["missing"])
    assert text.startswith("26 GB of memory missing: Llama-3.3-70B-Instruct needs 50 GB, 3 PCs offer 24 GB.")
    assert "Start another PC" in text


def test_nothing_is_missing_while_a_ring_is_being_formed() -> None:
    assert missing(snapshot(plan=nothing_fits(10**9), forming=ring(2, 10), members=(member(1),))) == ""


def test_members_that_are_gone_show_no_progress() -> None:
    drawn = draw(snapshot(members=(fetching(2, "gone", state=MemberState.DEAD),)), 120, 40)
    assert "dead: connection lost" in drawn
    assert "fetching" not in drawn


@given(st.integers(-3, 40), st.lists(st.integers(0, 12), max_size=5))
def test_lines_are_dealt_fairly(room: int, wants: list[int]) -> None:
    shares = deal(room, wants)
    assert sum(shares) == max(0, min(room, sum(wants)))
    for share, want in zip(shares, wants, strict=True):
        assert share <= want
        assert share == want or share + 1 >= max(shares[1:], default=0)
        assert share == want or 2 * (share + 1) >= shares[0]
