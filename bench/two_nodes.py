"""Two nodes, a core each, against one PC: the whole model on one core in our engine, one user.

Real processes of ``node.py`` on loopback; each has too little memory for the whole model, so that they share it. Users
sit at the nodes in turn and ask over their HTTP APIs. A node's core also carries the coordinator, the tokenizer and the
API for its users; their clients (see `clients`) run on the last core.

Two cores share the way to memory, which two PCs do not: `one_pc_beside_tokens_per_second` is one PC while another one
works on the other core, and `…_beside` are the figures over that.

The nodes decode plainly; with ``--speculation`` they draft, with the 0.5B model for the 1.5B one.

``python -m bench.two_nodes [--model qwen|smollm2] [--users N]… [--speculation] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import openvino_genai

from bench import models
from bench.nodes import PLAIN, Drafting, Round, ask_together, drafting_for, prompt_of, ring_of
from bench.report import ROUNDS, cores, first_in_line, percentile, pin, ratios, report, spread
from bench.shards import TOKENS, Party, ours

_PREFIX = {"qwen": "", "smollm2": "smollm2_"}
_NAMES = {"two_nodes_1": "two_nodes_one_user", "two_nodes_2": "two_nodes_two_users_plain"}
_NAMES |= {"two_nodes_1_spec": "two_nodes_one_user_spec", "two_nodes_2_spec": "two_nodes_two_users"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.two_nodes", description=__doc__)
    parser.add_argument("--model", choices=sorted(_PREFIX), default="qwen")
    parser.add_argument("--users", type=int, action="append", help="at once (default: 1, 2, 4 and 8)")
    parser.add_argument("--speculation", action="store_true", help="the nodes draft; one PC never does")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"counted (default: {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of each answer (default: {TOKENS})")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="one round of 16 tokens, nothing kept")
    arguments = parser.parse_args()
    users = arguments.users or [1, 2, 4, 8]
    tokens, rounds = (16, 1) if arguments.quick else (arguments.tokens, arguments.rounds)
    node_cores = (cores()[0], cores()[-1])
    pin(node_cores[-1])
    ir = models.qwen_int4() if arguments.model == "qwen" else models.smollm2()
    drafting, suffix = (drafting_for(arguments.model), "_spec") if arguments.speculation else (PLAIN, "")
    solo, beside, shared, stages = asyncio.run(
        measure(ir, drafting, node_cores, users, rounds, tokens, arguments.first)
    )
    prefix, figures = _PREFIX[arguments.model], {}
    solo_rates = [found.rate for found in solo]
    print(f"one PC: {spread(solo_rates)} tok/s")
    figures["one_pc_tokens_per_second"] = statistics.median(solo_rates)
    beside_rates = [found.rate for found in beside]
    print(f"one PC beside another: {spread(beside_rates)} tok/s")
    figures["one_pc_beside_tokens_per_second"] = statistics.median(beside_rates)
    figures["one_pc_ttft_ms"] = statistics.median(found.ttft_ms for found in solo)
    for count, found in shared.items():
        times = ratios([one.rate for one in found], solo_rates)
        name = f"two_nodes_{count}{suffix}"
        name = _NAMES.get(name, name)
        figures[name] = statistics.median(times)
        figures[f"{name}_beside"] = statistics.median(ratios([one.rate for one in found], beside_rates))
        figures[f"{name}_tokens_per_second"] = statistics.median(one.rate for one in found)
        figures[f"{name}_ttft_ms"] = statistics.median(one.ttft_ms for one in found)
        tpot_ms = [ms for one in found for ms in one.tpot_ms]
        figures[f"{name}_tpot_ms"] = statistics.median(tpot_ms)
        figures[f"{name}_tpot_p95_ms"] = percentile(tpot_ms, 0.95)
        print(f"two nodes, {count} users: {spread(times)} of one PC")
    settings = {
        "model": arguments.model,
        "rounds": rounds,
        "tokens": tokens,
        "first": arguments.first,
        "stages": stages,
        "draft": drafting.model.name if drafting.model else "none",
    }
    figures = {prefix + name: value for name, value in figures.items()}
    report(f"two_nodes{suffix}", figures, settings, keep=not arguments.quick)


async def measure(
    ir: Path, drafting: Drafting, node_cores: tuple[int, int], users: list[int], rounds: int, tokens: int, first: bool
) -> tuple[list[Round], list[Round], dict[int, list[Round]], list[str]]:
    """Of each round: one PC, one PC beside another, then two nodes with each number of users, in turns; the first round
    warms up."""
    solo: list[Round] = []
    beside: list[Round] = []
    shared: dict[int, list[Round]] = {count: [] for count in users}
    spawn = multiprocessing.get_context("spawn")
    one_pc, other_pc = (ProcessPoolExecutor(1, spawn, pin, (core,)) for core in node_cores)
    with one_pc, other_pc:
        async with ring_of(ir, node_cores, drafting) as (ring, stages):
            for turn in range(rounds + 1):
                asked = (answer_alone, ir, turn, tokens, first)
                loop = asyncio.get_running_loop()
                alone = await loop.run_in_executor(one_pc, *asked)
                company, _ = await asyncio.gather(*(loop.run_in_executor(pc, *asked) for pc in (one_pc, other_pc)))
                found = {}
                for count in users:
                    with first_in_line(first, ring.processes):
                        found[count] = await ask_together(ring.apis, count, turn, tokens)
                if turn:
                    solo.append(alone)
                    beside.append(company)
                    for count, one in found.items():
                        shared[count].append(one)
                        print(f"round {turn}: {count} users {one.rate / alone.rate:.3f}", file=sys.stderr, flush=True)
    return solo, beside, shared, stages


# --- one PC -----------------------------------------------------------------------------------------------------------


def answer_alone(ir: Path, turn: int, tokens: int, first: bool) -> Round:
    """The whole model in our engine, one prompt; in the pinned process."""
    party, tokenizer = _one_pc(ir)
    history = [{"role": "user", "content": prompt_of(turn)}]
    text = tokenizer.apply_chat_template(history, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
    with first_in_line(first):
        answer = party(ids, tokens)
    return Round(answer.rate, answer.token_ms, [answer.ttft_ms])


@cache
def _one_pc(ir: Path) -> tuple[Party, Any]:
    return ours(ir, 1), openvino_genai.Tokenizer(str(ir))


if __name__ == "__main__":
    main()
