"""What the simulator predicts for rings that do not fit on this machine, from costs measured on real shards.

Stages and draft cost what `bench.costs` found on one core; every PC has the draft model. Texts are recorded ones
(`bench.recorded`): drafts, the model's and those of n-gram, are right where they were. "One PC" is the whole model on
one core, one user, no speculation.

``python -m bench.simulated [--pace] [--quick]``
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench import costs, recorded
from bench.clock import RowCosts, World
from bench.recorded import Reading, Text
from bench.report import report
from bench.simulator import Conversation, Draft, Links, Ring, User
from swarm.coordinator.pace import Speculation
from swarm.engine.base import Engine
from swarm.engine.timed import StageTimes, TimedEngine

TOKENS = 128
PROMPT_TOKENS = 40
HOP_S = 0.0005
"""Our own cost of a hop; `bench.hop` measures it."""

_VOCABULARY = 1 << 18

LARGE = (46 / 6, 2.5 / 6)
"""Factors to the costs of target and draft: 70B and 1B by their parameters, on a device six times as fast."""

PLAIN = Speculation(enabled=False)
ONE_WINDOW = Speculation(fixed_depth=1)
IN_FLIGHT = Speculation()


@dataclass(frozen=True, slots=True)
class Run:
    """What came out of a simulated ring."""

    rate: float
    """Tokens per second of all users, while all of them decode."""
    user_rate: float
    """Median of the users'."""
    busy: tuple[float, ...]
    """Share of the time that each stage's core worked, drafts included."""
    wasted: float
    """Share of the decode rows that brought no token, over all stages."""


def simulate(
    stages: Sequence[RowCosts],
    users: int,
    speculation: Speculation,
    links: Links,
    draft: Draft | None,
    texts: Sequence[Text] = (),
) -> Run:
    """`users` answers, one on each PC in turn, all asked at once; with `texts` a round for each of them, those of the
    other users following in order. Rates are the medians of the rounds."""
    count = len(stages)
    engines: list[Engine] = [timed_engine(index == 0, index == count - 1) for index in range(count)]
    if texts:
        engines[-1] = Reading(engines[-1], texts)
    ring = Ring(World(), engines, stages, links, draft)
    prompts = [text.prompt for text in texts] or [tuple(range(n, n + PROMPT_TOKENS)) for n in range(users)]
    found, rates = [], []
    for turn in range(max(1, len(texts))):
        answers = ring.ask(
            [
                User(prompts[(turn + user) % len(prompts)], TOKENS, home=user % count, speculation=speculation)
                for user in range(users)
            ]
        )
        began, ended = _shared(answers)
        tokens = sum(began < time_s <= ended for one in answers for time_s in one.answer.times_s)
        rates.append(tokens / (ended - began))
        found += answers
    rows = sum(stage.load.decode_rows for stage in ring.stages)
    useful = sum(len(one.answer.tokens) - 1 for one in found) * count
    return Run(
        rate=statistics.median(rates),
        user_rate=statistics.median(_rate(one) for one in found),
        busy=tuple(core.busy_s / ring.world.now for core in ring.cores),
        wasted=1 - useful / rows,
    )


def timed_engine(first: bool, last: bool) -> TimedEngine:
    """Takes no time of its own: the simulator counts it."""
    return TimedEngine(first, last, 1 << 18, StageTimes(0.0), _VOCABULARY, sleep=lambda _seconds: None)


def reading(draft_costs: RowCosts, texts: Sequence[Text]) -> Draft:
    """The draft model, as it was recorded."""
    return Draft(lambda: Reading(timed_engine(True, True), texts, draft=True), draft_costs)


def _shared(found: Sequence[Conversation]) -> tuple[float, float]:
    """From when the last user has a first token until the first user is done."""
    times = [one.answer.times_s for one in found]
    return max(one[0] for one in times), min(one[-1] for one in times)


def _rate(one: Conversation) -> float:
    times = one.answer.times_s
    return (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulated", description=__doc__)
    parser.add_argument("--pace", action="store_true", help="hold the adaptive pace against fixed ones (minutes)")
    parser.add_argument("--quick", action="store_true", help="the two figures of bench-protocol alone, nothing kept")
    arguments = parser.parse_args()
    measured = costs.kept()
    figures = office(measured, users=(3,) if arguments.quick else (1, 2, 3, 8))
    figures |= slow_ring(measured)
    if arguments.pace:
        figures |= pace(measured)
    settings = {"tokens": TOKENS, "texts": len(recorded.texts()), "hop_s": HOP_S, "costs": "bench/results/costs.json"}
    report("simulated", figures, settings, simulated=True, keep=not arguments.quick)


def office(measured: dict[str, float], users: Sequence[int]) -> dict[str, float]:
    """Rings of 2 to 4 PCs on a LAN against one PC: all of its users, plain and with the full stack."""
    texts, links = recorded.texts(), Links(message_s=HOP_S)
    draft = reading(costs.draft_costs(measured), texts)
    one_pc = simulate(costs.stage_costs(measured, 1), 1, PLAIN, links, None, texts)
    figures = {"one_pc_tokens_per_second": one_pc.rate}
    for count in (1, 2, 3, 4):
        stages = costs.stage_costs(measured, count)
        for number in users:
            name = f"stages{count}_users{number}"
            figures |= compare(f"{name}_plain", simulate(stages, number, PLAIN, links, None, texts), one_pc)
            figures |= compare(f"{name}_full", simulate(stages, number, IN_FLIGHT, links, draft, texts), one_pc)
    return figures | {"three_nodes_three_users": figures["stages3_users3_full"]}


def slow_ring(measured: dict[str, float]) -> dict[str, float]:
    """Four stages, 32 ms round trip, one user, against plain decoding: this pair, and 70B with a draft of 1B."""
    texts, links = recorded.texts(), Links(0.016, HOP_S)
    figures: dict[str, float] = {}
    for name, target, draft in (("four_stages_spec", 1.0, 1.0), ("four_stages_70b_spec", *LARGE)):
        stages = [one.times(target) for one in costs.stage_costs(measured, 4)]
        model = reading(costs.draft_costs(measured).times(draft), texts)
        base = simulate(stages, 1, PLAIN, links, None, texts)
        figures |= compare(name, simulate(stages, 1, IN_FLIGHT, links, model, texts), base)
    return figures


def compare(name: str, run: Run, base: Run) -> dict[str, float]:
    ratio = run.rate / base.rate
    print(
        f"{name}: {ratio:.2f}, {run.rate:.1f} tok/s, each {run.user_rate:.1f}; "
        f"cores busy {' '.join(f'{share:.0%}' for share in run.busy)}, rows wasted {run.wasted:.0%}",
        flush=True,
    )
    return {name: ratio, f"{name}_user_tokens_per_second": run.user_rate, f"{name}_wasted_rows": run.wasted}


def pace(measured: dict[str, float]) -> dict[str, float]:
    """The adaptive pace over plain decoding, and over the best of that and some fixed ones, in rings of all kinds."""
    texts, shares, gains = recorded.texts(), [], []
    for count, delay_ms, users in itertools.product((1, 2, 4), (0, 50), (1, 2, 3, 4, 8)):
        if count == 1 and delay_ms:
            continue
        stages, links = costs.stage_costs(measured, count), Links(delay_ms / 1000, HOP_S)
        draft = reading(costs.draft_costs(measured), texts)
        ways = [Speculation(fixed_k=k, fixed_depth=depth) for k in (1, 2, 4) for depth in (1, 4)]
        plain, *fixed = [simulate(stages, users, one, links, draft, texts).rate for one in (PLAIN, *ways)]
        adaptive = simulate(stages, users, IN_FLIGHT, links, draft, texts).rate
        gains.append(adaptive / plain)
        shares.append(adaptive / max(plain, *fixed))
        ring = f"{count} stages, {delay_ms} ms, {users} users"
        print(f"{ring}: {gains[-1]:.2f} of plain, {shares[-1]:.2f} of the best fixed one", flush=True)
    figures = {"pace_to_best_median": statistics.median(shares), "pace_to_best_least": min(shares)}
    return figures | {"pace_to_plain_median": statistics.median(gains), "pace_to_plain_least": min(gains)}


if __name__ == "__main__":
    main()
