"""A long prompt arrives while others read: what it does to their time per token.

Three users decode on two nodes, a core each; then a prompt of 4,000 tokens comes. Their 95th percentile of the time
between two tokens until the prompt has its first token, over the same before it came.

``python -m bench.longprompt [--model qwen|smollm2] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import openvino_genai

from bench import models
from bench.clients import Stream, ask
from bench.nodes import prompt_of, ring_of
from bench.report import cores, first_in_line, percentile, pin, report, spread

PROMPT_TOKENS = 4000
READERS = 3
ROUNDS = 3
BEFORE_S = 8.0
"""The readers have so long for themselves."""

READERS_TOKENS = 700
"""Enough to be still reading when the prompt has its first token."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.longprompt", description=__doc__)
    parser.add_argument("--model", choices=["qwen", "smollm2"], default="qwen")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default: {ROUNDS})")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="one round with a prompt of 300 tokens, nothing kept")
    arguments = parser.parse_args()
    quick = arguments.quick
    length, rounds = (300, 1) if quick else (PROMPT_TOKENS, arguments.rounds)
    node_cores = (cores()[0], cores()[-1])
    pin(node_cores[0])
    ir = models.qwen_int4() if arguments.model == "qwen" else models.smollm2()
    figures = asyncio.run(measure(ir, node_cores, length, rounds, arguments.first))
    settings = {
        "model": arguments.model,
        "rounds": rounds,
        "prompt_tokens": length,
        "readers": READERS,
        "first": arguments.first,
    }
    report("longprompt", figures, settings, keep=not quick)


async def measure(ir: Path, node_cores: Sequence[int], length: int, rounds: int, first: bool) -> dict[str, float]:
    prompt = _text(ir, length)
    times: list[float] = []
    figures: dict[str, list[float]] = {"before_p95_ms": [], "during_p95_ms": [], "ttft_ms": []}
    async with ring_of(ir, node_cores) as (ring, _):
        await ask(ring.apis[0], prompt_of(0), 16)
        for number in range(rounds):
            with first_in_line(first, ring.processes):
                streams = [asyncio.ensure_future(ask(ring.apis[0], prompt_of(user), READERS_TOKENS))
                           for user in range(READERS)]  # fmt: skip
                await anyio.sleep(BEFORE_S)  # not for a condition: this is the time that is compared with
                # Each round's prompt begins differently: nothing of it is known to the ring.
                long = await ask(ring.apis[0], f"{number}. {prompt}", 1)
                readers = await asyncio.gather(*streams)
            before, during = gaps(readers, long)
            p95 = percentile(before, 0.95), percentile(during, 0.95)
            times.append(p95[1] / p95[0])
            for name, value in zip(figures, (*p95, (long.pieces[0] - long.asked) * 1000), strict=True):
                figures[name].append(value)
            print(f"round {number + 1}: {p95[0]:.0f} ms before, {p95[1]:.0f} ms during", file=sys.stderr, flush=True)
    print(f"their p95 with the long prompt over that without: {spread(times)}")
    return {"longprompt": statistics.median(times), **{name: statistics.median(all_) for name, all_ in figures.items()}}


def gaps(readers: Sequence[Stream], long: Stream) -> tuple[list[float], list[float]]:
    """Milliseconds between two pieces of a reader's text: (before the long prompt came, until its first token)."""
    begun = max(reader.pieces[0] for reader in readers)
    before, during = [], []
    for reader in readers:
        for earlier, later in itertools.pairwise(reader.pieces):
            if begun < earlier and later < long.asked:
                before.append((later - earlier) * 1000)
            elif long.asked < later < long.pieces[0]:
                during.append((later - earlier) * 1000)
    if not before or not during:
        raise SystemExit("the readers were done before the long prompt had its first token: nothing to compare")
    return before, during


def _text(ir: Path, tokens: int) -> str:
    """English of about so many tokens."""
    tokenizer = openvino_genai.Tokenizer(str(ir))
    text = Path(__file__).with_name("texts").joinpath("prose.txt").read_text(encoding="utf-8")
    ids = list(tokenizer.encode(text).input_ids.data[0])
    ids = (ids * (tokens // len(ids) + 1))[:tokens]
    decoded: str = tokenizer.decode(ids)
    return decoded


if __name__ == "__main__":
    main()
