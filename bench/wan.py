"""Slow links: plain decoding, one window at a time and windows in flight, measured, and predicted by the simulator.

Real nodes (`bench.ring`), a core each, their links through a proxy that delays. Three stages need three cores and are
simulated; the prediction for two stands beside the measurement. Both take stage and draft times from
`bench/results/costs.json` (`python -m bench.costs`), texts from `bench.recorded`, and one number from the measurement
itself: how fast the cores were that day, which plain decoding over the fastest link tells. Each round has prompts of
its own, the same for all ways and delays.

``python -m bench.wan [--delay MS]... [--rounds N] [--tokens N] [--plot FILE] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import costs, models, recorded
from bench.plot import Line, Plot
from bench.report import cores, first_in_line, report, spread
from bench.ring import BenchRing, Question, Setup, Stream, bench_ring, together
from bench.simulated import HOP_S, IN_FLIGHT, ONE_WINDOW, PLAIN, reading, simulate
from bench.simulator import Links
from tests.prompts import PROMPTS

DELAYS_MS = (0, 10, 50, 100)
WAYS = {"plain": PLAIN, "one window": ONE_WINDOW, "windows in flight": IN_FLIGHT}
CASES = (*((way, 1) for way in WAYS), ("windows in flight", 2))
"""Way and users."""
ROUNDS = 5
TOKENS = 48
WARMING_TOKENS = 8

Key = tuple[int, str, int]
"""Delay in ms, way, users."""


@dataclass(slots=True)
class Measured:
    rates: list[float] = field(default_factory=list)
    """Tokens per second of all users, of each round."""
    accepted: int = 0
    rejected: int = 0
    """Drafts that were held against the target; what followed a rejected one was not."""
    answers: list[tuple[int, ...]] = field(default_factory=list)
    """The first user's, of each round."""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def add(self, streams: Sequence[Stream]) -> None:
        self.rates.append(together(streams))
        self.answers.append(streams[0].tokens)
        self.accepted += sum(stream.use.accepted for stream in streams)
        self.rejected += sum(stream.use.rejected for stream in streams)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wan", description=__doc__)
    parser.add_argument("--delay", type=int, action="append", help="one way, ms (default: 0, 10, 50 and 100)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"counted (default: {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of each answer (default: {TOKENS})")
    parser.add_argument("--plot", type=Path, help="write the curve as an SVG file")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument(
        "--quick", action="store_true", help="SmolLM2 with n-gram, two delays, one round of 16 tokens, nothing kept"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    delays = (0, 50) if quick else tuple(arguments.delay or DELAYS_MS)
    rounds, tokens = (1, 16) if quick else (arguments.rounds, arguments.tokens)
    found = asyncio.run(measure(delays, rounds, tokens, quick, arguments.first))
    figures = compare(found)
    settings = {"rounds": rounds, "tokens": tokens, "delays_ms": delays, "first": arguments.first}
    if not quick:
        figures["acceptance"] = accepted(found)
        slowness = figures["slowness"] = slower(found)
        predicted = {stages: predict(stages, slowness, delays) for stages in (2, 3)}
        figures |= beside(found, predicted)
        settings["three_stages"] = "simulated"
        if arguments.plot:
            arguments.plot.write_text(plot(found, predicted).svg(), encoding="utf-8")
    report("wan", figures, settings, keep=not quick and delays == DELAYS_MS)


async def measure(delays: Sequence[int], rounds: int, tokens: int, quick: bool, first: bool) -> dict[Key, Measured]:
    """Every way over every link, in turns, after a short round that warms up."""
    target, draft = (models.smollm2(), None) if quick else (models.qwen_int4(), models.draft_int4())
    setup = Setup(target, draft, (cores()[0], cores()[-1]))
    found = {(delay, way, users): Measured() for delay in delays for way, users in CASES}
    async with bench_ring(setup) as ring:
        for way, users in CASES:
            await ask(ring, way, users, 0, WARMING_TOKENS, first)
        for turn, ((delay, way, users), one) in itertools.product(range(rounds), found.items()):
            ring.set_delay(delay / 1000)
            one.add(await ask(ring, way, users, turn, tokens, first))
            print(f"round {turn}: {delay} ms, {way}, {users}: {one.rates[-1]:.2f} tok/s", file=sys.stderr, flush=True)
    return found


async def ask(ring: BenchRing, way: str, users: int, turn: int, tokens: int, first: bool) -> list[Stream]:
    prompts = list(PROMPTS.values())
    with first_in_line(first, ring.processes):
        return await ring.ask(
            [Question(prompts[(turn + user) % len(prompts)], tokens, WAYS[way]) for user in range(users)]
        )


def accepted(found: Mapping[Key, Measured]) -> float:
    """The chance that a draft is right where those before it are."""
    right = sum(one.accepted for one in found.values())
    return right / max(1, right + sum(one.rejected for one in found.values()))


def slower(found: Mapping[Key, Measured]) -> float:
    """Seconds of computing a token on the two nodes, over those of the table of costs."""
    delay = min(delay for delay, _, _ in found)
    links = Links(delay / 1000, HOP_S)
    table = simulate(costs.stage_costs(costs.kept(), 2), 1, PLAIN, links, None)
    on_links_s = 2 * (links.delay_s + links.message_s)
    return (1 / found[delay, "plain", 1].rate - on_links_s) / (1 / table.rate - on_links_s)


def predict(stages: int, slowness: float, delays: Sequence[int]) -> dict[Key, float]:
    """What the simulator says for the same, in tokens per second."""
    measured, texts = costs.kept(), recorded.texts()
    draft = reading(costs.draft_costs(measured).times(slowness), texts)
    table = [one.times(slowness) for one in costs.stage_costs(measured, stages)]
    return {
        (delay, way, users): simulate(table, users, WAYS[way], Links(delay / 1000, HOP_S), draft, texts).rate
        for delay in delays
        for way, users in CASES
    }


def compare(found: Mapping[Key, Measured]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key, one in found.items():
        delay, way, users = key
        base = found[delay, "plain", 1]
        print(f"{delay:4} ms, {way:18} {users} users: {spread(one.rates)} tok/s, {one.rate / base.rate:.2f} of plain")
        figures[f"{name(2, key)}_tokens_per_second"] = one.rate
    farthest = max(delay for delay, _, _ in found)
    full, plain = found[farthest, "windows in flight", 2], found[farthest, "plain", 1]
    figures[f"wan{farthest}"] = full.rate / plain.rate
    figures["wan_identical"] = statistics.mean(one.answers == plain.answers for one in found.values())
    return figures


def beside(found: Mapping[Key, Measured], predicted: Mapping[int, Mapping[Key, float]]) -> dict[str, float]:
    """The predictions, and for two stages how far the measurement is from each."""
    figures: dict[str, float] = {}
    farthest = max(delay for delay, _, _ in found)
    for stages, rates in predicted.items():
        figures |= {f"{name(stages, key)}_predicted": rate for key, rate in rates.items()}
        full, plain = rates[farthest, "windows in flight", 2], rates[farthest, "plain", 1]
        figures[f"wan{farthest}_stages{stages}_predicted"] = full / plain
    off = [one.rate / predicted[2][key] for key, one in found.items()]
    print(f"measured / predicted, 2 stages: {spread(off)}")
    figures["measured_to_predicted"] = statistics.median(off)
    return figures


def name(stages: int, key: Key) -> str:
    delay, way, users = key
    return f"stages{stages}_{delay}ms_{way.replace(' ', '_')}_users{users}"


def plot(found: Mapping[Key, Measured], predicted: Mapping[int, Mapping[Key, float]]) -> Plot:
    """One user's speed over the delay: measured lines, and the predictions dashed."""
    lines = []
    for way in WAYS:
        lines.append(Line(way, [(delay, one.rate) for (delay, *case), one in found.items() if case == [way, 1]]))
        rates = [(delay, rate) for (delay, *case), rate in predicted[2].items() if case == [way, 1]]
        lines.append(Line(way, rates, dashed=True))
    return Plot(
        "One user on two PCs over slow links",
        "Qwen2.5-Coder-1.5B INT4, one core a PC. Solid: measured. Dashed: the simulator's prediction.",
        "one-way delay of a link, ms",
        "tok/s",
        lines,
    )


if __name__ == "__main__":
    main()
