"""Headless: what changes in the swarm, as plain log lines.

`changes` compares two snapshots; `ProgressLog` says how far the members are, not too often; both are pure. `run_lines`
reads the clock and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

import anyio

from swarm.protocol.ids import NodeId
from swarm.protocol.messages import MemberState, Phase
from swarm.protocol.snapshot import MemberView, Snapshot
from swarm.ui import figures
from swarm.ui.dashboard import missing

_LOOK_S = 0.5
"""Between two looks at the swarm."""

_PROGRESS_S = 2.0
"""A member's progress is told at most this often, and only"""

_PROGRESS_SHARE = 0.1
"""… when this much of the whole is new,"""

_PROGRESS_SILENCE_S = 30.0
"""… or when nothing was said of it for this long."""


def changes(old: Snapshot | None, new: Snapshot) -> list[str]:
    """The events between two snapshots, one line each; `old` is None at the start. Progress is left out."""
    return [
        *_identity(old, new),
        *_members(old, new),
        *_notices(old, new),
        *_ring(old, new),
        *_drafts(old, new),
        *_readiness(old, new),
    ]


def _identity(old: Snapshot | None, new: Snapshot) -> list[str]:
    found = []
    if old is None:
        found.append(f"node {figures.clean(new.name)} ({new.node[:8]}) in swarm {figures.clean(new.swarm)}")
    if new.addresses and (old is None or old.addresses != new.addresses):
        found.append(f"links listen on {', '.join(figures.clean(address) for address in new.addresses)}")
    if new.open and (old is None or not old.open):
        found.append("open: no code, anyone on this network can join")
    if new.code and not new.open and (old is None or old.code != new.code):
        found.append(f"pairing code {new.code}")
    if new.model and (old is None or old.model != new.model):
        found.append(f"model {figures.clean(new.model)}")
    return found


_STATE_LINES = {
    MemberState.ALIVE: "answers again",
    MemberState.SUSPECT: "does not answer: suspect",
    MemberState.LEAVING: "is leaving",
    MemberState.LEFT: "left",
    MemberState.DEAD: "is dead: connection lost",
}


def _members(old: Snapshot | None, new: Snapshot) -> list[str]:
    before = {member.node: member for member in old.members} if old else {}
    found = []
    for member in new.members:
        name, earlier = figures.clean(member.name), before.pop(member.node, None)
        if earlier is None:
            if member.node != new.node and member.state is MemberState.ALIVE:
                found.append(f"found {name} ({member.device}, {figures.size(member.memory_bytes)})")
        elif earlier.state is not member.state:
            found.append(f"{name} {_STATE_LINES[member.state]}")
    gone = (MemberState.LEFT, MemberState.DEAD)
    found += [f"{figures.clean(member.name)} is gone" for member in before.values() if member.state not in gone]
    return found


def _notices(old: Snapshot | None, new: Snapshot) -> list[str]:
    """Those added at the end; the list may have lost some at its front."""
    known = old.notices if old else ()
    overlap = next(
        n for n in range(min(len(known), len(new.notices)), -1, -1) if known[len(known) - n :] == new.notices[:n]
    )
    return [figures.clean(notice) for notice in new.notices[overlap:]]


def _ring(old: Snapshot | None, new: Snapshot) -> list[str]:
    found = []
    forming = new.forming
    if (
        forming is not None
        and forming.stages
        and (old is None or old.forming is None or old.forming.epoch != forming.epoch)
    ):
        found.append(f"forming epoch {forming.epoch.number}: {figures.stages(forming)}")
    if new.plan.stages and (old is None or old.plan.epoch != new.plan.epoch):
        found.append(f"ring formed, epoch {new.plan.epoch.number}: {figures.stages(new.plan)}")
        if new.plan.note:
            found.append(f"plan: {figures.clean(new.plan.note)}")
    short = missing(new)
    if short and (old is None or missing(old) != short):
        found.append(short)
    return found


def _drafts(old: Snapshot | None, new: Snapshot) -> list[str]:
    draft = new.speculation.draft
    if draft == (old.speculation.draft if old else ""):
        return []
    return [f"drafts with {figures.clean(draft)} and n-gram" if draft else "drafts by n-gram alone"]


def _readiness(old: Snapshot | None, new: Snapshot) -> list[str]:
    if new.ready:
        if old is None or not old.ready or old.api != new.api:
            return [f"ready on {new.api}" if new.api else "ready"]
        return []
    if old is not None and not old.ready and old.reason == new.reason:
        return []
    reason = figures.clean(new.reason) or "the ring is not formed yet"
    return [f"no longer ready: {reason}" if old is not None and old.ready else f"waiting: {reason}"]


class ProgressLog:
    """Which progress is worth a line now."""

    def __init__(self) -> None:
        self._told: dict[NodeId, tuple[Phase, str, float, float]] = {}
        """What was told last of a member: its phase, label, share and the time."""

    def feed(self, snapshot: Snapshot, now: float) -> list[str]:
        """Lines for what members do, `now` in seconds of any steady clock."""
        gone = (MemberState.DEAD, MemberState.LEFT)
        busy = [m for m in snapshot.members if m.phase is not Phase.IDLE and m.state not in gone]
        found = [_progress(m, m.node == snapshot.node) for m in busy if self._worth(m, now)]
        kept = {member.node for member in busy}
        self._told = {node: told for node, told in self._told.items() if node in kept}
        return found

    def _worth(self, member: MemberView, now: float) -> bool:
        share = figures.fraction(member.done, member.total) or 0.0
        told = self._told.get(member.node)
        if told is not None:
            phase, label, last, at = told
            silent = now - at
            new = phase is not member.phase or (label != member.label and not member.total)
            grown = share - last >= _PROGRESS_SHARE or share < last or (share == 1.0 and last < 1.0)
            if not new and not (silent >= _PROGRESS_S and grown) and silent < _PROGRESS_SILENCE_S:
                return False
        self._told[member.node] = (member.phase, member.label, share, now)
        return True


def _progress(member: MemberView, own: bool) -> str:
    """``fetching layer 12: 43% of 61 MB at 12 MB/s, 3 s left``; other members with their name before it."""
    what = " ".join(t for t in (figures.PHASE_WORDS[member.phase], figures.clean(member.label)) if t)
    part = figures.fraction(member.done, member.total)
    facts = []
    if part is not None:
        whole = figures.size(member.total) if figures.in_bytes(member) else figures.count(member.total, "step")
        facts.append(f"{int(part * 100)}% of {whole}")
    elif figures.amount(member):
        facts.append(figures.amount(member))
    if facts and figures.speed(member):
        facts[0] += f" at {figures.speed(member)}"
    if figures.time_left(member):
        facts.append(figures.time_left(member))
    line = f"{what}: {', '.join(facts)}" if facts else what
    return line if own else f"{figures.clean(member.name)}: {line}"


async def run_lines(snapshot: Callable[[], Snapshot], out: TextIO | None = None) -> None:
    """Write what happens until cancelled, each line with the time of day; `out` is stdout where it is not given.

    Returns only where nobody reads any more.
    """
    stream = sys.stdout if out is None else out
    old: Snapshot | None = None
    progress = ProgressLog()
    while True:
        new = snapshot()
        found = [*changes(old, new), *progress.feed(new, anyio.current_time())]
        old = new
        if found:
            text = "".join(f"{datetime.now():%H:%M:%S} {line}\n" for line in found)
            try:
                # In a thread: a reader that pauses, such as a pager, must not stop the node.
                await anyio.to_thread.run_sync(_write, stream, text, abandon_on_cancel=True)
            except OSError:
                return
        await anyio.sleep(_LOOK_S)


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    # A pipe on Windows may speak cp1252: a name it cannot spell must not end the node.
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
