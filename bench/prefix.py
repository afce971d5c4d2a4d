"""Users whose prompts begin alike: how long until their first tokens, one after another and all at the same moment.

Two nodes, a core each, as in `bench.two_nodes`; the users ask both in turn. Every round of four has a beginning of its
own, so that nothing of an earlier one is of use, and questions of a few tokens behind it.

- One after another: first token of the first, over that of the three that come after.
- At the same moment: first token of the last of the four, where their prompts begin differently over where they begin
  alike.

The answers of the last round of each kind are held against those of the whole model in one process, which shares
nothing.

``python -m bench.prefix [--model qwen|smollm2] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench import models
from bench.clients import Stream, ask
from bench.costs import stage_engine
from bench.nodes import Ring, ring_of
from bench.report import ROUNDS, cores, first_in_line, on_core, pin, ratios, report, spread
from swarm.engine.selftest import Chain
from swarm.model.tokenizer import Tokenizer

PREFIX_TOKENS = 96
ANSWER_TOKENS = 8
QUESTIONS = ("Who?", "When?", "Where?", "Why?")
KV_TOKENS = 1024


@dataclass(slots=True)
class Measured:
    """Milliseconds to the first token, by round and user."""

    one_by_one: list[list[float]] = field(default_factory=list)
    together: list[list[float]] = field(default_factory=list)
    unalike: list[list[float]] = field(default_factory=list)
    """Together, and every prompt has another beginning."""
    answers: dict[str, str] = field(default_factory=dict)
    """By prompt, of the last rounds."""


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
    unshared = on_core(node_cores[-1], plainly, ir, list(found.answers))
    identical = sum(text == one for text, one in zip(found.answers.values(), unshared, strict=True))
    figures = compare(found) | {"prefix_identical": identical / len(unshared)}
    settings = {"model": arguments.model, "rounds": rounds, "prefix_tokens": PREFIX_TOKENS, "first": arguments.first}
    report("prefix", figures, settings, keep=not arguments.quick)


async def measure(ir: Path, node_cores: tuple[int, int], rounds: int, first: bool) -> Measured:
    """The three kinds in turns; one round more warms up."""
    tokenizer, found = Tokenizer.load(ir), Measured()
    async with ring_of(ir, node_cores) as (ring, _):
        for turn in range(rounds + 1):
            alike = [words(tokenizer, number) for number in (turn, turn + 100)]
            unalike = [words(tokenizer, 1000 + 4 * turn + number) for number in range(len(QUESTIONS))]
            kinds = (
                (found.one_by_one, [alike[0]] * len(QUESTIONS), False),
                (found.together, [alike[1]] * len(QUESTIONS), True),
                (found.unalike, unalike, True),
            )
            found.answers.clear()
            for times, beginnings, at_once in kinds:
                prompts = [f"{text} {question}" for text, question in zip(beginnings, QUESTIONS, strict=True)]
                with first_in_line(first, ring.processes):
                    streams = await ask_all(ring, prompts, at_once)
                found.answers |= {prompt: stream.text for prompt, stream in zip(prompts, streams, strict=True)}
                ttft_ms = [(stream.pieces[0] - stream.asked) * 1000 for stream in streams]
                print(f"round {turn}: {[round(ms) for ms in ttft_ms]} ms", file=sys.stderr, flush=True)
                if turn:
                    times.append(ttft_ms)
    return found


async def ask_all(ring: Ring, prompts: Sequence[str], at_once: bool) -> list[Stream]:
    asking = [ask(ring.apis[number % len(ring.apis)], prompt, ANSWER_TOKENS) for number, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*asking)) if at_once else [await one for one in asking]


def compare(found: Measured) -> dict[str, float]:
    gains = [first / statistics.median(later) for first, *later in found.one_by_one]
    last = [max(times) for times in found.together]
    last_unalike = [max(times) for times in found.unalike]
    together = ratios(last_unalike, last)
    print(f"one after another: first token of the first, over that of the later three: {spread(gains)}")
    print(f"at the same moment: the last one's first token, begun differently over begun alike: {spread(together)}")
    return {
        "prefix_ttft": statistics.median(gains),
        "first_ttft_ms": statistics.median(first for first, *_ in found.one_by_one),
        "later_ttft_ms": statistics.median(ms for _, *later in found.one_by_one for ms in later),
        "prefix_together": statistics.median(together),
        "together_last_ttft_ms": statistics.median(last),
        "together_unalike_last_ttft_ms": statistics.median(last_unalike),
    }


def words(tokenizer: Tokenizer, seed: int) -> str:
    """Text of about `PREFIX_TOKENS` tokens that no other seed gives."""
    random, text = np.random.default_rng(seed), f"List {seed}:"
    while len(tokenizer.encode(text)) < PREFIX_TOKENS:
        text += f" {random.choice(['red', 'green', 'blue', 'old', 'new', 'small', 'large'])} {random.integers(1000)},"
    return text


def plainly(ir: Path, prompts: Sequence[str]) -> list[str]:
    """What the whole model answers to each, every one in an empty cache."""
    tokenizer, whole = Tokenizer.load(ir), Chain([stage_engine(ir, 0, 1, KV_TOKENS)[0]])
    answers = []
    for prompt in prompts:
        whole.engines[0].reset()
        tokens, _ = whole.decode(1, tokenizer.encode(tokenizer.render_chat([("user", prompt)])), ANSWER_TOKENS)
        stream = tokenizer.stream()
        answers.append("".join(map(stream.push, tokens)) + stream.flush())
    return answers


if __name__ == "__main__":
    main()
