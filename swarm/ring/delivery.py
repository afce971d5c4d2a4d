"""Inference messages that arrive: for the stage that runs here, or for the coordinator here."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from swarm.protocol.errors import LinkClosedError, ProtocolError
from swarm.protocol.ids import NodeId
from swarm.protocol.messages import Adopt, Adopted, CloseSession, Drawn, Message, Refused, Segment
from swarm.ring.port import RingListener
from swarm.ring.worker import StageWorker

Inference: TypeAlias = Segment | Drawn | Refused | CloseSession | Adopt | Adopted


async def deliver(
    sender: NodeId,
    message: Inference,
    worker: StageWorker | None,
    listener: RingListener | None,
    send: Callable[[NodeId, Message], Awaitable[None]],
) -> None:
    """Hand `message` over; waits where the stage's queue is full. Raises `ProtocolError` for one out of place."""
    match message:
        case Segment() | Adopt() if worker is not None and worker.plan.epoch == message.epoch:
            if sender != worker.expected_sender(message.coordinator):
                raise ProtocolError("rows from a node that is not before this one", found=sender[:8])
            if isinstance(message, Segment):
                await worker.deliver(message)
            else:
                worker.adopt(message)
        case Segment() | Adopt():
            # Raised any further, the end of the coordinator's link would end the sender's.
            with contextlib.suppress(LinkClosedError):
                await send(message.coordinator, _not_in_force(message))
        case CloseSession():
            if worker is not None:
                worker.close_session(message.session, sender)
        case Drawn() if listener is not None:
            listener.drawn(message)
        case Refused() if listener is not None:
            listener.refused(message)
        case Adopted() if listener is not None:
            listener.adopted(message)


def _not_in_force(message: Segment | Adopt) -> Refused | Adopted:
    if isinstance(message, Adopt):
        return Adopted(message.session, message.epoch, 0)
    return Refused(message.session, message.epoch, message.attempt, "this stage is not in force", fatal=False)
