"""What a stage sends: a bounded queue and a task for each destination, so that nobody waits for another's link."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
from anyio.abc import TaskGroup

from swarm.protocol import limits
from swarm.protocol.errors import DeadlineError, LinkClosedError
from swarm.protocol.ids import NodeId
from swarm.protocol.messages import Message

Send: TypeAlias = Callable[[NodeId, Message], Awaitable[None]]

Lost: TypeAlias = Callable[[NodeId, Message, str], None]
"""(to, message, reason): it could not be sent."""


class _Lane:
    """Messages to one node. `has_room` is set while another may be put in."""

    __slots__ = ("has_room", "has_some", "messages")

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.has_some = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()


class Outbox:
    """Messages to one node arrive in the order they were posted. `run` owns the tasks."""

    def __init__(self, send: Send, lost: Lost, limit: int = limits.MAX_QUEUED_SEGMENTS) -> None:
        """`lost` is told of every message that cannot be sent; it may post others."""
        self._send = send
        self._lost = lost
        self._limit = limit
        self._lanes: dict[NodeId, _Lane] = {}
        self._group: TaskGroup | None = None

    async def run(self) -> None:
        """Send until cancelled; what is queued then is not sent."""
        async with anyio.create_task_group() as group:
            self._group = group
            for to, lane in self._lanes.items():
                group.start_soon(self._serve, to, lane)
            try:
                await anyio.sleep_forever()
            finally:
                self._group = None

    def post(self, to: NodeId, message: Message) -> bool:
        """Queue `message`; False where the queue is full, and nothing was queued."""
        lane = self._lanes.get(to)
        if lane is None:
            lane = self._lanes[to] = _Lane()
            if self._group is not None:
                self._group.start_soon(self._serve, to, lane)
        if len(lane.messages) >= self._limit:
            return False
        lane.messages.append(message)
        lane.has_some.set()
        if len(lane.messages) >= self._limit:
            lane.has_room.clear()
        return True

    async def wait_for_room(self, to: NodeId) -> None:
        """Until a message to `to` can be queued."""
        while (lane := self._lanes.get(to)) is not None and len(lane.messages) >= self._limit:
            await lane.has_room.wait()

    async def _serve(self, to: NodeId, lane: _Lane) -> None:
        """Send what is posted to `to` until its link is gone; then the lane goes too."""
        while True:
            await lane.has_some.wait()
            lane.has_some.clear()
            while lane.messages:
                message = lane.messages.popleft()
                lane.has_room.set()
                try:
                    await self._send(to, message)
                except (LinkClosedError, DeadlineError) as error:
                    del self._lanes[to]
                    lane.has_room.set()
                    for one in (message, *lane.messages):
                        self._lost(to, one, str(error))
                    return
