"""A line of a known rate: a proxy that holds back what comes from a server, chunk by chunk, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

_CHUNK_BYTES = 16 * 1024


class Line:
    """Bytes per second of one line; all connections over it share that. Each chunk has a time when it is through."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def carry(self, count: int) -> None:
        """Returns when `count` more bytes are through."""
        self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
        await asyncio.sleep(self._free_at - time.monotonic())


@contextlib.asynccontextmanager
async def proxy(port: int, rate: float) -> AsyncIterator[int]:
    """A port whose connections lead to `port` over one line; both on loopback."""
    line = Line(rate)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK_BYTES)
        await asyncio.gather(_pump(reader, back, None), _pump(there, writer, line))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line | None) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            if line is not None:
                await line.carry(len(data))
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError, RuntimeError):
        writer.close()
