"""Four users whose prompts begin alike: first token of the first, against that of the three that come after.

Two nodes, a core each, as in `bench.two_nodes`; the users ask both in turn. Each round has a beginning of its own, so
that nothing of an earlier one is of use, and questions of a few tokens behind it.

``python -m bench.prefix [--model qwen|smollm2] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path

import numpy as np

from bench import models
from bench.clients import ask
from bench.nodes import ring_of
from bench.report import ROUNDS, cores, first_in_line, pin, report, spread
from swarm.model.tokenizer import Tokenizer

PREFIX_TOKENS = 96
QUESTIONS = ("Who?", "When?", "Where?", "Why?")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__)
    parser.add_argument("--model", choices=["qwen", "smollm2"], default="qwen")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="one round, nothing kept")
    arguments = parser.parse_args()
    node_cores = (cores()[0], cores()[-1])
    pin(node_cores[0])
    ir = models.qwen_int4() if arguments.model == "qwen" else models.smollm2()
    rounds = 1 if arguments.quick else ROUNDS
    found = asyncio.run(measure(ir, node_cores, rounds, arguments.first))
    gains = [first / statistics.median(later) for first, *later in found]
    print(f"first token of the first user, over that of the later three: {spread(gains)}")
    figures = {
        "prefix_ttft": statistics.median(gains),
        "first_ttft_ms": statistics.median(first for first, *_ in found),
        "later_ttft_ms": statistics.median(ms for _, *later in found for ms in later),
    }
    settings = {"model": arguments.model, "rounds": rounds, "prefix_tokens": PREFIX_TOKENS, "first": arguments.first}
    report("prefix", figures, settings, keep=not arguments.quick)


async def measure(ir: Path, node_cores: tuple[int, int], rounds: int, first: bool) -> list[list[float]]:
    """Milliseconds to the first token of each user, by round; one round more warms up."""
    tokenizer, found = Tokenizer.load(ir), []
    async with ring_of(ir, node_cores) as (ring, _):
        for turn in range(rounds + 1):
            beginning = words(tokenizer, turn)
            with first_in_line(first, ring.processes):
                streams = [
                    await ask(ring.apis[number % 2], f"{beginning} {question}", 8)
                    for number, question in enumerate(QUESTIONS)
                ]
            found.append([(stream.pieces[0] - stream.asked) * 1000 for stream in streams])
            print(f"round {turn}: {[round(ms) for ms in found[-1]]} ms", file=sys.stderr, flush=True)
    return found[1:]


def words(tokenizer: Tokenizer, turn: int) -> str:
    """Text of about `PREFIX_TOKENS` tokens that no other turn has."""
    random, text = np.random.default_rng(turn), f"List {turn}:"
    while len(tokenizer.encode(text)) < PREFIX_TOKENS:
        text += f" {random.choice(['red', 'green', 'blue', 'old', 'new', 'small', 'large'])} {random.integers(1000)},"
    return text


if __name__ == "__main__":
    main()
