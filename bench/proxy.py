"""A slow line between two processes of this machine: a TCP proxy whose chunks arrive later, all by the same time.

A chunk is queued with the time of its release, so several are under way at once, in both directions: delay, and no
limit on throughput.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

CHUNK_BYTES = 256 * 1024
UNDER_WAY = 1024
"""Chunks in one direction; a sender that is further ahead waits."""


class DelayProxy:
    """Listens on a port of loopback, and connects each caller to `target_port` there. An async context."""

    def __init__(self, target_port: int) -> None:
        self.delay_s = 0.0
        """One way; for the chunks that come from now on."""
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> DelayProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writers in self._open.values():
            for writer in writers:
                writer.close()
        await asyncio.gather(*self._open)

    async def _accept(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        far_in, far_out = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._open[task] = near_out, far_out
        try:
            await asyncio.gather(self._carry(near_in, far_out), self._carry(far_in, near_out))
        except OSError:
            pass  # one end is gone: so is the connection
        finally:
            del self._open[task]
            near_out.close()
            far_out.close()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(UNDER_WAY)
        releasing = asyncio.create_task(_release(chunks, target))
        try:
            clock = asyncio.get_running_loop().time
            while chunk := await source.read(CHUNK_BYTES):
                await chunks.put((clock() + self.delay_s, chunk))
            await chunks.put((clock() + self.delay_s, b""))
            await releasing
        finally:
            releasing.cancel()


async def _release(chunks: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter) -> None:
    """Write each chunk when its time has come; an empty one is the end."""
    clock = asyncio.get_running_loop().time
    while True:
        release, chunk = await chunks.get()
        if release > clock():
            await asyncio.sleep(release - clock())
        if not chunk:
            with contextlib.suppress(OSError, RuntimeError):  # it is closed already
                target.write_eof()
            return
        target.write(chunk)
        await target.drain()
