"""The rows of the dashboard: one line each for a stage, a member without one, and a progress. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from swarm.protocol.messages import MemberState, Phase
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.snapshot import MemberView, Snapshot
from swarm.ui import figures

ACCENT = "cyan"
GOOD = "green"
WARNING = "yellow"
BAD = "red"
QUIET = "bright_black"
TITLE = "bold"

OWN = "▸"
"""Stands before this PC wherever it is listed."""

WIDE = 100
"""Columns from which everything has room."""

NARROW = 64
"""Columns below which only the essential is shown."""

STATE_WORDS: dict[MemberState, tuple[str, str]] = {
    MemberState.ALIVE: ("", ""),
    MemberState.SUSPECT: ("suspect: no answer", WARNING),
    MemberState.LEAVING: ("leaving", WARNING),
    MemberState.LEFT: ("left", QUIET),
    MemberState.DEAD: ("dead: connection lost", BAD),
}
"""What a state is called on a screen, and its colour."""


_PHASE_WIDTH = max(len(words) for words in figures.PHASE_WORDS.values())


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of a row, cut or filled up to `width` cells."""

    text: str
    width: int
    style: str = ""
    right: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A line, and whether it should stay when there is no room for all."""

    line: Text
    important: bool = False
    heading: bool = False
    """Not one of what the section lists."""


def fit(text: str, width: int) -> str:
    """`text` in at most `width` cells, its end replaced by an ellipsis where it is longer."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""


def join(cells: Sequence[Cell], gap: int) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for index, cell in enumerate(cells):
        shown = fit(cell.text, cell.width)
        pad = " " * (cell.width - cell_len(shown))
        line.append(" " * gap if index else "")
        line.append(pad if cell.right else "")
        line.append(shown, cell.style)
        line.append("" if cell.right else pad)
    return line


@dataclass(frozen=True, slots=True)
class Columns:
    """Widths of the ring's columns; 0 leaves one out. Spares use the same, so that all names stand in one line."""

    track: int
    layers: int
    name: int
    device: int
    memory: int
    step: int
    hop: int
    queue: int
    gap: int

    @property
    def tail(self) -> int:
        """Cells of the timing columns together, where a state's words go instead."""
        shown = [width for width in (self.step, self.hop, self.queue) if width]
        return sum(shown) + self.gap * (len(shown) - 1)


def columns(snapshot: Snapshot, plan: Plan, width: int) -> Columns:
    """Column widths for a screen `width` cells wide: names get what they need, the picture the rest."""
    longest = max((cell_len(figures.clean(member.name)) for member in snapshot.members), default=4)
    longest = max([longest, *(cell_len(figures.clean(stage.name)) for stage in plan.stages)])
    most = plan.stages[-1].end if plan.stages else 0
    range_width = max(len("layers"), len(figures.layers(most, most)))
    if width < NARROW:
        layers, device, memory, step, hop, queue, gap = range_width, 0, 0, 7, 0, 0, 1
        names, tracks = (8, 16), (4, 12)
    elif width < WIDE:
        layers, device, memory, step, hop, queue, gap = range_width, 4, 13, 6, 6, 3, 2
        names, tracks = (10, 20), (6, 24)
    else:
        layers, device, memory, step, hop, queue, gap = range_width, 6, 14, 7, 7, 5, 2
        names, tracks = (12, 28), (12, 40)
    fixed = [w for w in (layers, device, memory, step, hop, queue) if w]
    room = width - 3 - sum(fixed) - gap * (len(fixed) + 1)
    name = max(names[0], min(longest, names[1], room - tracks[0]))
    track = max(0, min(tracks[1], room - name))
    return Columns(track, layers, name, device, memory, step, hop, queue, gap)


@dataclass(frozen=True, slots=True)
class Group:
    """What stands under one heading: a ring; or rings one behind the other in which a single PC holds the model."""

    first: int
    """The first ring's number for people, from 1."""
    last: int
    stages: tuple[Stage, ...]

    @property
    def count(self) -> str:
        return "1 PC each" if self.last > self.first else figures.count(len(self.stages), "stage")

    def label(self, width: int) -> str:
        """In full where that fits."""
        if self.first == self.last:
            return f"ring {self.first}"
        full = f"rings {self.first} to {self.last}"
        return full if len(full) <= width else f"{self.first} to {self.last}"


def groups(plan: Plan) -> list[Group]:
    found: list[Group] = []
    for number, stages in enumerate(plan.rings, 1):
        before = found[-1] if found else None
        if before is not None and len(stages) == 1 and len(before.stages) == before.last - before.first + 1:
            found[-1] = Group(before.first, number, before.stages + stages)
        else:
            found.append(Group(number, number, stages))
    return found


def headings(c: Columns, group: Group, alone: bool) -> Text:
    """Over the first ring: what the columns are. `alone`: there is no other."""
    cells = [
        Cell("ring" if alone else group.label(c.track), c.track, TITLE),
        Cell("layers", c.layers, QUIET),
        Cell(group.count, c.name + 2, QUIET),
        Cell("device", c.device, QUIET) if c.device >= 6 else Cell("dev", c.device, QUIET),
        Cell("memory", c.memory, QUIET, right=True),
        Cell("step", c.step, QUIET, right=True),
        Cell("hop", c.hop, QUIET, right=True),
        Cell("queue" if c.queue >= 5 else "que", c.queue, QUIET, right=True),
    ]
    return _row(cells, c)


def _heading(c: Columns, group: Group) -> Text:
    """Over every further ring."""
    lead = c.track + c.gap + c.layers if c.track else c.layers
    return _row([Cell(group.label(lead), lead, TITLE), Cell(group.count, c.name + 2, QUIET)], c)


def _row(cells: Sequence[Cell], c: Columns) -> Text:
    return Text(" ").append_text(join([cell for cell in cells if cell.width], c.gap))


def _name(name: str, own: bool, c: Columns) -> Cell:
    return Cell(f"{OWN if own else ' '} {figures.clean(name)}", c.name + 2, f"bold {ACCENT}" if own else "")


def _memory(used: int, advertised: int, c: Columns) -> Cell:
    text = figures.size_of(used, advertised) if used and advertised else figures.size(used or advertised)
    return Cell(text, c.memory, BAD if 0 < advertised < used else "", right=True)


def ring(snapshot: Snapshot, plan: Plan, c: Columns) -> list[Row]:
    """The stages of `plan` in ring order; a further ring under its own heading."""
    rows: list[Row] = []
    for group in groups(plan):
        if rows:
            rows.append(Row(_heading(c, group), heading=True))
        rows += _stages(snapshot, group.stages, c)
    return rows


def _stages(snapshot: Snapshot, stages: Sequence[Stage], c: Columns) -> list[Row]:
    total = stages[-1].end
    members = {member.node: member for member in snapshot.members}
    rows = []
    for stage in stages:
        own = stage.node == snapshot.node
        member = members.get(stage.node)
        before, lit, after = figures.span(stage.start, stage.end, total, c.track)
        line = Text(" ")
        line.append(before, QUIET).append(lit, ACCENT if own else "blue").append(after, QUIET)
        line.append(" " * c.gap if c.track else "")
        cells = [
            Cell(figures.layers(stage.start, stage.end), c.layers),
            _name(stage.name, own, c),
            Cell(stage.device, c.device),
            _memory((member and member.resident_bytes) or stage.bytes, member.memory_bytes if member else 0, c),
            *_tail(member, c),
        ]
        line.append_text(join([cell for cell in cells if cell.width], c.gap))
        rows.append(Row(line, own or member is None or member.state is not MemberState.ALIVE))
    return rows


def _tail(member: MemberView | None, c: Columns) -> list[Cell]:
    """Timings; or, in their place, why there are none."""
    if member is None:
        return [Cell(_shorten("gone: not in the swarm", c.tail), c.tail, BAD)]
    words, style = STATE_WORDS[member.state]
    if words:
        return [Cell(_shorten(words, c.tail), c.tail, style)]
    if member.phase is not Phase.IDLE and member.step_ms is None:
        part = figures.fraction(member.done, member.total)
        short = "busy" if part is None else f"{int(part * 100)}%"
        words = figures.PHASE_WORDS[member.phase]
        return [Cell(words if len(words) <= c.tail else short, c.tail, WARNING, right=c.tail < len(words))]
    return [
        Cell(figures.milliseconds(member.step_ms), c.step, right=True),
        Cell(figures.milliseconds(member.hop_ms), c.hop, right=True),
        Cell(str(member.waiting), c.queue, "" if member.waiting else QUIET, right=True),
    ]


def _shorten(words: str, width: int) -> str:
    """The part before the colon where the whole does not fit."""
    return words if len(words) <= width else words.partition(":")[0]


def others(snapshot: Snapshot, plan: Plan, c: Columns) -> list[Row]:
    """Members without a stage, in the ring's columns: spares, newcomers, those that left."""
    staged = {stage.node for stage in plan.stages}
    rows = []
    for member in snapshot.members:
        if member.node in staged:
            continue
        own = member.node == snapshot.node
        words, style = STATE_WORDS[member.state]
        if not words:
            words, style = _role(member, plan), QUIET
        lead = c.track + c.gap + c.layers if c.track else c.layers
        cells = [
            Cell(_shorten(words, lead), lead, style),
            _name(member.name, own, c),
            Cell(member.device, c.device),
            _memory(member.resident_bytes, member.memory_bytes, c) if living(member) else Cell("", c.memory),
            *_trip(member, c),
        ]
        rows.append(Row(_row(cells, c), own or member.state is not MemberState.ALIVE))
    return rows


def _role(member: MemberView, plan: Plan) -> str:
    if member.phase is not Phase.IDLE:
        return figures.PHASE_WORDS[member.phase]
    return "spare" if plan.stages else "no layers yet"


def _trip(member: MemberView, c: Columns) -> list[Cell]:
    if not c.hop or member.round_trip_ms is None or member.state is not MemberState.ALIVE:
        return []
    trip = figures.milliseconds(member.round_trip_ms)
    text = f"{trip} round trip"
    return [Cell(text if len(text) <= c.tail else trip, c.tail, QUIET, right=True)]


def progress(snapshot: Snapshot, width: int) -> list[Row]:
    """One line for each member that downloads, converts, fetches, compiles or warms up."""
    busy = [member for member in snapshot.members if member.phase is not Phase.IDLE and living(member)]
    longest = max((cell_len(figures.clean(member.name)) for member in busy), default=0)
    name = min(longest, 10 if width < NARROW else 20 if width >= WIDE else 14)
    rows = []
    for member in busy:
        own = member.node == snapshot.node
        rows.append(Row(_progress(member, own, name, width, snapshot.uptime_s), own))
    return rows


def living(member: MemberView) -> bool:
    return member.state in (MemberState.ALIVE, MemberState.SUSPECT, MemberState.LEAVING)


def _progress(member: MemberView, own: bool, name: int, width: int, tick: float) -> Text:
    """Who does what, a bar, and in figures how far, how fast and how long still, as far as the width allows."""
    words = figures.PHASE_WORDS[member.phase]
    part = figures.fraction(member.done, member.total)
    percent = Cell("" if part is None else f"{int(part * 100)}%", 4, right=True)
    after = [percent]
    if width < NARROW:
        words_width, gap = _PHASE_WIDTH, 1
        bar_width = max(4, width - 3 - name - words_width - percent.width - 3 * gap)
    else:
        gap, bar_width = 2, 28 if width >= WIDE else 12
        rest = "  ".join(text for text in (figures.speed(member), figures.time_left(member)) if text)
        after += [Cell(figures.amount(member), 14), Cell(rest, 22, QUIET)]
        words_width = width - 3 - name - bar_width - sum(cell.width for cell in after) - 5 * gap
        words_width = max(_PHASE_WIDTH, min(36, words_width))
        if member.label and words_width > _PHASE_WIDTH + 6:
            words = f"{words} {figures.clean(member.label)}"
    style = f"bold {ACCENT}" if own else ""
    line = Text(" ").append_text(join([Cell(OWN if own else " ", 1, style)], 0)).append(" ")
    line.append_text(join([Cell(figures.clean(member.name), name, style), Cell(words, words_width)], gap))
    line.append(" " * gap).append_text(_bar(part, bar_width, tick))
    return line.append(" " if width >= NARROW else "").append_text(join(after, gap))


def _bar(part: float | None, width: int, tick: float) -> Text:
    if part is None:
        before, lit, after = figures.sweep(tick, width)
        return Text().append(before, QUIET).append(lit, ACCENT).append(after, QUIET)
    filled, empty = figures.bar(part, width)
    return Text().append(filled, ACCENT).append(empty, QUIET)
