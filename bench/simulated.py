"""What the simulator predicts for rings that do not fit on this machine, from costs measured on real shards.

Stages and draft cost what `bench.costs` found on one core; every PC has the draft model; its guesses are right as
often as they were in `bench.speculation`. "One PC" is the whole model on one core, one user, no speculation.

``python -m bench.simulated [--acceptance A] [--pace] [--quick]``
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench import costs
from bench.clock import RowCosts, World
from bench.report import report
from bench.simulator import Conversation, Draft, Forgetful, Links, Ring, User
from swarm.coordinator.pace import Speculation
from swarm.engine.timed import StageTimes, TimedEngine

TOKENS = 128
PROMPT_TOKENS = 40
ACCEPTANCE = 0.75
HOP_S = 0.0005
"""Our own cost of a hop; `bench.hop` measures it."""

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
    stages: Sequence[RowCosts], users: int, speculation: Speculation, links: Links, draft: Draft | None
) -> Run:
    """`users` answers, one on each PC in turn, all asked at once."""
    count = len(stages)
    engines = [timed_engine(index == 0, index == count - 1) for index in range(count)]
    ring = Ring(World(), engines, stages, links, draft)
    asked = [
        User(tuple(range(number, number + PROMPT_TOKENS)), TOKENS, home=number % count, speculation=speculation)
        for number in range(users)
    ]
    found = ring.ask(asked)
    began, ended = _shared(found)
    tokens = sum(began < time_s <= ended for one in found for time_s in one.answer.times_s)
    rows = sum(stage.load.decode_rows for stage in ring.stages)
    useful = sum(len(one.answer.tokens) - 1 for one in found) * count
    return Run(
        rate=tokens / (ended - began),
        user_rate=statistics.median(_rate(one) for one in found),
        busy=tuple(core.busy_s / ring.world.now for core in ring.cores),
        wasted=1 - useful / rows,
    )


def timed_engine(first: bool, last: bool) -> TimedEngine:
    """Takes no time of its own: the simulator counts it."""
    return TimedEngine(first, last, 1 << 18, StageTimes(0.0), sleep=lambda _seconds: None)


def forgetful(draft_costs: RowCosts, acceptance: float) -> Draft:
    return Draft(lambda: Forgetful(timed_engine(True, True), acceptance), draft_costs)


def _shared(found: Sequence[Conversation]) -> tuple[float, float]:
    """From when the last user has a first token until the first user is done."""
    times = [one.answer.times_s for one in found]
    return max(one[0] for one in times), min(one[-1] for one in times)


def _rate(one: Conversation) -> float:
    times = one.answer.times_s
    return (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulated", description=__doc__)
    parser.add_argument("--acceptance", type=float, default=ACCEPTANCE, help=f"of a drafted token ({ACCEPTANCE})")
    parser.add_argument("--pace", action="store_true", help="hold the adaptive pace against fixed ones (minutes)")
    parser.add_argument("--quick", action="store_true", help="the two figures of bench-protocol alone, nothing kept")
    arguments = parser.parse_args()
    measured, acceptance = costs.kept(), arguments.acceptance
    figures = office(measured, acceptance, users=(3,) if arguments.quick else (1, 2, 3, 8))
    figures |= slow_ring(measured, acceptance)
    if arguments.pace:
        figures |= pace(measured)
    settings = {"tokens": TOKENS, "acceptance": acceptance, "hop_s": HOP_S, "costs": "bench/results/costs.json"}
    report("simulated", figures, settings, simulated=True, keep=not arguments.quick)


def office(measured: dict[str, float], acceptance: float, users: Sequence[int]) -> dict[str, float]:
    """Rings of 2 to 4 PCs on a LAN against one PC: all of its users, plain and with the full stack."""
    draft, links = forgetful(costs.draft_costs(measured), acceptance), Links(message_s=HOP_S)
    one_pc = simulate(costs.stage_costs(measured, 1), 1, PLAIN, links, None)
    figures = {"one_pc_tokens_per_second": one_pc.rate}
    for count in (2, 3, 4):
        stages = costs.stage_costs(measured, count)
        for number in users:
            name = f"stages{count}_users{number}"
            figures |= compare(f"{name}_plain", simulate(stages, number, PLAIN, links, None), one_pc)
            figures |= compare(f"{name}_full", simulate(stages, number, IN_FLIGHT, links, draft), one_pc)
    return figures | {"three_nodes_three_users": figures["stages3_users3_full"]}


def slow_ring(measured: dict[str, float], acceptance: float) -> dict[str, float]:
    """Four stages, 32 ms round trip, one user, against plain decoding: this pair, and 70B with a draft of 1B."""
    links = Links(0.016, HOP_S)
    figures: dict[str, float] = {}
    for name, target, draft in (("four_stages_spec", 1.0, 1.0), ("four_stages_70b_spec", *LARGE)):
        stages = [one.times(target) for one in costs.stage_costs(measured, 4)]
        model = forgetful(costs.draft_costs(measured).times(draft), acceptance)
        base = simulate(stages, 1, PLAIN, links, None)
        figures |= compare(name, simulate(stages, 1, IN_FLIGHT, links, model), base)
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
    """The adaptive pace over the best of plain decoding and some fixed (k, depth), in rings of all kinds."""
    shares = []
    for count, delay_ms, users, acceptance in itertools.product((1, 2, 4), (0, 50), (1, 3), (0.6, 0.75, 0.9)):
        if count == 1 and delay_ms:
            continue
        stages, links = costs.stage_costs(measured, count), Links(delay_ms / 1000, HOP_S)
        draft = forgetful(costs.draft_costs(measured), acceptance)
        fixed = [Speculation(fixed_k=k, fixed_depth=depth) for k in (1, 2, 4) for depth in (1, 4)]
        best = max(simulate(stages, users, one, links, draft).rate for one in (PLAIN, *fixed))
        adaptive = simulate(stages, users, IN_FLIGHT, links, draft).rate
        shares.append(adaptive / best)
        ring = f"{count} stages, {delay_ms} ms, {users} users, acceptance {acceptance}"
        print(f"{ring}: adaptive {adaptive:.1f}, best fixed {best:.1f} tok/s: {shares[-1]:.2f}", flush=True)
    return {"pace_to_best_median": statistics.median(shares), "pace_to_best_least": min(shares)}


if __name__ == "__main__":
    main()
