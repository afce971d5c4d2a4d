"""What the coordinator needs of a draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarm.coordinator.events import AskDraft
from swarm.protocol.ids import SessionId


@dataclass(frozen=True, slots=True)
class Draft:
    """What a draft model says."""

    tokens: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    """How sure it is of each (`times.confidence`)."""


class Drafter(Protocol):
    """A small model with the tokenizer of the swarm's, on this node's own device."""

    @property
    def available(self) -> bool:
        """It can be asked now."""

    async def draft(self, session: SessionId, ask: AskDraft) -> Draft:
        """At most `ask.count` tokens that follow `ask.tokens`, drawn with the noise of the target's own draw.

        Fewer, or none, where it cannot or should not go on. Cancelled when a newer question replaces this one or the
        answer ends. Raises `SwarmError` where the device fails; the session then goes on without it.
        """

    def close_session(self, session: SessionId) -> None:
        """Free what is held for `session`; unknown ones are ignored. Returns at once."""
