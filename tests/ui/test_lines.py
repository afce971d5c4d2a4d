"""Headless log lines: what changed, and how far things are."""

from __future__ import annotations

import re
from dataclasses import replace
from io import BytesIO, StringIO, TextIOWrapper
from typing import TextIO

import anyio
import pytest

from swarm.protocol.messages import MemberState, Phase
from swarm.protocol.snapshot import Snapshot
from swarm.ui import lines as module
from swarm.ui.lines import ProgressLog, changes, run_lines
from tests.ui.snapshots import DRAFTING, fetching, member, nothing_fits, ring, snapshot, waiting


def test_the_start_says_who_where_and_how_to_join() -> None:
    first = waiting(members=(member(1),), reason="looking for others")
    assert changes(None, first) == [
        "node PC-1 (00000000) in swarm office",
        "links listen on 192.168.1.10:7420",
        "pairing code 4821-7730",
        "model Qwen2.5-Coder-1.5B-Instruct",
        "waiting: looking for others",
    ]


def test_an_open_swarm_says_so_and_shows_no_code() -> None:
    found = changes(None, snapshot(open=True, code="1234"))
    assert "open: no code, anyone on this network can join" in found
    assert not any("pairing" in line for line in found)


def test_nothing_new_is_nothing_said() -> None:
    picture = snapshot(plan=ring(2, 20), members=(member(1), member(2)), notices=("a", "b"))
    assert changes(picture, replace(picture, uptime_s=picture.uptime_s + 1, tokens_per_second=3.0)) == []


def test_a_ring_forms_and_is_ready() -> None:
    before = waiting(members=(member(1), member(2)))
    forming = replace(before, forming=ring(2, 20))
    assert changes(before, forming) == ["forming epoch 3: PC-1 [0, 10) PC-2 [10, 20)"]
    formed = replace(forming, forming=None, plan=ring(2, 20, note="two PCs"), ready=True, reason="")
    assert changes(forming, formed) == [
        "ring formed, epoch 3: PC-1 [0, 10) PC-2 [10, 20)",
        "plan: two PCs",
        "ready on http://127.0.0.1:7480",
    ]
    lost = replace(formed, ready=False, reason="PC-2 does not answer")
    assert changes(formed, lost) == ["no longer ready: PC-2 does not answer"]


def test_members_come_and_go() -> None:
    start = snapshot(members=(member(1),))
    both = replace(start, members=(member(1), member(2, "print server")))
    assert changes(start, both) == ["found print server (CPU, 8.0 GB)"]
    said = []
    earlier = both
    for state in (MemberState.SUSPECT, MemberState.ALIVE, MemberState.LEAVING, MemberState.LEFT):
        later = replace(earlier, members=(member(1), member(2, "print server", state=state)))
        said += changes(earlier, later)
        earlier = later
    assert said == [
        "print server does not answer: suspect",
        "print server answers again",
        "print server is leaving",
        "print server left",
    ]
    assert changes(earlier, start) == []
    assert changes(both, start) == ["print server is gone"]


def test_only_new_notices_are_said_even_when_old_ones_fall_out() -> None:
    assert changes(snapshot(notices=("a", "b", "c")), snapshot(notices=("b", "c", "d"))) == ["d"]
    assert changes(snapshot(notices=("a",)), snapshot(notices=("a", "a"))) == ["a"]
    assert changes(snapshot(notices=("a", "b")), snapshot(notices=())) == []


def test_a_draft_model_comes_and_goes() -> None:
    before = snapshot(plan=ring(1, 20))
    after = replace(before, speculation=DRAFTING)
    assert changes(before, after) == ["drafts with Qwen2.5-Coder-0.5B-Instruct and n-gram"]
    assert changes(after, replace(after, uptime_s=900.0)) == []
    assert changes(after, before) == ["drafts by n-gram alone"]


def test_missing_memory_is_said_once() -> None:
    short = waiting(plan=nothing_fits(26_000_000_000), members=(member(1),))
    assert any(line.startswith("26 GB of memory missing") for line in changes(None, short))
    assert changes(short, replace(short, uptime_s=9.0)) == []


def test_a_name_cannot_forge_a_line() -> None:
    found = changes(snapshot(), snapshot(members=(member(2, "x\n12:00:00 ready on http://evil"),)))
    assert len(found) == 1
    assert "\n" not in found[0]


def share(part: float, **more: object) -> Snapshot:
    return waiting(members=(fetching(1, done=int(61_000_000 * part), **more),))


def test_progress_is_told_at_the_start_and_then_by_tenths() -> None:
    log = ProgressLog()
    assert log.feed(share(0.0), 0.0) == ["fetching layer 12: 0% of 61 MB at 12 MB/s, 5 s left"]
    assert log.feed(share(0.5), 1.0) == [], "not within two seconds"
    assert log.feed(share(0.05), 3.0) == [], "not for less than a tenth"
    assert len(log.feed(share(0.5), 4.0)) == 1
    assert log.feed(share(0.51), 30.0) == []
    assert len(log.feed(share(0.51), 34.0)) == 1, "silence for half a minute"
    assert len(log.feed(share(0.51, phase=Phase.COMPILE), 34.5)) == 1, "a new phase at once"


def test_progress_of_others_carries_their_name() -> None:
    (line,) = ProgressLog().feed(waiting(members=(fetching(2, "PC-2", total=0, rate=0.0),)), 0.0)
    assert line == "PC-2: fetching layer 12: 26 MB"


async def write_all(pictures: list[Snapshot], out: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the printer until it has written the changes of all `pictures`."""
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    left = iter(pictures)
    written = anyio.Event()

    def look() -> Snapshot:
        picture = next(left, None)
        if picture is None:
            written.set()
        return picture or pictures[-1]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_lines, look, out)
        with anyio.fail_after(10):
            await written.wait()
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_lines_are_written_with_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    await write_all([snapshot(members=(member(1),)), snapshot(members=(member(1), member(2)))], out, monkeypatch)
    assert out.getvalue().endswith(" found PC-2 (CPU, 8.0 GB)\n")
    for line in out.getvalue().splitlines():
        assert re.fullmatch(r"\d\d:\d\d:\d\d \S.*", line)


@pytest.mark.anyio
async def test_a_pipe_that_cannot_spell_a_name_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = BytesIO()
    narrow = TextIOWrapper(raw, encoding="cp1252")
    await write_all([snapshot(name="二号室")], narrow, monkeypatch)
    assert b"node ??? " in raw.getvalue()


@pytest.mark.anyio
async def test_a_closed_pipe_ends_the_printer_and_nothing_else() -> None:
    class Closed(StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    with anyio.fail_after(10):
        await run_lines(snapshot, Closed())
