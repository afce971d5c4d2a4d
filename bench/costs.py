"""What a forward of each stage costs by its rows, on one core: the table that the simulator predicts from.

Real shards of the target in 1 to 4 stages, each timed by itself, and the draft model whole; a row each of as many
sessions at a short context (the siblings of one window cost the same).

``python -m bench.costs [--quick]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov

from bench import models
from bench.clock import RowCosts
from bench.report import RESULTS, ROUNDS, cores, first_in_line, on_core, report
from swarm.engine.paged import PagedEngine
from swarm.engine.selftest import Chain, segment
from swarm.engine.shortlist import Shortlist
from swarm.model.cut import cut
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard

STAGES = (1, 2, 3, 4)
ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""A single row is padded to two."""
CONTEXT = 128

HEAD_LAYERS = 5
"""What the head of the 1.5B model costs, in layers; a plan divides by measured speed, and this comes near it."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__)
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="SmolLM2 alone, two rounds, nothing kept")
    arguments = parser.parse_args()
    core, quick, rounds = cores()[-1], arguments.quick, 2 if arguments.quick else ROUNDS
    target = models.smollm2() if quick else models.qwen_int4()
    figures: dict[str, float] = {}
    for stages in STAGES:
        measured = on_core(core, measure, target, stages, rounds, arguments.first)
        figures |= {_name(stages, index, rows): ms for index, found in enumerate(measured) for rows, ms in found}
    if not quick:
        draft = models.draft_int4()
        (found,) = on_core(core, measure, draft, 1, rounds, arguments.first, models.shortlist(draft))
        figures |= {_draft_name(rows): ms for rows, ms in found}
    settings = {"context": CONTEXT, "rounds": rounds, "first": arguments.first, "model": target.name}
    report("costs", figures, settings, keep=not quick)


def measure(
    ir: Path, stages: int, rounds: int, first: bool, shortlist: Shortlist | None = None
) -> list[list[tuple[int, float]]]:
    """Of each stage: (rows, median milliseconds)."""
    engines = [stage_engine(ir, index, stages, ROWS[-1] * (CONTEXT + 32), shortlist)[0] for index in range(stages)]
    chain = Chain(engines)
    text: list[int] = np.random.default_rng(0).integers(100, 2000, CONTEXT).tolist()
    for session in range(ROWS[-1]):
        chain.run([segment(session, 0, text)])
    times: list[dict[int, list[float]]] = [{rows: [] for rows in ROWS} for _ in engines]
    for _ in range(rounds + 1):
        for rows in ROWS:
            batch = [segment(session, CONTEXT, text[:1]) for session in range(rows)]
            with first_in_line(first):
                for engine, found in zip(engines, times, strict=True):
                    began = time.perf_counter()
                    outputs = engine.run(batch)
                    found[rows].append((time.perf_counter() - began) * 1000)
                    batch = [replace(one, hidden=output.hidden) for one, output in zip(batch, outputs, strict=True)]
    return [[(rows, statistics.median(found[1:])) for rows, found in one.items()] for one in times]


def stage_engine(
    ir: Path, index: int, stages: int, kv_tokens: int, shortlist: Shortlist | None = None
) -> tuple[PagedEngine, tuple[int, int]]:
    """One stage of `stages` of about equal cost, on one thread, and its layers ``[start, end)``."""
    model = ov.Core().read_model(ir / "openvino_model.xml")
    layers = map_layers(Graph.of(model)).layers
    vocabulary = model.output(0).get_partial_shape()[2].get_length()
    start, end = (min(layers, round((layers + HEAD_LAYERS) * i / stages)) for i in (index, index + 1))
    shard = Shard(cut(model, start, end))
    return PagedEngine(shard, "CPU", kv_tokens, vocabulary, 1, shortlist=shortlist, margins=shortlist is not None), (
        start,
        end,
    )


def kept() -> dict[str, float]:
    """The figures of the last run that was kept."""
    figures: dict[str, float] = json.loads((RESULTS / "costs.json").read_text(encoding="utf-8"))["figures"]
    return figures


def stage_costs(figures: dict[str, float], stages: int) -> list[RowCosts]:
    """Of each stage of a ring of `stages`."""
    return [_table([figures[_name(stages, index, rows)] for rows in ROWS]) for index in range(stages)]


def draft_costs(figures: dict[str, float]) -> RowCosts:
    return _table([figures[_draft_name(rows)] for rows in ROWS])


def _table(milliseconds: Sequence[float]) -> RowCosts:
    return RowCosts(tuple(zip(ROWS, milliseconds, strict=True)))


def _name(stages: int, index: int, rows: int) -> str:
    return f"stage{index + 1}_of_{stages}_rows{rows}_ms"


def _draft_name(rows: int) -> str:
    return f"draft_rows{rows}_ms"


if __name__ == "__main__":
    main()
