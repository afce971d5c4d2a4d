"""The swarm on one screen: a `Snapshot` and a size in, lines of text out. Pure; the only clock is in the snapshot.

Sections from top to bottom: head, what it waits for, ring, members without a stage, progress, answers, notices. Each
gets at least a line; what room is left is dealt out in that order, so a swarm of 40 still fits a small window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from swarm.protocol.messages import MemberState
from swarm.protocol.plan import Plan
from swarm.protocol.snapshot import Snapshot
from swarm.ui import figures
from swarm.ui.rows import (
    ACCENT,
    BAD,
    GOOD,
    NARROW,
    OWN,
    QUIET,
    TITLE,
    WARNING,
    WIDE,
    Row,
    columns,
    fit,
    groups,
    headings,
    others,
    progress,
    ring,
)

_OPEN = "open: no code, anyone on this network can join"
_MAX_NOTICES = 3

_NOUNS = ("stages", "members", "members at work", "notices")
"""What the sections that may be cut are made of."""

_COMPACT_BELOW = 12
"""Lines: a narrow screen lower than this leaves the model's name and the API out of its head."""

_MEASURE = Console(file=StringIO(), width=80)
"""Text.wrap wants a console for its defaults; nothing is printed on it."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A rich renderable: the snapshot at the console's width, in at most `height` lines (None: all it takes)."""

    snapshot: Snapshot
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from lines(self.snapshot, options.max_width, self.height)


def lines(snapshot: Snapshot, width: int, height: int | None = None) -> list[Text]:
    """The screen's lines, each at most `width` cells, at most `height` of them."""
    plan = shown_plan(snapshot)
    grid = columns(snapshot, plan, width)
    blocks = [ring(snapshot, plan, grid), others(snapshot, plan, grid), progress(snapshot, width)]
    remarks = [plan.note] if plan.note else []
    remarks += snapshot.notices[-_MAX_NOTICES:]
    shortened = [_text(f" {fit(figures.clean(remark), width - 2)}", QUIET) for remark in remarks]
    blocks.append([Row(line, line is shortened[-1]) for line in shortened])
    compact = width < NARROW and height is not None and height < _COMPACT_BELOW
    answers = _answers(snapshot, width)
    counts: list[Text] = []
    if answers and not compact:
        answers += _drafts(snapshot, width)
        counts = _draft_counts(snapshot, width)
    top = [*_head(snapshot, width, compact), *_alert(snapshot, plan, width)]
    rings = groups(plan)
    heading = [headings(grid, rings[0], len(rings) == 1 and rings[0].last == 1)] if rings else []
    room = 10**6 if height is None else height - len(top) - len(heading) - len(answers)
    shares = deal(room, [len(block) for block in blocks])
    shown = [_cut(*block) for block in zip(blocks, shares, _NOUNS, strict=True)]
    spare = room - sum(shares)
    if counts and spare > 0:
        answers += counts
        spare -= 1
    sections = [top, heading + shown[0] + shown[1], shown[2], answers, shown[3]]
    sections = [section for section in sections if section]
    result: list[Text] = []
    for section in sections:
        if result and spare > 0:
            result.append(Text(""))
            spare -= 1
        result.extend(section)
    for line in result:
        line.rstrip()
        line.truncate(width, overflow="crop")
    return result if height is None else result[:height]


def shown_plan(snapshot: Snapshot) -> Plan:
    """The plan in force; before the first, the one that is being prepared."""
    if not snapshot.plan.stages and snapshot.forming is not None:
        return snapshot.forming
    return snapshot.plan


def deal(room: int, wants: Sequence[int]) -> list[int]:
    """Deal `room` lines out to sections that want so many: in turn, two to the first and one to each other."""
    shares = [0] * len(wants)
    while room > 0 and any(share < want for share, want in zip(shares, wants, strict=True)):
        for index, want in enumerate(wants):
            given = min(room, want - shares[index], 1 if index else 2)
            shares[index] += given
            room -= given
    return shares


def _cut(rows: list[Row], share: int, noun: str) -> list[Text]:
    """At most `share` lines, the last saying how many are left out; important ones stay.

    Where there is one line only, it is the important one: the ring's heading counts the rest.
    """
    if len(rows) <= share:
        return [row.line for row in rows]
    if share <= 0:
        return []
    order = sorted(range(len(rows)), key=lambda i: (not rows[i].important, i))
    if share == 1 and rows[order[0]].important:
        return [rows[order[0]].line]
    kept = sorted(order[: share - 1])
    left = sum(not row.heading for index, row in enumerate(rows) if index not in kept)
    more = _text(f"   +{left} more {noun}", QUIET)
    return [*(rows[i].line for i in kept), more]


def _text(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="crop")


def _head(snapshot: Snapshot, width: int, compact: bool) -> list[Text]:
    """Which swarm, which model, which epoch; this PC, its API, the pairing code. Two lines where it is `compact`."""
    epoch = snapshot.plan.epoch.number
    state = Text().append("● ready", GOOD) if snapshot.ready else Text().append("○ not ready", WARNING)
    if width >= NARROW:
        state.append(f", up {figures.duration(snapshot.uptime_s)}", QUIET)
    swarm = Text(" ").append(fit(figures.clean(snapshot.swarm), 24), TITLE)
    model = fit(figures.clean(snapshot.model) or "no model yet", max(8, width - 50 if width >= NARROW else width - 2))
    if width >= NARROW:
        swarm.append(f"  {model}")
    swarm.append(f"  epoch {epoch}" if epoch else "", QUIET)
    first = [_ends(swarm, state, width)]
    node = Text().append(f" {OWN} ", f"bold {ACCENT}").append(fit(figures.clean(snapshot.name), 28))
    api = Text("  ").append(snapshot.api or "API not up yet", "" if snapshot.api else QUIET)
    code = Text().append(_OPEN, f"bold {WARNING}") if snapshot.open else Text().append("pairing code ", QUIET)
    if not snapshot.open:
        code.append(snapshot.code or "none yet", TITLE)
    if compact:
        short = Text().append("open: no code", f"bold {WARNING}") if snapshot.open else code
        return [*first, _ends(node, short, width)]
    if width < NARROW:
        first.append(Text(" ").append(model))
    if node.cell_len + api.cell_len + 2 + code.cell_len <= width:
        return [*first, node.append_text(api).append("  ").append_text(code)]
    return [*first, node.append_text(api), *_wrap(code, width, 2)]


def _ends(left: Text, right: Text, width: int) -> Text:
    """`left` and `right` at the two ends of one line; `left` gives way."""
    room = width - right.cell_len - 3
    if left.cell_len > room:
        left.truncate(room, overflow="ellipsis")
    return left.append(" " * (width - left.cell_len - right.cell_len - 1)).append_text(right)


def _wrap(text: Text, width: int, most: int) -> list[Text]:
    """`text` over at most `most` lines, indented by one cell."""
    wrapped = list(text.wrap(_MEASURE, width - 2))
    kept = wrapped[:most]
    if len(wrapped) > most:
        kept[-1].append(" …")
        kept[-1].truncate(width - 2, overflow="ellipsis")
    return [Text(" ", no_wrap=True, overflow="crop").append_text(line) for line in kept]


def _alert(snapshot: Snapshot, plan: Plan, width: int) -> list[Text]:
    """What stands between this swarm and an answer; a new ring that is being formed."""
    short = missing(snapshot)
    if short:
        return _wrap(Text(short, BAD), width, 4)
    found = []
    if not snapshot.ready:
        reason = figures.clean(snapshot.reason) or "the ring is not formed yet"
        found += _wrap(Text(f"waiting: {reason}", WARNING), width, 2)
    forming = snapshot.forming
    if forming is not None and forming.stages and forming is not plan:
        news = f" forming epoch {forming.epoch.number}: {figures.stages(forming)}"
        found.append(_text(fit(news, width - 1), QUIET))
    return found


def missing(snapshot: Snapshot) -> str:
    """Where the swarm cannot hold the model: how much is missing and what helps. Else empty."""
    plans = [plan for plan in (snapshot.plan, snapshot.forming) if plan is not None]
    if any(plan.stages for plan in plans):
        return ""
    short = max(plan.missing_bytes for plan in plans)
    if short <= 0:
        return ""
    living = [m for m in snapshot.members if m.state is MemberState.ALIVE]
    offered = sum(member.memory_bytes for member in living)
    model = figures.clean(snapshot.model) or "the model"
    pcs = "this PC offers" if len(living) <= 1 else f"{len(living)} PCs offer"
    return (
        f"{figures.size(short)} of memory missing: {model} needs {figures.size(offered + short)}, "
        f"{pcs} {figures.size(offered)}. Start another PC, or give more with --memory."
    )


def _drafts(snapshot: Snapshot, width: int) -> list[Text]:
    """What drafts, and how well: as many figures as there is room for, the most telling first."""
    view = snapshot.speculation
    if not view.enabled:
        return []
    line = Text(" ").append("drafts ", TITLE)
    name = fit(figures.clean(view.draft), 40) if width >= WIDE else "model"
    source = f"{name} and n-gram" if view.draft else "n-gram"
    if view.drafted:
        facts = [f"{view.accepted / view.drafted:.0%} accepted", f"{view.gain:.1f}x plain"]
        facts += [f"K {view.k:.1f}", f"depth {view.depth:.1f}"]
    else:
        facts = ["nothing drafted yet"]
    if width >= NARROW:
        facts.insert(0, source)
    if width >= WIDE and not view.draft and view.no_draft:
        facts.append(figures.clean(view.no_draft))
    return [_listed(line, facts, width)]


def _draft_counts(snapshot: Snapshot, width: int) -> list[Text]:
    """The sums behind `_drafts`, for where there is a line to spare."""
    view = snapshot.speculation
    if not view.drafted:
        return []
    facts = [f"{view.drafted} drafted", f"{view.accepted} accepted", f"{view.rejected} rejected"]
    facts.append(f"{figures.count(view.wasted_rows, 'row')} wasted")
    return [_listed(_text(" " * len(" drafts ")), facts, width)]


def _listed(line: Text, facts: Sequence[str], width: int) -> Text:
    """`line`, and behind it as many of the facts as there is room for."""
    shown = ""
    for fact in facts:
        longer = f"{shown}, {fact}" if shown else f"  {fact}"
        if line.cell_len + cell_len(longer) > width - 1:
            fact = fit(fact, width - 3 - line.cell_len - cell_len(shown))
            shown += f", {fact}" if shown and cell_len(fact) >= 12 else ""
            break
        shown = longer
    return line.append(shown, QUIET)


def _answers(snapshot: Snapshot, width: int) -> list[Text]:
    """Tokens per second now and over the last minute, sessions; what the plan predicted."""
    living = [m for m in snapshot.members if m.state is MemberState.ALIVE]
    sessions = sum(member.sessions for member in living)
    everywhere = sum(member.tokens_per_second for member in living)
    if not snapshot.plan.stages and not any(snapshot.history):
        return []
    line = Text(" ").append("answers", TITLE).append(f"  {figures.tokens_per_second(snapshot.tokens_per_second)}")
    facts = [figures.count(sessions, "session") if sessions else "no sessions"]
    if snapshot.queued:
        facts.insert(0 if width < NARROW else 1, f"{snapshot.queued} in line here")
    if len(living) > 1 and width >= NARROW:
        facts.append(f"{figures.tokens_per_second(everywhere)} in the swarm")
    if width >= WIDE and snapshot.plan.predicted_token_ms > 0:
        facts.append(f"{figures.milliseconds(snapshot.plan.predicted_token_ms)} a token predicted")
    room = min(60 if width >= WIDE else 30, width - line.cell_len - 5 - cell_len(", ".join(facts)))
    if room >= 10 and snapshot.history:
        line.append("  ").append(figures.sparkline(snapshot.history, room), ACCENT)
    return [_listed(line, facts, width)]
