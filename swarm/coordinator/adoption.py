"""What the ring holds already of a new session's prompt: equal beginnings of different sessions are computed once."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from swarm.coordinator.chunks import MIN_PREFILL_ROWS
from swarm.protocol import limits
from swarm.protocol.errors import SwarmError
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Adopt, Adopted
from swarm.protocol.plan import Plan
from swarm.ring.port import RingPort

MIN_PROMPT = 64
"""Tokens. To ask costs a round trip through the ring; to prefill less than this costs no more on most PCs."""

ANSWER_S = 20.0
"""Without an answer after this the prompt is prefilled whole. A stage answers at once, unless just these rows are being
computed for another session; then it takes as long as they do."""


@dataclass(slots=True)
class _Question:
    answered: anyio.Event = field(default_factory=anyio.Event)
    positions: int = 0


class Adoptions:
    """Asks for sessions that begin; each question belongs to the task that awaits it."""

    def __init__(self, ring: RingPort) -> None:
        self._ring = ring
        self._open: dict[SessionId, _Question] = {}

    async def ask(self, session: SessionId, plan: Plan, prompt: tuple[int, ...]) -> int:
        """First positions of `prompt` that all stages of `plan` hold and `session` may go on behind; often 0.

        Two tokens at least stay to be prefilled: the last one alone would be a decoded row, with other bits.
        """
        first = prompt[: min(len(prompt) - MIN_PREFILL_ROWS, limits.MAX_SEGMENT_ROWS)]
        if len(prompt) < MIN_PROMPT or not plan.stages:
            return 0
        question = self._open[session] = _Question()
        try:
            with anyio.move_on_after(ANSWER_S):
                await self._ring.send(plan.stages[0].node, Adopt(session, self._ring.node, plan.epoch, first))
                await question.answered.wait()
        except SwarmError:
            return 0  # the session finds out what is wrong
        finally:
            del self._open[session]
        # A new plan has empty caches. A peer may say anything.
        return question.positions if self._ring.plan.has_ring(plan) and question.positions <= len(first) else 0

    def plan_changed(self) -> None:
        """The stages that were asked are gone with their caches."""
        for question in self._open.values():
            question.answered.set()

    def answered(self, message: Adopted) -> None:
        question = self._open.get(message.session)
        if question is not None:
            question.positions = max(0, message.positions)
            question.answered.set()
