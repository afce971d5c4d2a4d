"""A link: messages to one peer and back, whatever carries its frames.

`FramedLink` is the one implementation, over a `Channel`: a WebSocket, or an in-process pair. It has two lanes. Control
messages (heartbeats, plans) overtake hidden rows that wait, and both lanes are bounded: a peer that reads slowly makes
`send` wait, it never makes memory grow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Protocol

import anyio

from swarm.protocol.codec import Buffer, Decoder, encode
from swarm.protocol.errors import DeadlineError, HandshakeError, LinkClosedError, ProtocolError, SwarmError
from swarm.protocol.ids import NodeId
from swarm.protocol.limits import HANDSHAKE_TIMEOUT_S, LINK_SEND_TIMEOUT_S, MAX_INFLIGHT_FRAMES, MAX_REASON_CHARS
from swarm.protocol.messages import (
    Challenge,
    Commit,
    Goodbye,
    Hello,
    Members,
    Message,
    Ping,
    Pong,
    Prepare,
    Prepared,
    PrepareFailed,
    Proof,
    Welcome,
)
from swarm.ring.handshake import Dialler, Listener, Peer, farewell, heard

CONTROL = (Ping, Pong, Members, Prepare, Prepared, PrepareFailed, Commit)
"""Overtake what waits in the other lane. Small, and nothing about them depends on the segments before them."""

CLOSE_TIMEOUT_S = 3.0
"""A peer that does not answer the closing handshake of the carrier within this is cut off."""


_writers: set[asyncio.Task[None]] = set()
"""Event loops hold their tasks weakly; a link that nobody holds any more must still end in good order."""


class Link(Protocol):
    """Messages to and from one peer. Whoever holds a link closes or aborts it."""

    @property
    def peer(self) -> NodeId: ...

    @property
    def peer_name(self) -> str: ...

    @property
    def peer_address(self) -> str:
        """``host:port`` of the connection's other end; for a dialled link, the address dialled."""

    @property
    def peer_fingerprint(self) -> bytes:
        """SHA-256 of the peer's certificate: pin HTTPS requests to it (``aiohttp.Fingerprint``)."""

    @property
    def closed(self) -> str | None:
        """The reason the link closed with; None while it is up."""

    @property
    def retry(self) -> bool:
        """False where the peer said that dialling again cannot help."""

    async def send(self, message: Message) -> None:
        """Queue `message`; wait while its lane is full. Its tensors must not change from now on.

        Messages of one lane arrive in the order they were sent. Raises `LinkClosedError`, and ``ValueError`` for a
        message that is over our own limits. May be cancelled: then the message was not queued.
        """

    async def receive(self) -> Message:
        """The next message; one caller at a time. Raises `LinkClosedError`. May be cancelled without loss."""

    async def close(self, reason: str, *, retry: bool = True) -> None:
        """Send what is queued and a goodbye with `reason`, then close; within `LINK_SEND_TIMEOUT_S`."""

    def abort(self, reason: str) -> None:
        """Close at once; what is queued is lost."""


class Channel(Protocol):
    """What a link stands on: an ordered stream of binary frames, both ways. Every failure is a `LinkClosedError`."""

    async def write(self, frame: Buffer) -> None:
        """Hand a frame to the carrier; returns when there is room for another."""

    async def read(self) -> Buffer:
        """The next frame. May be cancelled without loss."""

    async def aclose(self) -> None:
        """Close, with the carrier's own courtesies."""

    def abort(self) -> None:
        """Close at once."""


class _Lane:
    """Encoded messages that wait for the carrier, and senders that wait for room."""

    __slots__ = ("frames", "messages", "waiters")

    def __init__(self) -> None:
        self.messages: deque[list[Buffer]] = deque()
        self.frames = 0
        self.waiters: deque[asyncio.Future[None]] = deque()

    def has_room(self, frames: int) -> bool:
        return self.frames + frames <= MAX_INFLIGHT_FRAMES

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class FramedLink:
    """A `Link` over a `Channel`. Owns one task, from `start` until it is closed or aborted."""

    def __init__(self, channel: Channel, peer: Peer, address: str) -> None:
        self._channel = channel
        self._peer = peer
        self._address = address
        self._decoder = Decoder()
        self._control, self._bulk = _Lane(), _Lane()
        self._work = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._goodbye: Goodbye | None = None
        self._closed: str | None = None
        self._aborted = False
        self._retry = True

    @property
    def peer(self) -> NodeId:
        return self._peer.node

    @property
    def peer_name(self) -> str:
        return self._peer.name

    @property
    def peer_address(self) -> str:
        return self._address

    @property
    def peer_fingerprint(self) -> bytes:
        return self._peer.fingerprint

    @property
    def closed(self) -> str | None:
        return self._closed

    @property
    def retry(self) -> bool:
        return self._retry

    def start(self) -> None:
        """Begin to send. Needs a running event loop."""
        self._writer = asyncio.create_task(self._write(), name=f"link to {self._peer.name}")
        _writers.add(self._writer)
        self._writer.add_done_callback(_writers.discard)

    async def send(self, message: Message) -> None:
        frames = encode(message)
        lane = self._control if isinstance(message, CONTROL) else self._bulk
        while self._closed is None and not lane.has_room(len(frames)):
            waiter = asyncio.get_running_loop().create_future()
            lane.waiters.append(waiter)
            try:
                await waiter
            finally:
                lane.waiters.remove(waiter)
        if self._closed is not None:
            raise LinkClosedError(self._closed)
        lane.messages.append(frames)
        lane.frames += len(frames)
        self._work.set()

    async def receive(self) -> Message:
        while self._closed is None:
            try:
                message = self._decoder.feed(await self._channel.read())
                if isinstance(message, (Hello, Challenge, Proof, Welcome)):
                    raise ProtocolError("a handshake message after the handshake", found=type(message).__name__)
            except ProtocolError as error:
                self._bulk.messages.clear()
                await self._finish(farewell(error), f'"{self.peer_name}" broke the protocol: {error}', CLOSE_TIMEOUT_S)
                break
            except LinkClosedError as error:
                # Where `close` is at work, this is its doing and it goes on undisturbed.
                if self._closed is None:
                    self.abort(str(error))
                break
            if isinstance(message, Goodbye):
                self._retry = message.retry
                self.abort(f'"{self.peer_name}" closed the link: {heard(message)}')
                break
            if message is not None:
                return message
        raise LinkClosedError(self._closed or "closed")

    async def close(self, reason: str, *, retry: bool = True) -> None:
        await self._finish(Goodbye(reason[:MAX_REASON_CHARS], retry), reason, LINK_SEND_TIMEOUT_S)

    async def _finish(self, goodbye: Goodbye, reason: str, within_s: float) -> None:
        if self._closed is None:
            self._goodbye = goodbye
            self._end(reason)
        if self._writer is None:
            self._channel.abort()
            return
        # Not a cancel scope: where the caller is cancelled, the link still ends in time.
        deadline = asyncio.get_running_loop().call_later(within_s, self.abort, reason)
        await asyncio.wait([self._writer])
        deadline.cancel()

    def abort(self, reason: str) -> None:
        self._end(reason)
        self._aborted = True
        self._channel.abort()

    def _end(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
        self._work.set()
        self._control.wake()
        self._bulk.wake()

    async def _write(self) -> None:
        """Send until the link ends: control first, and after a goodbye what is queued first."""
        try:
            while not self._aborted:
                lane = self._control if self._control.messages else self._bulk
                if lane.messages:
                    frames = lane.messages.popleft()
                    await self._write_frames(frames)
                    lane.frames -= len(frames)
                    lane.wake()
                elif self._goodbye is not None:
                    await self._write_frames(encode(self._goodbye))
                    break
                else:
                    self._work.clear()
                    await self._work.wait()
        except LinkClosedError as error:
            self._end(str(error))
        finally:
            self._control.messages.clear()
            self._bulk.messages.clear()
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await self._channel.aclose()
            self.abort("closed")

    async def _write_frames(self, frames: list[Buffer]) -> None:
        for frame in frames:
            with anyio.move_on_after(LINK_SEND_TIMEOUT_S) as scope:
                await self._channel.write(frame)
            if scope.cancelled_caught:
                self._channel.abort()
                raise LinkClosedError(f'"{self.peer_name}" took no data for {LINK_SEND_TIMEOUT_S:g} s')


async def open_link(channel: Channel, side: Dialler | Listener, address: str) -> FramedLink:
    """Shake hands over a fresh channel and return the link, started. The channel is closed where it fails.

    Raises `HandshakeError` where dialling again cannot help; `LinkClosedError`, `ProtocolError` or `DeadlineError`
    (after `HANDSHAKE_TIMEOUT_S`) where it may.
    """
    try:
        with anyio.fail_after(HANDSHAKE_TIMEOUT_S):
            peer = await _shake_hands(channel, side)
    except TimeoutError:
        channel.abort()
        raise DeadlineError(f"{address} did not finish the handshake within {HANDSHAKE_TIMEOUT_S:g} s") from None
    except (HandshakeError, ProtocolError) as error:
        # The peer may be gone already, and it is not owed more than a moment.
        with anyio.move_on_after(CLOSE_TIMEOUT_S), contextlib.suppress(SwarmError):
            for frame in encode(farewell(error)):
                await channel.write(frame)
            await channel.aclose()
        channel.abort()
        raise
    except BaseException:
        channel.abort()
        raise
    link = FramedLink(channel, peer, address)
    link.start()
    return link


async def _shake_hands(channel: Channel, side: Dialler | Listener) -> Peer:
    decoder = Decoder()
    if isinstance(side, Dialler):
        await channel.write(encode(side.hello())[0])
    while True:
        message = decoder.feed(await channel.read())
        if message is None:
            raise ProtocolError("a tensor in the handshake")
        step = side.handle(message)
        if step.send is not None:
            await channel.write(encode(step.send)[0])
        if step.peer is not None:
            return step.peer
