"""What the swarm agreed on: rings of stages, each a range of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from swarm.protocol.config import PAGED
from swarm.protocol.ids import NO_EPOCH, BlobId, Epoch, NodeId


@dataclass(frozen=True, slots=True)
class Stage:
    """One node's layers: the half-open range ``[start, end)``."""

    node: NodeId
    name: str
    start: int
    end: int
    device: str
    bytes: int
    """Weights and KV that the plan counts for this stage."""

    @property
    def layers(self) -> range:
        return range(self.start, self.end)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rings one behind the other, each covering every layer once; or none, and how much memory is missing."""

    epoch: Epoch
    model: BlobId | None
    """The manifest's id."""
    stages: tuple[Stage, ...] = ()
    """In ring order. A stage that starts at layer 0 begins a ring; a node is in one ring at most."""
    kv_tokens: int = 0
    """Positions of KV cache that every stage holds: promised sessions times context."""
    missing_bytes: int = 0
    """Memory the swarm lacks to hold the model, where there are no stages."""
    predicted_token_ms: float = 0.0
    """One user, one token, on the first ring: compute and hops (see `ring.plan`)."""
    note: str = ""
    """Why it came out like this, in a few words for the screen."""
    ring_token_ms: tuple[float, ...] = ()
    """`predicted_token_ms` of each ring; empty where nobody predicted."""
    engine: str = PAGED
    """What every stage runs, one of `config.ENGINES`: their last bits differ, so that a ring has one of them."""
    ring_epochs: tuple[Epoch, ...] = ()
    """Since when each ring has been as it is, which is what its segments carry; empty: all since `epoch`."""

    @property
    def rings(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of each ring."""
        starts = [index for index, stage in enumerate(self.stages) if stage.start == 0]
        return tuple(self.stages[a:b] for a, b in pairwise([*starts, len(self.stages)]))

    def ring(self, index: int) -> Plan:
        """This plan with one of its rings only, under that ring's epoch: what its stages and sessions see."""
        token_ms = self.ring_token_ms[index : index + 1]
        predicted = token_ms[0] if token_ms else self.predicted_token_ms
        epoch = self.ring_epochs[index] if self.ring_epochs else self.epoch
        return replace(
            self,
            epoch=epoch,
            stages=self.rings[index],
            predicted_token_ms=predicted,
            ring_token_ms=token_ms,
            ring_epochs=(),
        )

    def has_ring(self, ring: Plan) -> bool:
        """Whether this plan has the one ring of `ring` as it was: its caches are still there."""
        epochs = self.ring_epochs or (self.epoch,) * len(self.rings)
        return (ring.epoch, ring.stages) in zip(epochs, self.rings, strict=True)

    def ring_of(self, node: NodeId) -> int | None:
        """The index of the ring that `node` is in."""
        rings = enumerate(self.rings)
        return next((index for index, stages in rings if any(stage.node == node for stage in stages)), None)

    def stage_of(self, node: NodeId) -> Stage | None:
        return next((stage for stage in self.stages if stage.node == node), None)

    def after(self, node: NodeId) -> Stage | None:
        """The stage that `node` sends to; None after the last of its ring."""
        index = [stage.node for stage in self.stages].index(node) + 1
        return self.stages[index] if index < len(self.stages) and self.stages[index].start > 0 else None


NO_PLAN = Plan(NO_EPOCH, None)
