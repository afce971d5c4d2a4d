"""Speculation on one PC: drafts of every size and adaptive, against plain decoding and openvino_genai.

One core runs target and draft. Our own parties are the whole stack but for discovery and forming (`bench.ring`); genai
has its draft-model and its prompt-lookup decoding on the same pair of IRs. The eight prompts, and three whose answers
repeat much of them, where n-gram shines. Greedy, no early stop, the chat template.

``python -m bench.speculation [--only genai|ours] [--lengths] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import openvino_genai

from bench import models
from bench.report import cores, first_in_line, pin, ratios, report, spread
from bench.ring import BenchRing, Question, Setup, bench_ring
from swarm.coordinator.pace import Speculation
from tests.prompts import PROMPTS, REPEATING

TOKENS = 128
LENGTHS = (128, 256, 512, 1024, 2048)
K = (1, 2, 3, 5, 7, 10)

ALL_PROMPTS = {**PROMPTS, **REPEATING}

OURS: dict[str, Speculation] = {
    "plain": Speculation(enabled=False),
    "adaptive": Speculation(),
    "ngram": Speculation(model=False),
    **{f"k{k}": Speculation(fixed_k=k, fixed_depth=1) for k in K},
}

GENAI: dict[str, tuple[str, int]] = {
    "genai": ("plain", 0),
    "genai_draft3": ("draft", 3),
    "genai_draft5": ("draft", 5),
    "genai_lookup3": ("lookup", 3),
    "genai_lookup5": ("lookup", 5),
}
"""Pipeline, and ``num_assistant_tokens``."""

Answers = dict[str, dict[str, "Answer"]]
"""Party, prompt, answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    rate: float
    """Tokens per second of decode."""
    ttft_ms: float
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--only", choices=("ours", "genai"), help="the parties of one side")
    parser.add_argument("--party", choices=(*OURS, *GENAI), action="append", help="only these (default: all)")
    parser.add_argument("--lengths", action="store_true", help=f"answers of {LENGTHS} tokens too")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="two prompts of 24 tokens, four parties, nothing kept")
    arguments = parser.parse_args()
    quick = arguments.quick
    parties = [name for side in (OURS, GENAI) for name in side if arguments.only in (None, _side(name))]
    if arguments.party:
        parties = [name for name in parties if name in arguments.party]
    if quick:
        parties = [name for name in parties if name in ("plain", "adaptive", "k3", "genai_draft3")]
    prompts = dict(list(ALL_PROMPTS.items())[:2]) if quick else ALL_PROMPTS
    tokens = 24 if quick else TOKENS
    answers, long = asyncio.run(measure(parties, prompts, tokens, arguments.lengths, arguments.first))
    show(answers)
    figures = compare(answers) | lengths(long)
    settings = {"tokens": tokens, "prompts": list(prompts), "parties": parties, "first": arguments.first}
    report("speculation", figures, settings, keep=not quick and arguments.only is None)


def _side(party: str) -> str:
    return "ours" if party in OURS else "genai"


async def measure(
    parties: Sequence[str], prompts: Mapping[str, str], tokens: int, long: bool, first: bool
) -> tuple[Answers, dict[int, tuple[Answer, Answer]]]:
    """Each prompt by each party in turns after a warm-up; then (plain, adaptive) by the length of the answer."""
    core = cores()[-1]
    target, draft = models.qwen_int4(), models.draft_int4()
    async with AsyncExitStack() as stack:
        rings = {}
        if any(name in OURS for name in parties):
            rings["ours"] = await stack.enter_async_context(bench_ring(Setup(target, draft, (core,))))
        kinds = {GENAI[name][0] for name in parties if name in GENAI}
        spawn = get_context("spawn")
        pools = {kind: stack.enter_context(ProcessPoolExecutor(1, spawn, pin, (core,))) for kind in kinds}

        async def ask(party: str, prompt: str, count: int) -> Answer:
            if party in OURS:
                return await ask_ours(rings["ours"], party, prompt, count, first)
            kind, assistant = GENAI[party]
            job = pools[kind].submit(ask_genai, target, draft, kind, assistant, prompt, count, first)
            return await asyncio.wrap_future(job)

        answers: Answers = {name: {} for name in parties}
        for party in [*parties, *parties]:  # twice: those that load disturb those that have loaded before
            await ask(party, "Name three colours.", 16)
        for name, prompt in prompts.items():
            for party in parties:
                answers[party][name] = found = await ask(party, prompt, tokens)
                print(f"{name:12} {party:14} {found.rate:6.2f} tok/s", file=sys.stderr, flush=True)
        by_length = {}
        for count in LENGTHS if long else ():
            prompt = prompts["creative"]
            by_length[count] = await ask("plain", prompt, count), await ask("adaptive", prompt, count)
        return answers, by_length


async def ask_ours(ring: BenchRing, party: str, prompt: str, tokens: int, first: bool) -> Answer:
    with first_in_line(first, ring.processes):
        (stream,) = await ring.ask([Question(prompt, tokens, OURS[party])])
    return Answer(stream.rate, stream.ttft_ms, stream.tokens, stream.use.drafted, stream.use.accepted)


def ask_genai(target: Path, draft: Path, kind: str, assistant: int, prompt: str, tokens: int, first: bool) -> Answer:
    """In the pinned process of this pipeline."""
    pipeline, tokenizer = _genai(target, draft, kind)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False).input_ids
    settings: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True, "do_sample": False}
    if assistant:
        settings["num_assistant_tokens"] = assistant
    if kind == "lookup":
        settings["max_ngram_size"] = 3
    with first_in_line(first):
        result = pipeline.generate(ids, **settings)
    measured = result.perf_metrics
    ttft_ms = measured.get_ttft().mean
    found = tuple(result.tokens[0])
    return Answer(1000 * (len(found) - 1) / (measured.get_generate_duration().mean - ttft_ms), ttft_ms, found)


@cache
def _genai(target: Path, draft: Path, kind: str) -> tuple[Any, Any]:
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1}
    if kind == "draft":
        options["draft_model"] = openvino_genai.draft_model(str(draft), "CPU", INFERENCE_NUM_THREADS=1)
    if kind == "lookup":
        options["prompt_lookup"] = True
    return openvino_genai.LLMPipeline(str(target), "CPU", **options), openvino_genai.Tokenizer(str(target))


def compare(answers: Answers) -> dict[str, float]:
    """The figures of all parties that ran."""
    figures: dict[str, float] = {}
    for base, suffix in (("plain", ""), ("genai", "_own")):
        if base not in answers:
            continue
        for party, found in answers.items():
            if party != base and (suffix == "" or party.startswith("genai")):
                gains = _gains(found, answers[base], PROMPTS)
                figures[f"{party}_mean{suffix}"] = statistics.mean(gains)
                figures[f"{party}_min{suffix}"] = min(gains)
    for party, found in answers.items():
        figures[f"{party}_tokens_per_second"] = statistics.mean(_rates(found, PROMPTS))
        drafted = sum(one.drafted for one in found.values())
        if drafted:
            figures[f"{party}_acceptance"] = sum(one.accepted for one in found.values()) / drafted
    if "plain" in answers and "adaptive" in answers:
        figures["spec_mean"], figures["spec_min"] = figures["adaptive_mean"], figures["adaptive_min"]
        figures["spec_identical"] = sum(_same(answers, name) for name in answers["plain"]) / len(answers["plain"])
        for name in REPEATING.keys() & answers["plain"].keys():
            figures[f"spec_{name}"] = answers["adaptive"][name].rate / answers["plain"][name].rate
            if "ngram" in answers:
                figures[f"ngram_{name}"] = answers["ngram"][name].rate / answers["plain"][name].rate
    drafting = [party for party in answers if party.startswith("genai_draft")]
    if "adaptive" in answers and drafting:
        best = max(drafting, key=lambda party: statistics.mean(_rates(answers[party], PROMPTS)))
        figures["spec_vs_genai"] = statistics.mean(_gains(answers["adaptive"], answers[best], PROMPTS))
    return figures


def _same(answers: Answers, prompt: str) -> bool:
    """All of our parties gave the same answer."""
    return len({found[prompt].tokens for party, found in answers.items() if party in OURS}) == 1


def _rates(found: Mapping[str, Answer], prompts: Iterable[str]) -> list[float]:
    return [found[name].rate for name in prompts if name in found]


def _gains(found: Mapping[str, Answer], base: Mapping[str, Answer], prompts: Iterable[str]) -> list[float]:
    return ratios(_rates(found, prompts), _rates(base, prompts))


def lengths(found: Mapping[int, tuple[Answer, Answer]]) -> dict[str, float]:
    """What speculation brings by the length of the answer, and how plain decoding slows down with it."""
    figures = {}
    for count, (plain, adaptive) in found.items():
        figures[f"spec_{count}_tokens"] = adaptive.rate / plain.rate
        figures[f"plain_{count}_tokens_per_second"] = plain.rate
    return figures


def show(answers: Answers) -> None:
    """A line for each prompt and one for each party's mean."""
    base = answers.get("plain") or answers.get("genai") or next(iter(answers.values()))
    print(f"{'':14}" + "".join(f"{party[-9:]:>10}" for party in answers))
    for name in base:
        print(f"{name:14}" + "".join(f"{found[name].rate / base[name].rate:10.2f}" for found in answers.values()))
    for party, found in answers.items():
        drafted, accepted = (sum(getattr(a, f) for a in found.values()) for f in ("drafted", "accepted"))
        share = f", {accepted / drafted:.0%} of {drafted} drafted accepted" if drafted else ""
        print(f"{party}: {spread(_rates(found, PROMPTS))} tok/s, {spread(_gains(found, base, PROMPTS))}{share}")


if __name__ == "__main__":
    main()
