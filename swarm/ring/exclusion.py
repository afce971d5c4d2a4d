"""Who is left out of plans for a while, and why: part of `forming`."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.protocol.ids import Epoch, NodeId

EXCLUDE_S = 30.0
"""The first time a node cannot prepare its part. Doubled each further time: a full disk does not mend itself."""

EXCLUDE_MAX_S = 600.0

STRIKE_WINDOW_S = 120.0
"""A node that goes away, or loses its part, in two epochs within this time is treated as one that cannot prepare:
otherwise a PC that crashes while compiling would keep the ring from ever forming."""


@dataclass(slots=True)
class _Record:
    until: float = float("-inf")
    times: int = 0
    reason: str = ""
    struck: Epoch | None = None
    struck_at: float = float("-inf")


class Exclusions:
    def __init__(self) -> None:
        self._records: dict[NodeId, _Record] = {}

    def exclude(self, node: NodeId, reason: str, now: float) -> None:
        record = self._records.setdefault(node, _Record())
        record.until = now + min(EXCLUDE_MAX_S, EXCLUDE_S * 2 ** min(record.times, 10))
        record.times += 1
        record.reason = reason

    def strike(self, node: NodeId, epoch: Epoch, reason: str, now: float) -> None:
        """Not its first in a short time: excluded. Several of one epoch are one."""
        record = self._records.setdefault(node, _Record())
        if record.struck == epoch:
            return
        again = now - record.struck_at < STRIKE_WINDOW_S
        record.struck, record.struck_at = epoch, now
        if again:
            self.exclude(node, reason, now)

    def active(self, now: float) -> dict[NodeId, str]:
        """Nodes left out now, with the reason."""
        return {node: record.reason for node, record in self._records.items() if record.until > now}

    def next_end(self, now: float) -> float | None:
        return min((record.until for record in self._records.values() if record.until > now), default=None)

    def keep_only(self, nodes: set[NodeId]) -> None:
        """Forget everybody else: they are no members any more."""
        for node in self._records.keys() - nodes:
            del self._records[node]
