"""What the ``beam_idx`` Gather before each cache brings: the exporter's graph with and without it, on one core.

Speeds are compared where both compute at all. The CPU plugin of openvino 2026.4 does not without the Gather: an empty
cache is one of batch 0 to it, and so are the logits.

``python -m bench.beam_idx [--quick]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov

from bench import models
from bench.report import cores, in_turns, on_core, ratios, report, spread
from swarm.engine.devices import profile
from swarm.model.cells import gather_beams
from swarm.protocol.tensors import Array
from tests.model.beams import without_beams

CONTEXTS = (128, 2000)
STEPS = 8
"""Tokens decoded in a turn."""

_CHUNK = 256


class Decoder:
    """A stateful model as its exporter wrote it, decoding one token after the other."""

    def __init__(self, model: ov.Model) -> None:
        settings = {**profile("CPU").properties, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32, "INFERENCE_NUM_THREADS": 1}
        self.compiled = ov.Core().compile_model(model, "CPU", settings)
        self._request = self.compiled.create_infer_request()
        self._names = {name for port in self.compiled.inputs for name in port.get_names()}
        self._held = 0

    @property
    def fused(self) -> int:
        """Attention nodes that the plugin runs as one."""
        kinds = [node.get_rt_info()["layerType"] for node in self.compiled.get_runtime_model().get_ops()]
        return kinds.count("ScaledDotProductAttention")

    def feed(self, ids: Array) -> int:
        """How many rows of logits came of these ids: as many, where the model is in order."""
        end = self._held + len(ids)
        values: dict[str, Array] = {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self._held, end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        logits = self._request.infer({name: values[name] for name in self._names})[0]
        self._held = end
        rows: int = logits.shape[0] * logits.shape[1]
        return rows

    def decode(self) -> float:
        """Milliseconds a token."""
        began = time.perf_counter()
        for _ in range(STEPS):
            self.feed(np.array([100], np.int64))
        return (time.perf_counter() - began) * 1000 / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.beam_idx", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short context, nothing kept")
    quick = parser.parse_args().quick
    figures = on_core(cores()[-1], measure, models.smollm2(), (64,) if quick else CONTEXTS)
    report("beam_idx", figures, {"model": "smollm2", "steps": STEPS}, keep=not quick)


def measure(ir: Path, contexts: tuple[int, ...]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for context in contexts:
        parties = {"with": decoder(ir, True), "without": decoder(ir, False)}
        ids = np.random.default_rng(0).integers(100, 2000, context)
        working: dict[str, Callable[[], float]] = {}
        for name, party in parties.items():
            rows = sum(party.feed(ids[start : start + _CHUNK]) for start in range(0, context, _CHUNK))
            figures |= {f"fused_{name}": party.fused, f"rows_{name}_{context}": rows}
            print(f"{name}: {party.fused} fused attention nodes, {rows} rows of logits of {context} tokens", flush=True)
            if rows == context:
                working[name] = party.decode
        found = in_turns(working)
        figures |= {f"{name}_{context}_tokens_per_second": 1000 / statistics.median(found[name]) for name in found}
        if len(found) == 2:
            gains = ratios(found["without"], found["with"])
            print(f"{context} tokens of context: {spread(gains)} times as fast with the Gather", flush=True)
            figures[f"beam_idx_gain_{context}"] = statistics.median(gains)
    return figures


def decoder(ir: Path, beams: bool) -> Decoder:
    model = without_beams(ov.Core().read_model(ir / "openvino_model.xml"))
    if beams:
        gather_beams(model)
    return Decoder(model)


if __name__ == "__main__":
    main()
