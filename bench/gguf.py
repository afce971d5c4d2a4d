"""A GGUF in our engine before and after its 8-bit weights are rewritten: speed on one core, and perplexity.

``python -m bench.gguf [--model qwen|smollm2] [--quick]``

*Before* is the IR as openvino_genai writes it, with activations quantized in groups of 128: larger than the groups of
weights, so the plugin leaves that out. *After* is what `--model FILE.gguf` runs. Times are CPU time, in which other
programs on the core do not count.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import patch

import numpy as np
import openvino as ov

from bench import models
from bench.report import cores, on_core, ratios, report, spread
from swarm.engine.paged import PagedEngine
from swarm.engine.pages import use_huge_pages
from swarm.engine.selftest import segment
from swarm.model.cut import cut
from swarm.model.grouping import weight_group, weights_of_graph
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard
from swarm.model.tokenizer import Tokenizer

TEXTS = Path(__file__).parent / "texts"
TOKENS = 1000
"""Of each text, at most."""

_CHUNK = 256  # rows whose logits are computed at once
_CONTEXT = 96
_KV_TOKENS = 2048
_GROUP_BEFORE = 128


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gguf", description=__doc__)
    parser.add_argument("--model", choices=["qwen", "smollm2"], action="append", help="default: both")
    parser.add_argument("--quick", action="store_true", help="40 tokens of each text, few rounds, nothing kept")
    arguments = parser.parse_args()
    chosen = arguments.model or ["qwen", "smollm2"]
    figures: dict[str, float] = {}
    for model in chosen:
        irs = {"before": models.as_written(model), "after": {"qwen": models.qwen, "smollm2": models.smollm2}[model]()}
        found = on_core(cores()[-1], speeds, model, irs, 4 if arguments.quick else 24)
        for version, ir in irs.items():
            found |= on_core(cores()[-1], perplexities, version, ir, 40 if arguments.quick else TOKENS)
        found["perplexity_ratio"] = found["after_perplexity"] / found["before_perplexity"]
        figures |= {f"{model}_{name}": value for name, value in found.items()}
    settings = {"models": chosen, "tokens": TOKENS, "texts": sorted(file.name for file in TEXTS.iterdir())}
    settings["times"] = "milliseconds of CPU time for one decoded token at 96 tokens of context, median; one thread"
    report("gguf", figures, settings, keep=not arguments.quick)


def speeds(model: str, irs: Mapping[str, Path], rounds: int) -> dict[str, float]:
    """Milliseconds a token of each version, and of llama.cpp on the file, in turns."""
    steps = {version: engine_step(engine_of(version, ir)) for version, ir in irs.items()}
    if (step := llama_step(models.gguf_file(model))) is not None:
        steps["llamacpp"] = step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()  # the weights of the others are in the caches
            began = time.process_time()
            step()
            times[name].append((time.process_time() - began) * 1000)
    for name, found in times.items():
        print(f"{model} {name}: {spread(found)} ms, {spread(ratios(times['before'], found))} x before", flush=True)
    return {f"{name}_ms": statistics.median(found) for name, found in times.items()}


def perplexities(version: str, ir: Path, tokens: int) -> dict[str, float]:
    """Of each text in `TEXTS`, and of all tokens together."""
    engine = engine_of(version, ir)
    tokenizer = Tokenizer.load(ir)
    figures, everything = {}, []
    for session, file in enumerate(sorted(TEXTS.iterdir())):
        ids = tokenizer.encode(file.read_text(encoding="utf-8"))[:tokens]
        surprises = surprises_of(engine, session, ids)
        engine.reset()
        everything += surprises
        figures[f"{version}_perplexity_{file.stem}"] = math.exp(statistics.fmean(surprises))
        print(f"{version} {file.stem}: {figures[f'{version}_perplexity_{file.stem}']:.4f}", file=sys.stderr, flush=True)
    return figures | {f"{version}_perplexity": math.exp(statistics.fmean(everything)), "tokens": len(everything)}


def surprises_of(engine: PagedEngine, session: int, ids: list[int]) -> list[float]:
    """-ln p of every token but the first, given those before it."""
    found: list[float] = []
    for start in range(0, len(ids) - 1, _CHUNK):
        part = ids[start : start + _CHUNK]
        engine.run([segment(session, start, part, len(part))])
        for row, target in zip(engine.logits(), ids[start + 1 : start + 1 + len(part)], strict=False):
            shifted = row - row.max()
            found.append(float(np.log(np.exp(shifted).sum(dtype=np.float64)) - shifted[target]))
    return found


def engine_of(version: str, ir: Path) -> PagedEngine:
    """The whole model on one thread."""
    model = ov.Core().read_model(ir / "openvino_model.xml")
    layers = map_layers(Graph.of(model)).layers
    vocabulary = model.output(0).get_partial_shape()[2].get_length()
    shard = Shard(cut(model, 0, layers))
    group = _GROUP_BEFORE if version == "before" else weight_group(weights_of_graph(shard.model))
    with patch("swarm.engine.paged.weight_group", lambda _weights: group):
        return PagedEngine(shard, "CPU", _KV_TOKENS, vocabulary, threads=1)


def engine_step(engine: PagedEngine) -> Callable[[], None]:
    """One token more behind a prompt."""
    prompt = np.random.default_rng(0).integers(100, 2000, _CONTEXT).tolist()
    engine.run([segment(0, 0, prompt)])
    gc.collect()
    use_huge_pages()  # as a node does

    def step() -> None:
        engine.run([segment(0, _CONTEXT, [100])])

    return step


def llama_step(file: Path) -> Callable[[], None] | None:
    """The same in llama.cpp; None where llama-cpp-python is not installed."""
    try:
        from llama_cpp import Llama  # type: ignore[import-not-found, unused-ignore]  # no dependency
    except ImportError:
        print("llama-cpp-python is not installed: no llamacpp_ms", file=sys.stderr)
        return None
    model = Llama(str(file), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
    model.eval(np.random.default_rng(0).integers(100, 2000, _CONTEXT).tolist())
    return lambda: model.eval([100])


if __name__ == "__main__":
    main()
