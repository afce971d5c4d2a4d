"""What the swarm agreed on: stages of layer ranges, in ring order."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Stages in ring order, covering every layer once; or none, and how much memory is missing."""

    epoch: Epoch
    model: BlobId | None
    """The manifest's id."""
    stages: tuple[Stage, ...] = ()
    kv_tokens: int = 0
    """Positions of KV cache that every stage holds: promised sessions times context."""
    missing_bytes: int = 0
    """Memory the swarm lacks to hold the model, where there are no stages."""
    predicted_token_ms: float = 0.0
    """One user, one token: compute and hops (see `ring.plan`)."""
    note: str = ""
    """Why it came out like this, in a few words for the screen."""

    def stage_of(self, node: NodeId) -> Stage | None:
        return next((stage for stage in self.stages if stage.node == node), None)

    def after(self, node: NodeId) -> Stage | None:
        """The stage that `node` sends to; None after the last one."""
        nodes = [stage.node for stage in self.stages]
        index = nodes.index(node) + 1
        return self.stages[index] if index < len(nodes) else None


NO_PLAN = Plan(NO_EPOCH, None)
