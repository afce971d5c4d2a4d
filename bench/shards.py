"""One core: openvino_genai, llama.cpp, our engine with the whole model, and with it in 2 and 3 shards.

``python -m bench.shards [--model qwen|smollm2] [--quick]``
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

import numpy as np
import openvino as ov
import openvino_genai

from bench import models
from bench.report import cores, first_in_line, on_core, percentile, pin, ratios, report, spread
from swarm.engine.paged import PagedEngine
from swarm.engine.pages import use_huge_pages
from swarm.engine.selftest import Chain, segment
from swarm.model.cut import cut
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard
from swarm.protocol.messages import RowKind
from swarm.protocol.tensors import Array
from tests.prompts import PROMPTS

TOKENS = 128
"""New tokens of each answer, no early stop."""

ROWS = (1, 2, 4, 8, 16, 32)
_CONTEXT, _LONG_CONTEXT = 96, 2000
_STAGES = {"whole": 1, "stages2": 2, "stages3": 3}
_PARTIES = ("genai", *_STAGES, "llama.cpp")
_PREFIX = {"qwen": "", "smollm2": "smollm2_"}


@dataclass(slots=True)
class Answer:
    """One prompt, answered by one party."""

    ttft_ms: float
    token_ms: list[float]
    """Of each token after the first."""
    logits: Array | None = None
    """``[tokens, vocabulary]`` f32 of our own engine."""

    @property
    def rate(self) -> float:
        """Tokens per second of decode."""
        return 1000 * len(self.token_ms) / sum(self.token_ms)


Party: TypeAlias = Callable[[list[int], int], Answer]
"""(prompt's ids, number of new tokens) -> answer"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shards", description=__doc__)
    parser.add_argument("--model", choices=sorted(_PREFIX), action="append", help="default: both")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of each answer (default: {TOKENS})")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="two prompts of 12 tokens, short row costs, nothing kept")
    arguments = parser.parse_args()
    chosen = arguments.model or sorted(_PREFIX)
    tokens = 12 if arguments.quick else arguments.tokens
    figures: dict[str, float] = {}
    for model in chosen:
        found = measure(model, tokens, arguments.quick, arguments.first)
        figures |= {_PREFIX[model] + name: value for name, value in found.items()}
    settings = {
        "models": chosen,
        "prompts": 2 if arguments.quick else len(PROMPTS),
        "tokens": tokens,
        "first": arguments.first,
        "rate": "tokens per second of decode, median of the prompts' ratios; parties in turns at each prompt",
    }
    report("shards", figures, settings, keep=not arguments.quick)


def measure(model: str, tokens: int, quick: bool, first: bool) -> dict[str, float]:
    """All figures of one model."""
    ir = models.qwen_int4() if model == "qwen" else models.smollm2()
    gguf = models.gguf_file(model)
    tokenizer = openvino_genai.Tokenizer(str(ir))
    prompts = {name: tokenizer.encode(text).input_ids.data[0].tolist() for name, text in PROMPTS.items()}
    if quick:
        prompts = dict(list(prompts.items())[:2])
    core = cores()[-1]
    with ExitStack() as stack:
        parties: dict[str, Party] = {}
        for name in _PARTIES if find_spec("llama_cpp") else _PARTIES[:-1]:
            # A process each: how fast one is also depends on where its weights came to lie in memory.
            pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"), pin, (core,)))
            parties[name] = partial(_ask, pool, name, ir, gguf, first)
        answers, difference = answer_all(parties, prompts, tokens)
    show(model, answers)
    return compare(answers) | {"logits_max_diff": difference} | on_core(core, row_costs, ir, quick, first)


def _ask(
    pool: ProcessPoolExecutor, name: str, ir: Path, gguf: Path, first: bool, ids: list[int], tokens: int
) -> Answer:
    return pool.submit(_answer, name, ir, gguf, first, ids, tokens).result()


def _answer(name: str, ir: Path, gguf: Path, first: bool, ids: list[int], tokens: int) -> Answer:
    """In the party's process."""
    party = _party(name, ir, gguf)
    with first_in_line(first):
        return party(ids, tokens)


@cache
def _party(name: str, ir: Path, gguf: Path) -> Party:
    if name == "genai":
        return genai(ir)
    return llama_cpp(gguf) if name == "llama.cpp" else ours(ir, _STAGES[name])


def answer_all(
    parties: dict[str, Party], prompts: dict[str, list[int]], tokens: int
) -> tuple[dict[str, list[Answer]], float]:
    """Each prompt by each party in turns, after a warm-up; and how far a chain's logits are from the whole model's."""
    difference = 0.0
    answers: dict[str, list[Answer]] = {name: [] for name in parties}
    for party in parties.values():
        party(next(iter(prompts.values())), 8)
    for title, ids in prompts.items():
        for name, party in parties.items():
            answers[name].append(party(ids, tokens))
            print(f"{title:16} {name:10} {answers[name][-1].rate:7.2f} tok/s", file=sys.stderr, flush=True)
        for name in ("stages2", "stages3"):
            ours, whole = answers[name][-1], answers["whole"][-1]
            assert ours.logits is not None
            assert whole.logits is not None
            difference = max(difference, float(np.abs(ours.logits - whole.logits).max()))
            ours.logits = None
        answers["whole"][-1].logits = None
    return answers, difference


def compare(answers: dict[str, list[Answer]]) -> dict[str, float]:
    rates = {name: [answer.rate for answer in found] for name, found in answers.items()}
    figures = {"solo_vs_genai": statistics.median(ratios(rates["whole"], rates["genai"]))}
    if "llama.cpp" in rates:
        figures["solo_vs_llamacpp"] = statistics.median(ratios(rates["whole"], rates["llama.cpp"]))
    for name in ("stages2", "stages3"):
        figures[name] = statistics.median(ratios(rates[name], rates["whole"]))
    for name, found in answers.items():
        key = name.replace(".", "")
        token_ms = [ms for answer in found for ms in answer.token_ms]
        figures[f"{key}_tokens_per_second"] = statistics.median(rates[name])
        figures[f"{key}_tpot_ms"] = statistics.median(token_ms)
        figures[f"{key}_tpot_p95_ms"] = percentile(token_ms, 0.95)
        figures[f"{key}_ttft_ms"] = statistics.median(answer.ttft_ms for answer in found)
    return figures


def show(model: str, answers: dict[str, list[Answer]]) -> None:
    rates = {name: [answer.rate for answer in found] for name, found in answers.items()}
    for name, found in rates.items():
        print(f"{model} {name}: {spread(found)} tok/s, {spread(ratios(found, rates['whole']))} of one PC", flush=True)


def ours(ir: Path, stages: int) -> Party:
    """Our engine with the layers in `stages` equal shards, one thread."""
    chain = chain_of(ir, stages, kv_tokens=1024)

    def answer(ids: list[int], tokens: int) -> Answer:
        began = time.perf_counter()
        drawn, row = chain.run([segment(0, 0, ids)])
        rows, times = [row], [time.perf_counter()]
        for position in range(len(ids), len(ids) + tokens - 1):
            drawn, row = chain.run([segment(0, position, drawn[0])])
            rows.append(row)
            times.append(time.perf_counter())
        return Answer((times[0] - began) * 1000, list(_between(times)), np.concatenate(rows))

    return answer


def genai(ir: Path) -> Party:
    """openvino_genai with its defaults, one thread."""
    pipeline = openvino_genai.LLMPipeline(str(ir), "CPU", INFERENCE_NUM_THREADS=1)

    def answer(ids: list[int], tokens: int) -> Answer:
        prompt = ov.Tensor(np.array([ids], np.int64))
        result = pipeline.generate(prompt, max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        measured = result.perf_metrics
        return Answer(measured.get_ttft().mean, [us / 1000 for us in measured.raw_metrics.m_durations])

    return answer


def llama_cpp(gguf: Path) -> Party:
    """llama.cpp on the GGUF itself, one thread."""
    from llama_cpp import Llama  # type: ignore[import-not-found, unused-ignore]  # no dependency

    model = Llama(str(gguf), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)

    def answer(ids: list[int], tokens: int) -> Answer:
        model.reset()  # type: ignore[no-untyped-call, unused-ignore]
        began, times = time.perf_counter(), []
        for _ in model.generate(ids, temp=0.0):
            times.append(time.perf_counter())
            if len(times) == tokens:
                break
        return Answer((times[0] - began) * 1000, list(_between(times)))

    return answer


def row_costs(ir: Path, quick: bool, first: bool) -> dict[str, float]:
    """Milliseconds of a forward: rows of as many sessions at a short context, rows of one window at a long one."""
    counts = ROWS[:3] if quick else ROWS
    long = 256 if quick else _LONG_CONTEXT
    chain = chain_of(ir, 1, kv_tokens=counts[-1] * 128 + long + 128)
    random = np.random.default_rng(0)
    text: list[int] = random.integers(100, 2000, long).tolist()
    for session in range(counts[-1]):
        chain.run([segment(session, 0, text[:_CONTEXT])])
    for start in range(0, long, 256):
        chain.run([segment(counts[-1], start, text[start : start + 256])])
    times: dict[str, list[float]] = {}
    for _ in range(6):
        for rows in counts:
            batch = [segment(session, _CONTEXT, text[:1]) for session in range(rows)]
            window = segment(counts[-1], long, text[:rows], rows, RowKind.DECODE)
            for name, segments in ((f"rows{rows}_100_ms", batch), (f"rows{rows}_2000_ms", [window])):
                with first_in_line(first):
                    began = time.perf_counter()
                    chain.run(segments)
                    times.setdefault(name, []).append((time.perf_counter() - began) * 1000)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def chain_of(ir: Path, stages: int, kv_tokens: int) -> Chain:
    """The whole model in `stages` shards of about the same number of layers, one thread each."""
    model = ov.Core().read_model(ir / "openvino_model.xml")
    layers = map_layers(Graph.of(model)).layers
    vocabulary = model.output(0).get_partial_shape()[2].get_length()
    bounds = [round(layers * stage / stages) for stage in range(stages + 1)]
    engines = []
    for start, end in itertools.pairwise(bounds):
        shard = Shard(cut(ov.Core().read_model(ir / "openvino_model.xml"), start, end))
        engines.append(PagedEngine(shard, "CPU", kv_tokens, vocabulary, threads=1))
    chain = Chain(engines)
    chain.run([segment(0, 0, [1, 2])])
    use_huge_pages()  # as a node does
    return chain


def _between(times: Sequence[float]) -> Iterator[float]:
    for before, after in itertools.pairwise(times):
        yield (after - before) * 1000


if __name__ == "__main__":
    main()
