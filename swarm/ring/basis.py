"""What a plan was made of, and whether it is time for another: part of `forming`, pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm.protocol.ids import NodeId
from swarm.protocol.messages import Member
from swarm.protocol.plan import Plan
from swarm.ring.choice import STANDING
from swarm.ring.fit import ModelShape
from swarm.ring.plan import PROMISE_COST, rate
from swarm.ring.split import Offer

NOISE = 0.2
"""Share by which a node's memory or speed may differ from what the plan was made of."""

ROUND_TRIP_NOISE_MS = 2.0
"""And its round trip, beside `NOISE`: within a LAN nothing depends on it."""

WORTH = 0.9
"""A plan that is merely better must bring the time per token, all rings busy, down to this share: a new epoch costs a
replay of every session, and layers travel."""


@dataclass(frozen=True, slots=True)
class Basis:
    """The offers of the members that may be given layers, and which process of each made it."""

    offers: tuple[Offer, ...]
    incarnations: dict[NodeId, int]

    @classmethod
    def of(cls, members: Iterable[Member], excluded: Collection[NodeId]) -> Basis:
        standing = [m for m in members if m.state in STANDING and m.node not in excluded]
        return cls(
            tuple(
                Offer(m.node, m.name, m.memory_bytes, m.device, m.speed, m.round_trip_ms, m.engine) for m in standing
            ),
            {m.node: m.incarnation for m in standing},
        )

    def renewed(self, later: Basis) -> set[NodeId]:
        """Who is another process in `later`, or not there."""
        return {node for node, number in self.incarnations.items() if later.incarnations.get(node) != number}

    def differs(self, old: Basis) -> bool:
        """By more than noise."""
        before = {offer.node: offer for offer in old.offers}
        return self.incarnations != old.incarnations or any(
            _moved(before[new.node].memory_bytes, new.memory_bytes)
            or _moved(before[new.node].speed, new.speed)
            or _moved(before[new.node].round_trip_ms, new.round_trip_ms, ROUND_TRIP_NOISE_MS)
            for new in self.offers
        )


def _moved(old: float, new: float, least: float = 0.0) -> bool:
    return abs(new - old) > max(least, NOISE * old)


def outdated(plan: Plan, old: Basis | None, new: Basis, shape: ModelShape | None) -> bool:
    """Whether `plan` cannot go on: there is none, it is of another model, or one of its stages is not what it was.

    `shape` None: leave the model aside.
    """
    if shape is not None and plan.model != shape.manifest:
        return True
    offered = {offer.node: offer.memory_bytes for offer in new.offers}
    for stage in plan.stages:
        if offered.get(stage.node, -1) < stage.bytes:
            return True
        if old is not None and old.incarnations.get(stage.node) != new.incarnations[stage.node]:
            return True
    return False


def worthwhile(new: Plan, current: Plan, basis: Basis, shape: ModelShape) -> bool:
    """Whether a plan that could go on should make way for `new`."""
    if not new.stages or not current.stages:
        return (bool(new.stages), new.missing_bytes) != (bool(current.stages), current.missing_bytes)
    before, after = (rate(shape, basis.offers, plan) for plan in (current, new))
    if before is None or after is None:
        return True
    roomier = new.kv_tokens > current.kv_tokens and after * PROMISE_COST >= before
    return roomier or after * WORTH >= before
