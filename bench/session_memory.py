"""What a session costs in memory: the whole model on one core, paged and stateful, sessions of one length.

Resident bytes as the process grows by one session after another, each with a prompt of its own, and the KV bytes that
the model's shape says. A node with a share of the layers holds that share of it.

``python -m bench.session_memory [--model qwen|smollm2] [--quick]``
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
from pathlib import Path

import numpy as np
import openvino as ov
import psutil

from bench import models
from bench.report import cores, on_core, report, spread
from swarm.engine.kinds import make_engine
from swarm.engine.selftest import segment
from swarm.model.cut import cut
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard
from swarm.protocol.config import PAGED, STATEFUL

CONTEXT = 1024
"""Positions of each session."""

SESSIONS = 8
_CHUNK = 256


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.session_memory", description=__doc__)
    parser.add_argument("--model", choices=["qwen", "smollm2"], default="qwen")
    parser.add_argument("--quick", action="store_true", help="three short sessions, nothing kept")
    arguments = parser.parse_args()
    ir = models.qwen_int4() if arguments.model == "qwen" else models.smollm2()
    sessions, context = (3, 2 * _CHUNK) if arguments.quick else (SESSIONS, CONTEXT)
    figures: dict[str, float] = {}
    for kind in (PAGED, STATEFUL):
        grown, at_rest, kv = on_core(cores()[-1], measure, ir, kind, sessions, context)
        print(f"{kind}: a session of {context} tokens takes {spread([b / 2**20 for b in grown])} MiB")
        figures[f"{kind}_session_mb"] = statistics.median(grown) / 2**20
        figures[f"{kind}_kv_mb"] = kv / 2**20
        figures[f"{kind}_at_rest_mb"] = at_rest / 2**20
    settings = {"model": arguments.model, "context": context, "sessions": sessions}
    report("session_memory", figures, settings, keep=not arguments.quick)


def measure(ir: Path, kind: str, sessions: int, context: int) -> tuple[list[float], float, float]:
    """(bytes by which the process grew with each session, its bytes without any, KV bytes of a session by shape)."""
    model = ov.Core().read_model(ir / "openvino_model.xml")
    layers = map_layers(Graph.of(model)).layers
    vocabulary = model.output(0).get_partial_shape()[2].get_length()
    shard = Shard(cut(model, 0, layers))
    engine = make_engine(kind, shard, "CPU", (sessions + 1) * (context + 64), vocabulary, threads=1)
    random, resident = np.random.default_rng(0), []
    for session in range(sessions + 1):
        ids = random.integers(100, min(vocabulary, 10_000), context).tolist()
        for start in range(0, context, _CHUNK):
            engine.run([segment(session, start, ids[start : start + _CHUNK])])
        gc.collect()
        # The first session comes with what a forward of this size works in.
        resident.append(float(psutil.Process().memory_info().rss))
    grown = [later - earlier for earlier, later in itertools.pairwise(resident)]
    return grown, resident[0], kv_bytes(ir, context)


def kv_bytes(ir: Path, context: int) -> float:
    """Of a session in f16: a key and a value for each layer, head and position."""
    states = ov.Core().read_model(ir / "openvino_model.xml").get_variables()
    sizes = [state.get_info().data_shape for state in states if len(state.get_info().data_shape) == 4]
    return sum(size[1].get_length() * size[3].get_length() for size in sizes) * 2.0 * context


if __name__ == "__main__":
    main()
