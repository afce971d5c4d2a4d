"""A small SVG plot of lines: calm, readable in light and in dark, no dependency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 168, 56, 52

_COLOURS = ("#3b7dd8", "#d9822b", "#2a9d6f", "#b0529c", "#8a7a3d", "#6b7280")
"""Of middle lightness: each has enough contrast on white and on near-black."""

_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #374151 }
.title { font-size: 15px; font-weight: 600 }
.note { fill: #6b7280 }
.grid { stroke: #6b7280; stroke-opacity: .22 }
.line { fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round }
.dashed { stroke-dasharray: 5 5; stroke-opacity: .75 }
@media (prefers-color-scheme: dark) { text { fill: #d1d5db } .note { fill: #9ca3af } }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Points ``(x, y)`` in ascending x; `dashed` for a prediction. Lines of one `label` share a colour and a name."""

    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    note: str
    x_name: str
    y_name: str
    lines: Sequence[Line]

    def svg(self) -> str:
        """The whole file."""
        y_ticks = ticks(max(y for line in self.lines for _, y in line.points))
        x_ticks = sorted({x for line in self.lines for x, _ in line.points})
        at = _Scale(x_ticks[0], x_ticks[-1], y_ticks[-1])
        colours = dict(zip(dict.fromkeys(line.label for line in self.lines), _COLOURS, strict=False))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{_STYLE}</style>",
            _text(LEFT, 24, self.title, "title"),
            _text(LEFT, 42, self.note, "note"),
        ]
        for y in y_ticks:
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at.y(y):.1f}" y2="{at.y(y):.1f}"/>')
            parts.append(_text(LEFT - 8, at.y(y) + 4, f"{y:g}", "note", "end"))
        parts += [_text(at.x(x), HEIGHT - BOTTOM + 20, f"{x:g}", "note", "middle") for x in x_ticks]
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, self.x_name, "note", "middle"))
        parts.append(_text(LEFT - 8, TOP - 2, self.y_name, "note", "end"))
        for line in self.lines:
            parts += _line(line, colours[line.label], at)
        parts += _names(self.lines, colours, at)
        return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places."""

    least_x: float
    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.least_x) / ((self.most_x - self.least_x) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.most_y * (HEIGHT - TOP - BOTTOM)


def ticks(most: float) -> list[float]:
    """About five round values from zero to at least `most`."""
    magnitude = 10.0 ** math.floor(math.log10(most / 6))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if most <= 6 * factor * magnitude)
    return [step * i for i in range(math.ceil(most / step) + 1)]


def _line(line: Line, colour: str, at: _Scale) -> list[str]:
    places = [(at.x(x), at.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    kind = "line dashed" if line.dashed else "line"
    drawn = [f'<polyline class="{kind}" stroke="{colour}" points="{path}"/>']
    if not line.dashed:
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y in places]
    return drawn


def _names(lines: Sequence[Line], colours: Mapping[str, str], at: _Scale) -> list[str]:
    """Each at the end of its line, moved apart where two ends are close."""
    ends = {line.label: at.y(line.points[-1][1]) for line in reversed(lines)}
    parts, free = [], -math.inf
    for label, y in sorted(ends.items(), key=lambda end: end[1]):
        free = max(y + 4, free + 17)
        x = WIDTH - RIGHT + 12
        parts.append(f'<text x="{x}" y="{free:.1f}" style="fill:{colours[label]}">{escape(label)}</text>')
    return parts


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
