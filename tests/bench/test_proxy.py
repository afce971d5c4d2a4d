"""The slow line: everything arrives, in order, and not before its time; several chunks are under way at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.proxy import DelayProxy

DELAY_S = 0.05


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.anyio
async def test_bytes_come_back_in_order_and_late() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, DelayProxy(server.sockets[0].getsockname()[1]) as proxy:
        proxy.delay_s = DELAY_S
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        sent = bytes(range(256)) * 4096
        began = time.monotonic()
        writer.write(sent)
        writer.write_eof()
        found = await asyncio.wait_for(reader.read(-1), 20)
        assert found == sent
        assert time.monotonic() - began >= 2 * DELAY_S
        writer.close()


@pytest.mark.anyio
async def test_chunks_do_not_wait_for_each_other() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, DelayProxy(server.sockets[0].getsockname()[1]) as proxy:
        proxy.delay_s = 2.0
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        began = time.monotonic()
        for number in range(10):
            writer.write(bytes([number]))
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(reader.readexactly(10), 30) == bytes(range(10))
        # One after the other they would take ten times the delay.
        assert time.monotonic() - began < 20.0
        writer.close()


@pytest.mark.anyio
async def test_a_connection_that_ends_ends_the_other_side_too() -> None:
    ended = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()
        ended.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server, DelayProxy(server.sockets[0].getsockname()[1]) as proxy:
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.close()
        await asyncio.wait_for(ended.wait(), 20)
