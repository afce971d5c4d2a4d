"""The best ring of some PCs under one promise of KV: which of them, in which order, with which layers.

It minimises the *bottleneck*, the largest compute plus hop time of a stage: a saturated pipeline gives one token
per bottleneck. Two things bound it: one user's token time is at most `MAX_SLOWDOWN` times that of the best PC alone,
and a further stage must bring at least `MIN_GAIN` of what one more equal PC without hops would bring. So equal PCs on a
LAN share the layers evenly, and a PC that would slow the others down is left over.

Where the layers fit is `fit`'s part, in bytes; this module chooses.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import fsum

from swarm.protocol.config import PAGED
from swarm.protocol.ids import NodeId
from swarm.protocol.plan import Plan, Stage
from swarm.ring.fit import Load, ModelShape, arrange, fitting_order

MAX_SLOWDOWN = 2.0
"""One user's token through the ring takes at most this many times as long as on the best PC alone."""

MIN_GAIN = 0.25
"""Going from j to k stages must make the ring faster by at least this share of the ideal k/j - 1."""

SPEED_STEP = 1.25
"""Speeds are noisy measurements: PCs within this factor of each other count as equal and get equal shares."""

HOP_OVERHEAD_MS = 0.5
"""Our own part of a hop beside the wire: framing, two event loops, waking the inference thread."""

UNKNOWN_SPEED = 1e9
"""Bytes per second of a node without a measurement, where no other node has one: a slow laptop."""

TIE = 1.03
"""Bottlenecks within this factor are the same; then the plan that moves the fewest bytes is taken."""

EXHAUSTIVE_NODES = 4
"""Up to this many nodes every subset in every order is tried (64 of them); beyond, the best k by share."""

PRECISION = 1e-3
"""The bottleneck is searched to this share of itself, far below the noise."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one node brings."""

    node: NodeId
    name: str
    memory_bytes: int
    device: str
    speed: float
    """Weight bytes per second in a decode step; 0 where it was not measured."""
    round_trip_ms: float = 0.0
    """Median to the other nodes; 0 where it was not measured."""
    engine: str = PAGED


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a row of stages will do."""

    bottleneck_ms: float
    """Largest compute plus hop of a stage; its inverse is the saturated rate."""
    token_ms: float
    """One user, one token: all compute and all hops, the one back to the coordinator included."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring that fits, and what it will do."""

    stages: tuple[Stage, ...]
    prediction: Prediction
    moved: int
    """Bytes that nodes would have to get because the previous plan gave them others."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One KV promise on the nodes in their stable order; indices point into `offers` and `speeds`."""

    model: ModelShape
    kv_tokens: int
    load: Load
    offers: Sequence[Offer]
    speeds: Sequence[float]
    previous: Plan | None

    def without(self, ring: Ring) -> Problem:
        """The same for the nodes that are not in `ring`."""
        used = {stage.node for stage in ring.stages}
        left = [index for index, offer in enumerate(self.offers) if offer.node not in used]
        offers, speeds = [self.offers[i] for i in left], [self.speeds[i] for i in left]
        return replace(self, offers=offers, speeds=speeds)

    def work(self, order: Sequence[int], bottleneck_ms: float) -> list[float]:
        """Bytes each node may stream with no stage above the bottleneck. A node's own link stands for its hop."""
        hops = self.hops(order)
        return [self.speeds[i] * (bottleneck_ms - hop) / 1e3 for i, hop in zip(order, hops, strict=True)]

    def hops(self, order: Sequence[int]) -> list[float]:
        return [_own_hop(self.offers[i]) for i in order] if len(order) > 1 else [0.0]


def best_ring(problem: Problem, most: int) -> Ring | None:
    """The best of at most `most` stages; None where none fits."""
    rescue = fitting_order(problem.load, [offer.memory_bytes for offer in problem.offers])
    if rescue is None:
        return None
    by_count: dict[int, list[Ring]] = {}
    for order in _orders(problem, rescue, most):
        candidate = _balanced(problem, order)
        if candidate is not None and len(candidate.stages) <= most:
            by_count.setdefault(len(candidate.stages), []).append(candidate)
    alone = min((c.prediction.token_ms for c in by_count.get(1, ())), default=float("inf"))
    chosen: Ring | None = None
    for count in sorted(by_count):
        allowed = [c for c in by_count[count] if c.prediction.token_ms <= alone * MAX_SLOWDOWN]
        if not allowed:
            continue
        fastest = min(c.prediction.bottleneck_ms for c in allowed)
        tied = [c for c in allowed if c.prediction.bottleneck_ms <= fastest * TIE]
        best = min(tied, key=lambda c: c.moved)
        needed = 1 + MIN_GAIN * (count / len(chosen.stages) - 1) if chosen else 0.0
        if chosen is None or best.prediction.bottleneck_ms * needed <= chosen.prediction.bottleneck_ms:
            chosen = best
    return chosen


def _orders(problem: Problem, rescue: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Rows of nodes worth trying, those in the stable order first. `rescue` is known to fit."""
    nodes = range(len(problem.offers))
    if len(nodes) <= EXHAUSTIVE_NODES:
        for count in range(1, min(len(nodes), most) + 1):
            yield from permutations(nodes, count)
        return
    for index in nodes:
        yield (index,)
    for count in _counts(min(len(nodes), len(problem.model.layer_bytes), most)):
        yield _most_useful(problem, count)
    yield rescue


def _counts(most: int) -> list[int]:
    """Numbers of stages to try, from 2: each up to 16, then in steps of an eighth, and all."""
    counts = list(range(2, min(most, 16) + 1))
    while counts and counts[-1] < most:
        counts.append(min(most, counts[-1] + counts[-1] // 8))
    return counts


def _most_useful(problem: Problem, count: int) -> list[int]:
    """The `count` nodes that together cover the model with the smallest bottleneck, layers taken as divisible."""
    load, nodes = problem.load, range(len(problem.offers))
    memory, compute = max(1, load.memory[-1]), max(1, load.compute_total)
    room = [max(0, offer.memory_bytes - load.workspace) / memory for offer in problem.offers]
    rate = [speed / compute / 1e3 for speed in problem.speeds]
    hops = [_own_hop(offer) for offer in problem.offers]

    def shares(bottleneck_ms: float) -> list[float]:
        return [min(room[i], rate[i] * max(0.0, bottleneck_ms - hops[i])) for i in nodes]

    high = max(1 / rate[i] + hops[i] for i in nodes)
    low = 0.0
    while high - low > high * PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if fsum(heapq.nlargest(count, shares(middle))) >= 1 else (middle, high)
    best = shares(high)
    # Such a row may still not fit: embedding, head and whole layers are not in the shares.
    return sorted(sorted(nodes, key=lambda i: (-best[i], i))[:count])


def _balanced(problem: Problem, order: Sequence[int]) -> Ring | None:
    """The row `order` with its layers split for the smallest bottleneck; None where it cannot hold them.

    Nodes may remain without a layer. Where the row does not fit, the one that suits embedding and head best is tried.
    """
    load, memory = problem.load, [problem.offers[i].memory_bytes for i in order]
    if arrange(load, memory) is None:
        order = _roomy_ends(problem, order)
        memory = [problem.offers[i].memory_bytes for i in order]
        if arrange(load, memory) is None:
            return None
    speed = fsum(problem.speeds[i] for i in order)
    # Nobody waits and nothing is indivisible: no split of this row is faster.
    low = high = load.compute_total / speed * 1e3
    step, split = high * PRECISION, None
    while split is None:
        low, high, step = high, high + step, step * 2
        split = arrange(load, memory, problem.work(order, high))
    while high - low > high * PRECISION:
        middle = (low + high) / 2
        tighter = arrange(load, memory, problem.work(order, middle))
        if tighter is None:
            low = middle
        else:
            high, split = middle, tighter
    used = [order[index] for index, _, _ in split]
    ranges = [(start, end) for _, start, end in split]
    bounds = [problem.work(order, high)[index] for index, _, _ in split]
    return _candidate(problem, used, _evened(problem, used, bounds) or ranges)


def _roomy_ends(problem: Problem, order: Sequence[int]) -> list[int]:
    """`order` with the two largest nodes at its ends: the first stage holds the embedding, the last the head."""
    large = sorted(order, key=lambda i: (-problem.offers[i].memory_bytes, i))[:2]
    return [*large[1:], *(i for i in order if i not in large), large[0]]


def _evened(problem: Problem, used: Sequence[int], bounds: Sequence[float]) -> list[tuple[int, int]] | None:
    """The same row with every stage near its share of the work, where that keeps to memory and the same `bounds`.

    `arrange` fills from the front, which would leave the remainder to the last stage.
    """
    load, last = problem.load, len(used) - 1
    ranges: list[tuple[int, int]] = []
    start = 0
    for position, node in enumerate(used[:-1]):
        share = problem.speeds[node] / fsum(problem.speeds[i] for i in used[position:])
        target = load.compute(start, load.layers, True) * share
        end = start + 1
        while end < load.layers - (last - position):
            short, long = target - load.compute(start, end, False), load.compute(start, end + 1, False) - target
            if long > short:
                break
            end += 1
        ranges.append((start, end))
        start = end
    ranges.append((start, load.layers))
    fits = all(
        load.fits(problem.offers[node].memory_bytes, bound, start, end)
        for node, bound, (start, end) in zip(used, bounds, ranges, strict=True)
    )
    return ranges if fits else None


def _candidate(problem: Problem, used: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Ring:
    load = problem.load
    stages = []
    compute = []
    for index, (start, end) in zip(used, ranges, strict=True):
        offer = problem.offers[index]
        stages.append(Stage(offer.node, offer.name, start, end, offer.device, load.stage_memory(start, end)))
        compute.append(load.compute(start, end, end == load.layers) / problem.speeds[index] * 1e3)
    prediction = forecast([problem.offers[index] for index in used], compute)
    return Ring(tuple(stages), prediction, _moved(problem, stages))


def forecast(used: Sequence[Offer], compute_ms: Sequence[float]) -> Prediction:
    """The coordinator is taken to sit at the first stage: any node may be one."""
    hops = [0.0]
    if len(used) > 1:
        following = [*used[1:], used[0]]
        hops = [max(_own_hop(a), _own_hop(b)) for a, b in zip(used, following, strict=True)]
    bottleneck = max(c + h for c, h in zip(compute_ms, hops, strict=True))
    return Prediction(bottleneck, fsum(compute_ms) + fsum(hops))


def _own_hop(offer: Offer) -> float:
    """Milliseconds one way over this node's link."""
    return max(0.0, offer.round_trip_ms) / 2 + HOP_OVERHEAD_MS


def _moved(problem: Problem, stages: Sequence[Stage]) -> int:
    model, previous = problem.model, problem.previous
    sizes = {"embedding": model.embedding_bytes, "head": model.head_bytes}
    moved = 0
    for stage in stages:
        old = previous.stage_of(stage.node) if previous and previous.model == model.manifest else None
        held = old.layers if old else range(0)
        moved += sum(model.layer_bytes[layer] for layer in stage.layers if layer not in held)
        moved += sum(sizes[end] for end in _ends(model, stage) - (_ends(model, old) if old else set()))
    return moved


def _ends(model: ModelShape, stage: Stage) -> set[str]:
    """What a stage holds beside its layers."""
    found = {"embedding"} if stage.start == 0 else set()
    if stage.end == len(model.layer_bytes):
        found |= {"head", "embedding"} if model.head_uses_embedding else {"head"}
    return found


def quantized_speeds(offers: Sequence[Offer]) -> list[float]:
    """Speeds in the order of `offers`, with those within `SPEED_STEP` of their group's fastest made equal.

    Groups start at the fastest, so two PCs that differ by noise do not fall on two sides of a fixed step.
    """
    measured = [offer.speed for offer in offers if offer.speed > 0]
    unknown = min(measured, default=UNKNOWN_SPEED)
    raw = [offer.speed if offer.speed > 0 else unknown for offer in offers]
    speeds = [0.0] * len(raw)
    group: list[int] = []
    for index in [*sorted(range(len(raw)), key=lambda i: -raw[i]), -1]:
        if group and (index < 0 or raw[index] * SPEED_STEP < raw[group[0]]):
            mean = fsum(raw[i] for i in sorted(group, key=lambda i: raw[i])) / len(group)
            for member in group:
                speeds[member] = mean
            group = []
        group.append(index)
    return speeds
