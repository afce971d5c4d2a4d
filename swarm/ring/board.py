"""What this node knows of the others' work, for screens: progress, stage reports, notices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import fsum

from swarm.protocol.ids import Epoch, NodeId
from swarm.protocol.limits import MAX_SESSIONS_PER_STAGE
from swarm.protocol.messages import Member, Phase, Progress, StageReport
from swarm.protocol.plan import Plan
from swarm.protocol.snapshot import MemberView
from swarm.ring.pairing import OPEN_FINGERPRINT
from swarm.ring.port import RingLoad

NOTICES_KEPT = 20

_NO_PROGRESS = (Phase.IDLE, "", 0, 0, 0.0)


@dataclass(slots=True)
class Board:
    """The last word of every node."""

    progress: dict[NodeId, Progress] = field(default_factory=dict)
    reports: dict[NodeId, StageReport] = field(default_factory=dict)
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=NOTICES_KEPT))

    def notice(self, text: str) -> None:
        """Keep what a person should know; the same text twice in a row once."""
        if not self.notices or self.notices[-1] != text:
            self.notices.append(text)

    def keep_only(self, nodes: set[NodeId]) -> None:
        for table in (self.progress, self.reports):
            for node in [node for node in table if node not in nodes]:
                del table[node]

    def sessions_on(self, epoch: Epoch, ring: int, besides: NodeId) -> int:
        """Sessions that all but `besides` run on a ring of the plan of `epoch`. A peer may say anything: each counts
        up to what a stage holds."""
        told = [r for node, r in self.reports.items() if node != besides and r.epoch == epoch]
        counts = [report.ring_sessions[ring] for report in told if ring < len(report.ring_sessions)]
        return sum(min(max(0, count), MAX_SESSIONS_PER_STAGE) for count in counts)

    def load(self, plan: Plan, ring: int, node: NodeId, round_trip: Callable[[NodeId], float | None]) -> RingLoad:
        """What is known of a ring of `plan`; `round_trip` is `node`'s own to another, in ms."""
        stages = plan.rings[ring]
        first, last = (0.0 if s.node == node else round_trip(s.node) or 0.0 for s in (stages[0], stages[-1]))
        told = [self.reports[stage.node].hop_ms for stage in stages[:-1] if stage.node in self.reports]
        hops = fsum(max(0.0, hop) for hop in told)
        return RingLoad(self.sessions_on(plan.epoch, ring, node), first, (first + last) / 2 + hops)

    def busy_outside(self, names: dict[NodeId, str]) -> str:
        """The first of the nodes of `names` that is getting a model from outside."""
        busy = (Phase.DOWNLOAD, Phase.CONVERT)
        return next((names[node] for node, now in self.progress.items() if node in names and now.phase in busy), "")

    def views(self, members: Sequence[Member], round_trips: dict[NodeId, float | None]) -> tuple[MemberView, ...]:
        return tuple(self._view(member, round_trips.get(member.node)) for member in members)

    def _view(self, member: Member, round_trip_ms: float | None) -> MemberView:
        now = self.progress.get(member.node)
        phase, label, done, total, rate = (
            _NO_PROGRESS if now is None else (now.phase, now.label, now.done, now.total, now.rate)
        )
        report = self.reports.get(member.node)
        return MemberView(
            node=member.node,
            name=member.name,
            state=member.state,
            memory_bytes=member.memory_bytes,
            device=member.device,
            round_trip_ms=round_trip_ms,
            phase=phase,
            label=label,
            done=done,
            total=total,
            rate=rate,
            step_ms=report.step_ms or None if report else None,
            hop_ms=report.hop_ms or None if report else None,
            tokens_per_second=report.tokens_per_second if report else 0.0,
            sessions=report.sessions if report else 0,
            waiting=report.waiting if report else 0,
            resident_bytes=report.memory_bytes if report else 0,
        )


@dataclass(frozen=True, slots=True)
class RingView:
    """What the ring's part of a screen shows; see `protocol.snapshot`."""

    members: tuple[MemberView, ...]
    plan: Plan
    forming: Plan | None
    model: str
    model_known: bool
    """Its tokenizer is here: prompts can be taken."""
    loaded: bool
    """Our part of the plan in force runs."""
    linked: frozenset[NodeId]
    addresses: tuple[str, ...]
    notices: tuple[str, ...]
    fetched: dict[NodeId, int]
    """Bytes of the model that came from each peer."""
    no_draft: str = ""
    """Why there is no draft model here."""


def other_swarm(swarm: str, name: str, theirs: str, paired: bool) -> str:
    """Another swarm of our name is on this network: what to do, in one line."""
    if theirs == OPEN_FINGERPRINT:
        return f'"{name}" runs an open swarm with this name, "{swarm}". To join it, start with --open.'
    ours = "has another pairing code" if paired else "has a pairing code and this one is open"
    return f'"{name}" is in a swarm with this name, "{swarm}", that {ours}. To join it, start with --code and its code.'
