"""A line of a known rate: a proxy that holds back what comes from a server, chunk by chunk, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

_CHUNK_BYTES = 16 * 1024
_QUEUED_CHUNKS = 32


class Line:
    """Bytes per second of one line; all connections over it share that."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def release_time(self, count: int) -> float:
        """When `count` bytes that come now are through."""
        self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
        return self._free_at


@contextlib.asynccontextmanager
async def proxy(port: int, rate: float) -> AsyncIterator[int]:
    """A port whose connections lead to `port` over one line; both on loopback."""
    line = Line(rate)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK_BYTES)
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)
        await asyncio.gather(_pass_on(reader, back), _queue(there, line, queue), _release(queue, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _queue(reader: asyncio.StreamReader, line: Line, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
    """Each chunk with its release time; several are on their way."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            await queue.put((line.release_time(len(data)), data))
    await queue.put((0.0, b""))


async def _release(queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    while (item := await queue.get())[1]:
        when, data = item
        await asyncio.sleep(when - time.monotonic())
        with contextlib.suppress(ConnectionError):  # what nobody takes any more goes on being taken from the queue
            writer.write(data)
            await writer.drain()
    writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
