"""Sessions between turns, their caches kept for the next one; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.coordinator.session import Session
from swarm.protocol.ids import SessionId
from swarm.protocol.plan import Plan

MIN_REUSED_TOKENS = 16
"""Fewer are not worth a search, unless they are half the prompt."""


@dataclass(frozen=True, slots=True)
class IdleLimits:
    """Every kept session holds KV cache at all stages that an answer could use."""

    sessions: int = 8
    seconds: float = 600.0
    share: float = 0.5
    """Of the ring's KV cache, all kept sessions of this node together; other nodes keep theirs in the rest."""


class IdlePool:
    """Who is put in may be taken out once; what falls out must be closed everywhere."""

    def __init__(self, limits: IdleLimits) -> None:
        self._limits = limits
        self._kept: list[tuple[float, Session]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, session: Session, now: float) -> list[Session]:
        """Keep `session`; those that no longer have room, oldest first, are returned."""
        self._kept.append((now, session))
        surplus = max(0, len(self._kept) - self._limits.sessions)
        fallen, self._kept = self._kept[:surplus], self._kept[surplus:]
        return [session for _, session in fallen]

    def shrink(self, tokens: int, plan: Plan) -> list[Session]:
        """Let go of the oldest on the ring of `plan` until the rest there hold no more than `tokens` positions."""
        fallen = []
        here = [entry for entry in self._kept if entry[1].plan.stages == plan.stages]
        held = sum(len(session.log) for _, session in here)
        while held > max(0, tokens):
            entry = here.pop(0)
            self._kept.remove(entry)
            held -= len(entry[1].log)
            fallen.append(entry[1])
        return fallen

    def holds(self, session: SessionId) -> bool:
        return any(kept.id == session for _, kept in self._kept)

    def take(self, prompt: Sequence[int], kinds: bytes = b"") -> Session | None:
        """The session that saves most of `prompt`, run as `kinds` says (see `Begin`), where it saves enough.

        Taking it throws away what it holds behind the common part. That must not be more than what is saved:
        conversations that share a system prompt and nothing else do not take each other's caches.
        """
        best, saved = None, 0
        for entry in self._kept:
            reused = entry[1].log.reusable(prompt, kinds)
            enough = reused >= MIN_REUSED_TOKENS or (reused > 0 and 2 * reused >= len(prompt))
            if enough and reused > saved and 2 * reused >= len(entry[1].log):
                best, saved = entry, reused
        if best is None:
            return None
        self._kept.remove(best)
        return best[1]

    def expire(self, now: float) -> list[Session]:
        """Those that were kept for too long."""
        oldest = now - self._limits.seconds
        expired = [session for since, session in self._kept if since <= oldest]
        self._kept = [(since, session) for since, session in self._kept if since > oldest]
        return expired

    def next_expiry(self) -> float | None:
        return self._kept[0][0] + self._limits.seconds if self._kept else None

    def keep(self, plan: Plan) -> list[Session]:
        """Let go of those whose ring is not in `plan` any more; their caches went with it."""
        lost = [session for _, session in self._kept if not plan.has_ring(session.plan)]
        self._kept = [entry for entry in self._kept if plan.has_ring(entry[1].plan)]
        return lost

    def clear(self) -> list[Session]:
        kept, self._kept = self._kept, []
        return [session for _, session in kept]
