"""The links a node has, one to each peer: registering, reading, heartbeats, sending."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from swarm.protocol.errors import LinkClosedError
from swarm.protocol.ids import NodeId
from swarm.protocol.limits import HEARTBEAT_INTERVAL_S
from swarm.protocol.messages import Message, Ping, Pong
from swarm.ring.link import Link

MAX_OUTBOX = 256
"""Messages posted to one link and not yet queued there: plans, views, progress, pings. A peer that is so far behind
does not read; its link is closed."""


class MeshListener(Protocol):
    """Called from the event loop."""

    def link_up(self, node: NodeId, name: str, dialled: str) -> None:
        """A link stands; `dialled` is the address we dialled, empty where the peer dialled us."""

    def link_down(self, node: NodeId, reason: str) -> None:
        """The link to `node` is gone, and no other took its place."""

    def heard(self, node: NodeId, round_trip_ms: float | None) -> None:
        """A frame came in."""

    async def received(self, node: NodeId, message: Message) -> None:
        """A message came in. While this waits, the link is not read."""


@dataclass(slots=True)
class _Entry:
    link: Link
    dialled: bool
    outbox: deque[Message] = field(default_factory=deque)
    posted: asyncio.Event = field(default_factory=asyncio.Event)


class Mesh:
    def __init__(self, me: NodeId, listener: MeshListener) -> None:
        self._me = me
        self._listener = listener
        self._entries: dict[NodeId, _Entry] = {}

    @property
    def nodes(self) -> list[NodeId]:
        return list(self._entries)

    def link(self, node: NodeId) -> Link | None:
        entry = self._entries.get(node)
        return entry.link if entry else None

    async def serve(self, link: Link, dialled: str = "") -> None:
        """Register `link` and read it until it closes; the link is closed when this returns."""
        entry = _Entry(link, bool(dialled))
        try:
            if not self._register(entry, dialled):
                await link.close("there is another link already")
                return
            async with anyio.create_task_group() as group:
                group.start_soon(self._send_posted, entry)
                try:
                    await self._read(entry)
                finally:
                    group.cancel_scope.cancel()
        finally:
            link.abort("closed")
            if self._entries.get(link.peer) is entry:
                del self._entries[link.peer]
                self._listener.link_down(link.peer, link.closed or "closed")

    def _register(self, entry: _Entry, dialled: str) -> bool:
        """Of two links to one peer, dialled from both ends at once, the one that the lower id dialled stays.

        Two from the same end: the peer lost the older one and dialled again.
        """
        node = entry.link.peer
        other = self._entries.get(node)
        if other is not None and other.dialled != entry.dialled and entry.dialled != (self._me < node):
            return False
        self._entries[node] = entry
        if other is not None:
            entry.outbox.extend(other.outbox)
            entry.posted.set()
            other.outbox.clear()
            other.link.abort("there is another link now")
            # What the old one had queued or under way is lost: whoever keeps peers in step has to begin anew.
            self._listener.link_down(node, "there is another link now")
        self._listener.link_up(node, entry.link.peer_name, dialled)
        return True

    async def _read(self, entry: _Entry) -> None:
        node = entry.link.peer
        try:
            while True:
                message = await entry.link.receive()
                if isinstance(message, Ping):
                    self._listener.heard(node, None)
                    self._post(entry, Pong(message.sent_ns))
                elif isinstance(message, Pong):
                    self._listener.heard(node, max(0.0, (time.monotonic_ns() - message.sent_ns) / 1e6))
                else:
                    self._listener.heard(node, None)
                    await self._listener.received(node, message)
        except LinkClosedError:
            return

    async def _send_posted(self, entry: _Entry) -> None:
        try:
            while True:
                await entry.posted.wait()
                entry.posted.clear()
                while entry.outbox:
                    await entry.link.send(entry.outbox.popleft())
        except LinkClosedError:
            return

    def post(self, node: NodeId, message: Message) -> None:
        """Send without waiting; a node without a link gets nothing."""
        entry = self._entries.get(node)
        if entry is not None:
            self._post(entry, message)

    def post_all(self, message: Message) -> None:
        for entry in list(self._entries.values()):
            self._post(entry, message)

    def _post(self, entry: _Entry, message: Message) -> None:
        if len(entry.outbox) >= MAX_OUTBOX:
            entry.link.abort("does not read")
            return
        entry.outbox.append(message)
        entry.posted.set()

    async def send(self, node: NodeId, message: Message) -> None:
        """Send and wait for room in the link's queue. Raises `LinkClosedError`."""
        entry = self._entries.get(node)
        if entry is None:
            raise LinkClosedError(f"no link to {node[:8]}")
        await entry.link.send(message)

    async def run_heartbeats(self) -> None:
        """Ping every peer until cancelled."""
        while True:
            self.post_all(Ping(time.monotonic_ns()))
            await anyio.sleep(HEARTBEAT_INTERVAL_S)

    async def close(self, reason: str) -> None:
        """Say goodbye on every link, what is posted first."""
        async with anyio.create_task_group() as group:
            for entry in list(self._entries.values()):
                group.start_soon(self._close_entry, entry, reason)

    async def _close_entry(self, entry: _Entry, reason: str) -> None:
        try:
            while entry.outbox:
                await entry.link.send(entry.outbox.popleft())
        except LinkClosedError:
            return
        await entry.link.close(reason)
