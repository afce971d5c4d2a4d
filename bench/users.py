"""Many users at once: one and two nodes, a core each, by engine and speculation, against openvino_genai on one PC.

openvino_genai answers one user, and many with its continuous batching. A part is one engine with speculation on or off;
its parties take turns, round by round, and every rate is also told as a multiple of openvino_genai with one user in the
same round. Users sit at the nodes in turn; their clients (see `clients`) run on the last core.

``python -m bench.users [--model qwen|smollm2] [--part paged|paged-spec|stateful|stateful-spec]… [--users N]…
[--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import openvino_genai

from bench import models
from bench.clients import Stream
from bench.nodes import PLAIN, Drafting, Round, ask_together, drafting_for, prompt_of, ring_of, together
from bench.report import cores, first_in_line, percentile, pin, ratios, report, spread
from swarm.protocol.config import PAGED, STATEFUL

TOKENS = 48
MORE_TOKENS = 4
"""For each user: the more there are, the later the last of them begins, and what counts is when all of them decode."""

USERS = (1, 2, 4, 8, 16)
ROUNDS = 3
"""Counted, after one for warming up: there are forty combinations. Of stateful parties one: they take most of the time
and vary least."""

_KV_GIB = 1


@dataclass(frozen=True, slots=True)
class Part:
    """How the nodes of some parties are started."""

    engine: str
    speculation: bool

    @property
    def name(self) -> str:
        return f"{self.engine}-spec" if self.speculation else self.engine

    def drafting(self, model: str) -> Drafting:
        drafting = drafting_for(model) if self.speculation else PLAIN
        return replace(drafting, flags=(*drafting.flags, "--engine", self.engine))


PARTS = [Part(engine, speculation) for engine in (PAGED, STATEFUL) for speculation in (False, True)]

Measured: TypeAlias = dict[tuple[str, int], list[Round]]
"""By party and users, a round each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured in each part."""

    model: str
    ir: Path
    users: Sequence[int]
    rounds: int
    tokens: int
    first: bool


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.users", description=__doc__)
    parser.add_argument("--model", choices=["qwen", "smollm2"], default="qwen")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", choices=names, action="append", help="(default: all four)")
    parser.add_argument("--users", type=int, action="append", help=f"at once (default: {USERS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"counted (default: {ROUNDS})")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help=f"of an answer, and {MORE_TOKENS} for each user (default: {TOKENS})"
    )
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="paged, 1 and 4 users, one round, nothing kept")
    arguments = parser.parse_args()
    quick = arguments.quick
    users = arguments.users or ([1, 4] if quick else USERS)
    tokens, rounds = (24, 1) if quick else (arguments.tokens, arguments.rounds)
    parts = arguments.part or ([PAGED] if quick else names)
    near, far = cores()[0], cores()[-1]
    pin(far)
    ir = models.qwen_int4() if arguments.model == "qwen" else models.smollm2()
    plan = Plan(arguments.model, ir, sorted({1, *users}), rounds, tokens, arguments.first)
    figures: dict[str, float] = {}
    print(f"{'':24}{'users':>6}{'x genai':>9}{'tok/s':>8}{'each':>7}{'TTFT ms':>10}{'p95':>7}{'TPOT ms':>9}{'p95':>7}")
    for number, part in enumerate(part for part in PARTS if part.name in parts):
        # Batching by openvino_genai is the same in every part.
        measured = asyncio.run(measure(plan, part, near, far, batching=plan.users if not number else [1]))
        figures = tell(measured) | figures
        done = [one.name for one in PARTS if one.name in parts][: number + 1]
        settings = {"model": arguments.model, "parts": done, "rounds": rounds, "tokens": tokens}
        settings |= {"more_tokens": MORE_TOKENS, "first": arguments.first}
        report("users", figures, settings, keep=not quick)  # after each part: all of them take 40 minutes


async def measure(plan: Plan, part: Part, near: int, far: int, batching: Sequence[int]) -> Measured:
    """The counted rounds of one part. One node and openvino_genai share the far core, in turns."""
    found: Measured = {}
    drafting = part.drafting(plan.model)
    genai = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), pin, (far,))
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(genai)
        rings = {
            f"{part.name} stages{len(node_cores)}": await stack.enter_async_context(
                ring_of(plan.ir, node_cores, drafting)
            )
            for node_cores in ([far], [near, far])
        }
        for turn in range((1 if part.engine == STATEFUL else plan.rounds) + 1):
            for count in plan.users if turn else [1]:
                tokens = plan.tokens + MORE_TOKENS * count
                share: dict[str, Round] = {}
                if count in batching:
                    asked = (plan.ir, count, turn, tokens, plan.first)
                    share["genai"] = await asyncio.get_running_loop().run_in_executor(genai, answer_batched, *asked)
                for name, (ring, _) in rings.items():
                    with first_in_line(plan.first, ring.processes):
                        share[name] = await ask_together(ring.apis, count, turn, tokens)
                rates = ", ".join(f"{name} {one.rate:.1f}" for name, one in share.items())
                print(f"round {turn}: {count} users: {rates} tok/s", file=sys.stderr, flush=True)
                for name, one in share.items() if turn else ():
                    found.setdefault((name, count), []).append(one)
    return found


def tell(measured: Mapping[tuple[str, int], Sequence[Round]]) -> dict[str, float]:
    """Print a line for each party and number of users; their figures."""
    alone = [one.rate for one in measured["genai", 1]]
    figures: dict[str, float] = {}
    for (name, count), rounds in sorted(measured.items()):
        times = ratios([one.rate for one in rounds], alone)
        ttft_ms = [ms for one in rounds for ms in one.ttfts_ms]
        tpot_ms = [ms for one in rounds for ms in one.tpot_ms]
        rate = statistics.median(one.rate for one in rounds)
        key = f"{name.replace('-', '_').replace(' ', '_')}_users{count}"
        found = {
            key: statistics.median(times),
            f"{key}_tokens_per_second": rate,
            f"{key}_tokens_per_second_each": rate / count,
            f"{key}_ttft_ms": statistics.median(ttft_ms),
            f"{key}_ttft_p95_ms": percentile(ttft_ms, 0.95),
            f"{key}_tpot_ms": statistics.median(tpot_ms),
            f"{key}_tpot_p95_ms": percentile(tpot_ms, 0.95),
        }
        multiple, rate, each, ttft, late, tpot, slow = found.values()
        line = f"{name:24}{count:6}{multiple:9.2f}{rate:8.1f}{each:7.1f}{ttft:10.0f}{late:7.0f}{tpot:9.1f}{slow:7.1f}"
        print(f"{line}   {spread(times)}", flush=True)
        figures |= found
    return figures


# --- openvino_genai ---------------------------------------------------------------------------------------------------


def answer_batched(ir: Path, users: int, turn: int, tokens: int, first: bool) -> Round:
    """openvino_genai's continuous batching, `users` prompts at once; in the pinned process."""
    pipeline, tokenizer = _pipeline(ir)
    config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt_of(turn + user)}], add_generation_prompt=True)
        for user in range(users)
    ]
    with first_in_line(first):
        asked = time.perf_counter()
        handles = [pipeline.add_request(number, prompt, config) for number, prompt in enumerate(prompts)]
        pieces: list[list[float]] = [[] for _ in handles]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter()
            for handle, times in zip(handles, pieces, strict=True):
                while handle.can_read():
                    handle.read()
                    times.append(now)
    return together([Stream(asked, tuple(times), len(times), "") for times in pieces])


@cache
def _pipeline(ir: Path) -> tuple[Any, Any]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _KV_GIB
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(ir), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1})
    return pipeline, pipeline.get_tokenizer()


if __name__ == "__main__":
    main()
