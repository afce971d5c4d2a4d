"""Who computes what and when: two stages under four users, drawn as a picture.

Both stage workers run in this process, a thread and a core each, on real shards; three users read, then a fourth comes
with a longer prompt. Writes ``docs/timeline.svg``.

``python -m bench.timeline [--model qwen|smollm2] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

import anyio

from bench import models
from bench.report import cores, report
from bench.shards import chain_of
from swarm.engine.base import Engine
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.messages import Drawn, Message, RowKind, Segment
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.sampling import GREEDY
from swarm.ring.worker import StageWorker, Step

PICTURE = Path(__file__).parents[1] / "docs" / "timeline.svg"
KV_TOKENS = 4096
PROMPT, LONG_PROMPT = 24, 120
_NODES = (NodeId("a" * 32), NodeId("b" * 32))
_ASKER = NodeId("c" * 32)
_EPOCH = Epoch(1, _NODES[0])
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
_WIDTH, _MARGIN, _LANE = 1100, 70, 110


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.timeline", description=__doc__)
    parser.add_argument("--model", choices=["qwen", "smollm2"], default="qwen")
    parser.add_argument("--quick", action="store_true", help="a few tokens, no picture kept")
    arguments = parser.parse_args()
    ir = models.qwen_int4() if arguments.model == "qwen" else models.smollm2()
    if len(cores()) < 2:
        raise SystemExit("two stages need two cores")
    ring = _Ring(chain_of(ir, 2, KV_TOKENS).engines)
    tokens = 12 if arguments.quick else 40
    anyio.run(ring.run, tokens)
    drawing = draw(ring.steps)
    if not arguments.quick:
        PICTURE.write_text(drawing, encoding="utf-8", newline="\n")
    busy = [_busy(steps, ring.joined, ring.left) for steps in ring.steps]
    print(f"busy while all four are there: {busy[0]:.0%} and {busy[1]:.0%} of the time")
    figures = {"busy_first": busy[0], "busy_last": busy[1], "steps": float(sum(map(len, ring.steps)))}
    report("timeline", figures, {"model": arguments.model, "tokens": tokens}, keep=not arguments.quick)


class _Ring:
    """Two stage workers that hand each other their messages, and the users."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.steps: tuple[list[Step], list[Step]] = ([], [])
        self.joined = self.left = 0.0
        """From when until when all four are there."""
        stages = tuple(Stage(node, node[0], i, i + 1, "CPU", 0) for i, node in enumerate(_NODES))
        plan = Plan(_EPOCH, None, stages, kv_tokens=KV_TOKENS)
        self._workers = {
            node: StageWorker(node, plan, engine, self._send, steps.append)
            for node, engine, steps in zip(_NODES, engines, self.steps, strict=True)
        }
        self._drawn: dict[SessionId, asyncio.Queue[Drawn]] = {}

    async def run(self, tokens: int) -> None:
        async with anyio.create_task_group() as workers:
            for worker in self._workers.values():
                workers.start_soon(worker.run)
            halfway = anyio.Event()
            async with anyio.create_task_group() as users:
                for user in range(3):
                    users.start_soon(self._read, user, PROMPT, tokens, halfway)
                await halfway.wait()
                self.joined = time.monotonic()
                users.start_soon(self._read, 3, LONG_PROMPT, tokens, anyio.Event())
            workers.cancel_scope.cancel()

    async def _read(self, user: int, prompt: int, tokens: int, halfway: anyio.Event) -> None:
        session = SessionId(f"cccccccc-{user:x}-00000000")
        answers = self._drawn[session] = asyncio.Queue()
        ids = tuple(100 + (user * 37 + number * 13) % 5000 for number in range(prompt))
        segment = Segment(session, _ASKER, _EPOCH, 0, 0, RowKind.PREFILL, ids, 1, GREEDY)
        for number in range(tokens):
            await self._send(_NODES[0], segment)
            drawn = await answers.get()
            if number == tokens // 3:
                halfway.set()
            segment = replace(segment, start=drawn.position, kind=RowKind.DECODE, tokens=drawn.tokens)
        self.left = self.left or time.monotonic()

    async def _send(self, to: NodeId, message: Message) -> None:
        if isinstance(message, Segment):
            await self._workers[to].deliver(message)
        elif isinstance(message, Drawn):
            self._drawn[message.session].put_nowait(message)
        else:
            raise AssertionError(f"not expected here: {message}")


def _busy(steps: Sequence[Step], begun: float, ended: float) -> float:
    """Share of the time between the two in which a forward ran."""
    return sum(max(0.0, min(step.ended, ended) - max(step.began, begun)) for step in steps) / (ended - begun)


@dataclass(frozen=True, slots=True)
class _Scale:
    begun: float
    per_second: float

    def x(self, at: float) -> float:
        return _MARGIN + (at - self.begun) * self.per_second


def draw(stages: Sequence[Sequence[Step]]) -> str:
    """An SVG: a lane for each stage, a box for each step, in it a band for each session, as high as its rows."""
    begun = min(steps[0].began for steps in stages)
    ended = max(steps[-1].ended for steps in stages)
    scale = _Scale(begun, (_WIDTH - _MARGIN - 10) / (ended - begun))
    height = 60 + _LANE * len(stages)
    names = sorted({session for steps in stages for step in steps for session, _, _ in step.rows})
    colours = dict(zip(names, _COLOURS, strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for lane, steps in enumerate(stages):
        top = 34 + lane * _LANE
        parts.append(_text(8, top + 45, f"stage {lane}"))
        parts += [_step(step, top, scale, colours) for step in steps]
    for number, name in enumerate(names):
        left = _MARGIN + number * 100
        parts.append(f'<rect x="{left}" y="10" width="12" height="12" fill="{colours[name]}"/>')
        parts.append(_text(left + 18, 20, f"user {number + 1}"))
    parts.append(_text(_MARGIN + 420, 20, "a box is one forward, divided by rows; hatched: prefill"))
    for tick in range(int((ended - begun) * 2) + 1):
        x = scale.x(begun + tick / 2)
        parts.append(f'<line x1="{x:.1f}" y1="30" x2="{x:.1f}" y2="{height - 22}" stroke="#ccc" stroke-width="0.5"/>')
        parts.append(_text(x, height - 8, f"{tick / 2:g} s", "middle"))
    hatch = '<defs><pattern id="p" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    parts.insert(1, f'{hatch}<rect width="1.5" height="5" fill="white" fill-opacity="0.7"/></pattern></defs>')
    return "\n".join([*parts, "</svg>", ""])


def _step(step: Step, top: int, scale: _Scale, colours: dict[SessionId, str]) -> str:
    left, width = scale.x(step.began), (step.ended - step.began) * scale.per_second
    rows = sum(count for _, _, count in step.rows)
    parts, y = [], float(top)
    for session, kind, count in step.rows:
        high = 80 * count / rows
        box = f'x="{left:.1f}" y="{y:.1f}" width="{max(width - 0.6, 0.4):.1f}" height="{high - 0.5:.1f}"'
        parts.append(f'<rect {box} fill="{colours[session]}"><title>{count} rows</title></rect>')
        if kind is RowKind.PREFILL:
            parts.append(f'<rect {box} fill="url(#p)"/>')
        y += high
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" fill="#333">{escape(text)}</text>'


if __name__ == "__main__":
    main()
