"""What a screen, `/status` and `status --json` show: one frozen picture of the swarm as a node sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.protocol.ids import NodeId
from swarm.protocol.messages import MemberState, Phase
from swarm.protocol.plan import NO_PLAN, Plan


@dataclass(frozen=True, slots=True)
class MemberView:
    node: NodeId
    name: str
    state: MemberState
    memory_bytes: int
    device: str
    round_trip_ms: float | None = None
    """To this member from here; None for the node itself and where it was not measured yet."""
    phase: Phase = Phase.IDLE
    label: str = ""
    done: int = 0
    total: int = 0
    rate: float = 0.0
    """Progress of `phase`, as in `messages.Progress`."""
    step_ms: float | None = None
    hop_ms: float | None = None
    tokens_per_second: float = 0.0
    sessions: int = 0
    waiting: int = 0
    resident_bytes: int = 0

    @property
    def seconds_left(self) -> float | None:
        """Of `phase` at its present rate; None where that is not known."""
        if self.phase is Phase.IDLE or self.total <= 0 or self.rate <= 0:
            return None
        return max(0, self.total - self.done) / self.rate


@dataclass(frozen=True, slots=True)
class SpeculationView:
    """How this node's answers are speculated; figures are of all of them since it started."""

    enabled: bool = True
    draft: str = ""
    """The model that drafts; empty: none does."""
    no_draft: str = ""
    """Why none does; empty where one does, or is on its way."""
    windows: int = 0
    ngram_drafted: int = 0
    ngram_accepted: int = 0
    model_drafted: int = 0
    model_accepted: int = 0
    rejected: int = 0
    wasted_rows: int = 0
    k: float = 0.0
    """Mean drafted rows of a window."""
    depth: float = 0.0
    """Mean windows in flight."""
    gain: float = 1.0
    """Speed against plain decoding."""

    @property
    def drafted(self) -> int:
        return self.ngram_drafted + self.model_drafted

    @property
    def accepted(self) -> int:
        return self.ngram_accepted + self.model_accepted


@dataclass(frozen=True, slots=True)
class Snapshot:
    ready: bool
    """A plan with stages is in force and this node can reach its first stage."""
    reason: str
    """Where it is not ready: what it waits for, in one line."""
    swarm: str
    code: str
    """The pairing code; empty in an open swarm."""
    open: bool
    model: str
    """Name of the model; empty until it is known."""
    node: NodeId
    name: str
    api: str
    """``http://127.0.0.1:8000`` of this node; empty until it listens."""
    addresses: tuple[str, ...]
    """Where its links listen."""
    members: tuple[MemberView, ...] = ()
    plan: Plan = NO_PLAN
    forming: Plan | None = None
    """The plan that is being prepared, where one is."""
    notices: tuple[str, ...] = ()
    """What a person should know, newest last: another swarm with this name, a member that left, …"""
    uptime_s: float = 0.0
    tokens_per_second: float = 0.0
    """Answered by this node's own sessions."""
    queued: int = 0
    """Questions asked here that are in line for the ring's KV cache."""
    history: tuple[float, ...] = field(default=())
    """Tokens per second of the last minute, oldest first, one value a second."""
    fetched: tuple[tuple[NodeId, int], ...] = ()
    """Bytes of the model that this node got from each peer since it started."""
    speculation: SpeculationView = field(default_factory=SpeculationView)

    def member(self, node: NodeId) -> MemberView | None:
        return next((member for member in self.members if member.node == node), None)
