"""Prompts that a stage is computing, so that an equal one that comes meanwhile waits for them. Pure.

Users who ask at the same moment often share a system prompt. The first question for what the cache holds of a prompt
(`Adopt`) says which rows will come; a question that begins alike is answered when they have run, and shares them. To
wait costs little: its own rows would have run beside the others, and both would have taken as long. The stages behind
the first hear of rows as they arrive, always before the questions that wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.protocol import limits
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind, Segment

WORTH = 32
"""Rows that a session computes and another one shares. For fewer nobody waits: they take about a step, and every chat
template makes some equal."""

STALLED_S = 2.0
"""A prompt of which nothing came or ran for so long is not waited for."""


@dataclass(slots=True)
class _Beginning:
    tokens: tuple[int, ...] = ()
    """The first ids of a prompt, `limits.MAX_SEGMENT_ROWS` at most."""
    held: int = 0
    """How many of them were in the cache before."""
    done: int = 0
    """How many are by now."""
    moved: float = 0.0
    """When something came or ran last, seconds."""


class Beginnings:
    """By session; whoever uses it forgets those that are closed."""

    def __init__(self) -> None:
        self._known: dict[SessionId, _Beginning] = {}

    def asked(self, session: SessionId, tokens: tuple[int, ...], held: int, now: float) -> None:
        """Rows of `tokens` behind the first `held`, which the cache has, will come."""
        self._known[session] = _Beginning(tokens, held, held, now)

    def delivered(self, segment: Segment, now: float) -> None:
        """Rows have come, and wait to be run."""
        one = self._known.setdefault(segment.session, _Beginning())
        if segment.kind is RowKind.DECODE or segment.start > len(one.tokens):
            self.forget(segment.session)
            return
        end = segment.start + len(segment.tokens)
        if one.tokens[segment.start : end] != segment.tokens:
            one.tokens = (one.tokens[: segment.start] + segment.tokens)[: limits.MAX_SEGMENT_ROWS]
        one.held, one.done, one.moved = min(one.held, segment.start), min(one.done, segment.start), now

    def ran(self, segment: Segment, now: float) -> None:
        one = self._known.get(segment.session)
        if one is not None:
            one.done, one.moved = segment.start + len(segment.tokens), now

    def forget(self, session: SessionId) -> None:
        self._known.pop(session, None)

    def awaited(self, tokens: tuple[int, ...], now: float) -> float | None:
        """Until when a question for `tokens` waits if nothing happens; None: nothing of it is being computed."""
        waits = [
            one.moved + STALLED_S
            for one in self._known.values()
            if (end := max(one.held + WORTH, one.done + 1)) <= len(one.tokens) and tokens[:end] == one.tokens[:end]
        ]
        return max((until for until in waits if now < until), default=None)

    def validate_state(self) -> None:
        """Assert the invariants; for tests and debugging."""
        assert all(len(one.tokens) <= limits.MAX_SEGMENT_ROWS for one in self._known.values())
