"""Numbers as people read them: sizes, rates, times, bars and sparklines. Pure text."""

from __future__ import annotations

import math
import unicodedata
from itertools import pairwise

from swarm.protocol.messages import Phase
from swarm.protocol.plan import Plan
from swarm.protocol.snapshot import MemberView

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_SPARKS = "▁▂▃▄▅▆▇█"
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u2028\u2029")

PHASE_WORDS = {
    Phase.IDLE: "idle",
    Phase.DOWNLOAD: "downloading",
    Phase.CONVERT: "converting",
    Phase.FETCH: "fetching",
    Phase.COMPILE: "compiling",
    Phase.WARM_UP: "warming up",
}

_LONGEST_S = 86_400.0
_STEPS_AT_MOST = 1_000_000


def clean(text: str) -> str:
    """`text` on one line without control characters: names, labels and reasons come from other PCs.

    An escape sequence would take over the terminal, a line end would forge a log line, and a direction mark would
    turn around what follows it.
    """
    kept = (" " if c in "\n\t" else c for c in text if c not in _DIRECTIONS)
    return "".join(c for c in kept if unicodedata.category(c) not in ("Cc", "Cs"))


def _unit(value: float) -> int:
    """Index of the unit in which `value` bytes reads best; 999.6 KB counts as 1.0 MB."""
    index = 0
    while value >= 999.5 and index < len(_UNITS) - 1:
        value /= 1000
        index += 1
    return index


def _scaled(value: float, unit: int) -> str:
    scaled = value / 1000**unit
    return f"{scaled:.1f}" if unit > 1 and scaled < 9.95 else f"{scaled:.0f}"


def size(value: float) -> str:
    """``61 MB``, ``8.0 GB``: powers of 1,000, as `config.parse_size` reads them."""
    unit = _unit(value)
    return f"{_scaled(value, unit)} {_UNITS[unit]}"


def size_of(part: float, whole: float) -> str:
    """``26 of 61 MB``: both in the unit of the larger one."""
    unit = _unit(max(part, whole))
    return f"{_scaled(part, unit)} of {_scaled(whole, unit)} {_UNITS[unit]}"


def milliseconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    if value >= 9_995:
        return f"{value / 1000:.0f} s"
    return f"{value:.0f} ms" if value >= 9.95 else f"{value:.1f} ms"


def duration(seconds: float) -> str:
    """``3 s``, ``12 min``, ``2 h 5 min``, ``3 d``."""
    seconds = max(0.0, seconds)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d"


def count(number: int, one: str, many: str = "") -> str:
    """``1 session``, ``2 sessions``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def tokens_per_second(value: float) -> str:
    return f"{value:.1f} tok/s" if value < 99.95 else f"{value:.0f} tok/s"


def fraction(done: float, total: float) -> float | None:
    """`done` of `total` within 0 to 1; None where the total is not known."""
    return min(1.0, max(0.0, done / total)) if total > 0 else None


def in_bytes(member: MemberView) -> bool:
    """True where a progress counts bytes.

    A conversion counts bytes where the converter knows them and steps where it does not; no count of steps comes
    near a million.
    """
    return member.phase in (Phase.DOWNLOAD, Phase.FETCH) or member.total >= _STEPS_AT_MOST


def amount(member: MemberView) -> str:
    """How far a progress is: ``26 of 61 MB``, ``3 of 10``; without a total what is done, empty for nothing."""
    if in_bytes(member):
        if member.total > 0:
            return size_of(member.done, member.total)
        return size(member.done) if member.done > 0 else ""
    if member.total > 0:
        return f"{member.done} of {member.total}"
    return ""


def speed(member: MemberView) -> str:
    """Rate of a progress: ``12 MB/s``; empty for steps, which nobody counts in a second."""
    return f"{size(member.rate)}/s" if in_bytes(member) and member.rate > 0 else ""


def time_left(member: MemberView) -> str:
    """``3 s left``; empty where it is not known, and where it is days: that is what a stalled line says."""
    seconds = member.seconds_left
    return "" if seconds is None or seconds > _LONGEST_S else f"{duration(seconds)} left"


def bar(part: float, width: int) -> tuple[str, str]:
    """(filled, empty) cells of a progress bar, half a cell exact; together `width` cells."""
    halves = round(min(1.0, max(0.0, part)) * width * 2)
    filled = "━" * (halves // 2) + ("╸" if halves % 2 else "")
    return filled, "─" * (width - len(filled))


def sweep(tick: float, width: int) -> tuple[str, str, str]:
    """(before, lit, after) cells of a bar whose end is not known: a short piece that goes to and fro with `tick`."""
    lit = max(1, width // 5)
    path = width - lit
    step = int(tick * 4) % (2 * path) if path else 0
    at = min(step, 2 * path - step)
    return "─" * at, "━" * lit, "─" * (width - at - lit)


def span(start: int, end: int, total: int, width: int) -> tuple[str, str, str]:
    """(before, own, after) cells of layers ``[start, end)`` out of `total`; at least one cell is own."""
    total = max(total, 1)
    first = min(width - 1, start * width // total)
    last = max(first + 1, round(end * width / total))
    last = min(width, last)
    return "─" * first, "━" * (last - first), "─" * (width - last)


def sparkline(values: tuple[float, ...], width: int) -> str:
    """The newest of `values` at the right; each cell the mean of its share. Zero is the lowest mark."""
    if not values or width <= 0:
        return ""
    cells = min(width, len(values))
    edges = [round(i * len(values) / cells) for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(means)
    if top <= 0:
        return _SPARKS[0] * cells
    return "".join(_SPARKS[min(7, max(0, math.ceil(mean / top * 7)))] for mean in means)


def layers(start: int, end: int) -> str:
    return f"[{start}, {end})"


def stages(plan: Plan) -> str:
    """``PC-1 [0, 10) PC-2 [10, 20) | PC-3 [0, 20)``: a bar between two rings."""
    rings = (" ".join(f"{clean(stage.name)} {layers(stage.start, stage.end)}" for stage in ring) for ring in plan.rings)
    return " | ".join(rings)
