"""Many users at once: one and two nodes, a core each, against openvino_genai on one PC, alone and batching.

``python -m bench.users [--model qwen|smollm2] [--users N]… [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import openvino_genai

from bench import models
from bench.clients import Stream
from bench.nodes import Round, ask_together, prompt_of, ring_of, together
from bench.report import ROUNDS, cores, first_in_line, percentile, pin, ratios, report, spread

TOKENS = 64
USERS = (1, 2, 4, 8, 16)
_KV_GIB = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.users", description=__doc__)
    parser.add_argument("--model", choices=["qwen", "smollm2"], default="qwen")
    parser.add_argument("--users", type=int, action="append", help=f"at once (default: {USERS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"counted (default: {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of each answer (default: {TOKENS})")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="1 and 4 users, one round of 16 tokens, nothing kept")
    arguments = parser.parse_args()
    quick = arguments.quick
    users = arguments.users or ([1, 4] if quick else list(USERS))
    tokens, rounds = (16, 1) if quick else (arguments.tokens, arguments.rounds)
    near, far = cores()[0], cores()[-1]
    pin(near)
    ir = models.qwen_int4() if arguments.model == "qwen" else models.smollm2()
    measured = asyncio.run(measure(ir, near, far, sorted({1, *users}), rounds, tokens, arguments.first))
    figures = compare(measured)
    settings = {"model": arguments.model, "rounds": rounds, "tokens": tokens, "first": arguments.first}
    report("users", figures, settings, keep=not quick)


async def measure(
    ir: Path, near: int, far: int, users: list[int], rounds: int, tokens: int, first: bool
) -> dict[str, dict[int, list[Round]]]:
    """By party and number of users: a counted round each, all parties in turns; the first round warms up.

    One node and openvino_genai share the far core, in turns; the users' clients run on the near one.
    """
    found: dict[str, dict[int, list[Round]]] = {}
    genai = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), pin, (far,))
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(genai)
        one, _, _ = await stack.enter_async_context(ring_of(ir, [far]))
        two, _, _ = await stack.enter_async_context(ring_of(ir, [near, far]))
        for turn in range(rounds + 1):
            for count in users:
                loop = asyncio.get_running_loop()
                batching = await loop.run_in_executor(genai, answer_batched, ir, count, turn, tokens, first)
                shares = {"genai": batching}
                for name, ring in (("stages1", one), ("stages2", two)):
                    with first_in_line(first, ring.processes):
                        shares[name] = await ask_together(ring.apis[0], count, turn, tokens)
                if turn:
                    for name, share in shares.items():
                        found.setdefault(name, {}).setdefault(count, []).append(share)
                rates = ", ".join(f"{name} {share.rate:.1f}" for name, share in shares.items())
                print(f"round {turn}: {count} users: {rates} tok/s", file=sys.stderr, flush=True)
    return found


def compare(measured: dict[str, dict[int, list[Round]]]) -> dict[str, float]:
    """Every party's figures; rates also as multiples of openvino_genai with one user, round by round."""
    alone = [one.rate for one in measured["genai"][1]]
    figures: dict[str, float] = {}
    for name, by_users in measured.items():
        for count, rounds in by_users.items():
            times = ratios([one.rate for one in rounds], alone)
            tpot_ms = [ms for one in rounds for ms in one.tpot_ms]
            key = f"{name}_users{count}"
            figures[key] = statistics.median(times)
            figures[f"{key}_tokens_per_second"] = statistics.median(one.rate for one in rounds)
            figures[f"{key}_tokens_per_second_each"] = figures[f"{key}_tokens_per_second"] / count
            figures[f"{key}_ttft_ms"] = statistics.median(one.ttft_ms for one in rounds)
            figures[f"{key}_tpot_ms"] = statistics.median(tpot_ms)
            figures[f"{key}_tpot_p95_ms"] = percentile(tpot_ms, 0.95)
            print(f"{name}, {count} users: {spread(times)} of openvino_genai with one")
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
