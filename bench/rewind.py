"""Rewinding rejected tokens: by mask, by block table, and by trimming the cache physically (state get and set).

One core, the whole model in one shard. Beside the time of the rewind itself (`physical` is also what a compaction
costs): the first step behind a rejection, which fills up to 15 cells for the alignment; the steps after it, with masked
cells in the cache; and how a step of the stateful engine compares with one of the paged engine.

``python -m bench.rewind [--model qwen|smollm2] [--quick]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import openvino as ov

from bench import models
from bench.report import cores, first_in_line, in_turns, on_core, ratios, report, spread
from swarm.engine import stateful
from swarm.engine.layout import ALIGN
from swarm.engine.paged import PagedEngine
from swarm.engine.pages import use_huge_pages
from swarm.engine.selftest import segment
from swarm.engine.stateful import StatefulEngine
from swarm.model.cut import cut
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard
from swarm.protocol.messages import RowKind

CONTEXTS = (128, 2000)
SHARES = (0.1, 0.25, 0.5)
"""Masked cells over positions held."""

WINDOW = 4
_KV_TOKENS = 8192
_CHUNK = 256


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rewind", description=__doc__)
    parser.add_argument("--model", choices=["qwen", "smollm2"], default="qwen")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="SmolLM2 at a short context, nothing kept")
    arguments = parser.parse_args()
    model = "smollm2" if arguments.quick else arguments.model
    ir = models.qwen_int4() if model == "qwen" else models.smollm2()
    contexts = (256,) if arguments.quick else CONTEXTS
    figures = on_core(cores()[-1], measure, ir, contexts, arguments.first)
    figures["rewind_ms"] = figures[f"rewind_mask_{contexts[-1]}_ms"]
    report("rewind", figures, {"model": model, "window": WINDOW, "first": arguments.first}, keep=not arguments.quick)


def measure(ir: Path, contexts: tuple[int, ...], first: bool) -> dict[str, float]:
    masked, paged = stateful_engine(ir), paged_engine(ir)
    use_huge_pages()  # as a node does
    figures: dict[str, float] = {}
    for context in contexts:
        text = np.random.default_rng(0).integers(100, 2000, 2 * context).tolist()
        for engine in (masked, paged):
            engine.reset()
            for start in range(0, context, _CHUNK):
                engine.run([segment(1, start, text[start : min(start + _CHUNK, context)], 1, RowKind.PREFILL)])
        with first_in_line(first):
            figures |= rewinds(masked, paged, context)
        figures |= steps(masked, paged, context, first)
        figures |= bloat(masked, text, context, first)
    return figures


def rewinds(masked: StatefulEngine, paged: PagedEngine, context: int) -> dict[str, float]:
    """Milliseconds from knowing that a window was rejected to a cache that is ready for the next segment."""
    window = segment(1, context, [100] * WINDOW, 0, RowKind.DECODE)
    (session,) = masked._sessions.values()

    def by_mask() -> float:
        masked.run([window])
        return timed(lambda: masked._reserve([window]))

    def by_table() -> float:
        paged.run([window])
        return timed(lambda: paged._pool.extend(window.session, window.start, window.tokens, window.kind))

    def physical() -> float:
        masked.run([window])
        masked._reserve([window])
        return timed(lambda: masked._compact(session))

    names = {"mask": by_mask, "table": by_table, "physical": physical}
    found = in_turns(names, 7)
    for name, times in found.items():
        print(f"{context} tokens: rewind by {name} {spread(times)} ms", flush=True)
    return {f"rewind_{name}_{context}_ms": statistics.median(times) for name, times in found.items()}


def steps(masked: StatefulEngine, paged: PagedEngine, context: int, first: bool) -> dict[str, float]:
    """A decode step of both engines, and one behind a rejected window: with the cells that are left out."""
    one = segment(1, context, [100])
    (session,) = masked._sessions.values()

    def after_reject() -> float:
        masked.run([segment(1, context, [100] * WINDOW, 0, RowKind.DECODE)])
        return step(masked, context, first)

    def plain() -> float:
        masked._reserve([one])
        masked._compact(session)
        return step(masked, context, first)

    found = in_turns({"stateful": plain, "paged": lambda: step(paged, context, first), "rejected": after_reject})
    against, rejected = ratios(found["paged"], found["stateful"]), ratios(found["rejected"], found["stateful"])
    print(
        f"{context} tokens: stateful {spread(against)} of paged, a step after a rejection {spread(rejected)}",
        flush=True,
    )
    return {
        f"stateful_vs_paged_{context}": statistics.median(against),
        f"step_after_reject_{context}": statistics.median(rejected),
        f"step_stateful_{context}_ms": statistics.median(found["stateful"]),
    }


def bloat(masked: StatefulEngine, text: list[int], context: int, first: bool) -> dict[str, float]:
    """A step with masked cells, over one without, at several shares: two sessions, one of which was rewound often."""
    figures = {}
    clean, filled = _Writer(masked, 2), _Writer(masked, 3)
    for writer in (clean, filled):
        writer.read(text[:context])
    stateful.MASKED_CELLS, bound = 1 << 30, stateful.MASKED_CELLS
    try:
        for share in SHARES:
            filled.reject(text[context:], int(share * context))
            found = in_turns({"clean": partial(clean.step, first), "filled": partial(filled.step, first)})
            found_ratios = ratios(found["filled"], found["clean"])
            print(
                f"{context} tokens: {share:.0%} masked, a step takes {spread(found_ratios)} times as long", flush=True
            )
            figures[f"masked_{share:.0%}_step_{context}".replace("%", "")] = statistics.median(found_ratios)
    finally:
        stateful.MASKED_CELLS = bound
        for writer in (clean, filled):
            writer.close()
    return figures


class _Writer:
    """A session that writes on, token by token."""

    def __init__(self, engine: StatefulEngine, number: int) -> None:
        self._engine = engine
        self._number = number
        self._position = 0

    def read(self, prompt: list[int]) -> None:
        for start in range(0, len(prompt), _CHUNK):
            self._run(prompt[start : start + _CHUNK], RowKind.PREFILL)

    def reject(self, tokens: list[int], masked: int) -> None:
        """Run some `tokens` and rewind, so that `masked` cells in all are left; the next row pays for the gap."""
        session = self._engine._sessions[segment(self._number, 0, [0]).session]
        start = self._position
        self._run(tokens[: max(1, masked - session.layout.masked - ALIGN)], RowKind.PREFILL)
        self._position = start
        self._run([100])

    def step(self, first: bool) -> float:
        """Milliseconds."""
        with first_in_line(first):
            return timed(lambda: self._run([100]))

    def close(self) -> None:
        self._engine.close_session(segment(self._number, 0, [0]).session)

    def _run(self, tokens: list[int], kind: RowKind = RowKind.DECODE) -> None:
        self._engine.run([segment(self._number, self._position, tokens, 1, kind)])
        self._position += len(tokens)


def step(engine: StatefulEngine | PagedEngine, position: int, first: bool) -> float:
    with first_in_line(first):
        return timed(lambda: engine.run([segment(1, position, [100])]))


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def stateful_engine(ir: Path) -> StatefulEngine:
    return StatefulEngine(*whole(ir))


def paged_engine(ir: Path) -> PagedEngine:
    return PagedEngine(*whole(ir))


def whole(ir: Path) -> tuple[Shard, str, int, int, int]:
    """All layers on one thread."""
    model = ov.Core().read_model(ir / "openvino_model.xml")
    vocabulary = model.output(0).get_partial_shape()[2].get_length()
    return Shard(cut(model, 0, map_layers(Graph.of(model)).layers)), "CPU", _KV_TOKENS, vocabulary, 1


if __name__ == "__main__":
    main()
