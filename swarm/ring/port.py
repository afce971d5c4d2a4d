"""The door between the ring (below) and the coordinator (above): what each may ask of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarm.protocol.ids import NodeId
from swarm.protocol.messages import Adopted, Drawn, Message, Refused
from swarm.protocol.plan import Plan


class RingListener(Protocol):
    """Called by the ring from the event loop; must return at once."""

    def plan_changed(self, plan: Plan) -> None:
        """A new plan is in force. Caches of rings that it has not are gone: their sessions replay their token log."""

    def drawn(self, message: Drawn) -> None:
        """The last stage drew tokens for one of our sessions."""

    def adopted(self, message: Adopted) -> None:
        """The stages hold the first positions of one of our sessions."""

    def refused(self, message: Refused) -> None:
        """A stage did not run one of our segments."""


@dataclass(frozen=True, slots=True)
class RingLoad:
    """What this node knows of one ring of the plan in force."""

    sessions: int = 0
    """That other nodes run on it, by the last word of each."""
    round_trip_ms: float = 0.0
    """To its first stage; 0 where that is here, or was not measured."""
    transit_ms: float = 0.0
    """What a token of ours spends on links on its way round; 0 where that was not measured."""


class RingPort(Protocol):
    @property
    def node(self) -> NodeId:
        """Our own id."""

    @property
    def plan(self) -> Plan:
        """The plan in force; `plan.NO_PLAN` before the first."""

    def loads(self) -> tuple[RingLoad, ...]:
        """Of each ring of the plan in force."""

    async def send(self, to: NodeId, message: Message) -> None:
        """Hand `message` to a node, ourselves included. Waits for room in the link's queue.

        Raises `LinkClosedError` where there is no link, `DeadlineError` where it takes too long.
        """

    def attach(self, listener: RingListener) -> None:
        """From now on tell `listener`; one at a time."""
