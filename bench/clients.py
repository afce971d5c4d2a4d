"""Users who ask over the HTTP API, and take next to nothing of the cores that are measured.

A client only notes when bytes come; what they say is read when the answer is whole. In an office it would be a program
on another PC. Here it shares a core with a node, and one that reads every event as it comes costs that node more than
the node's own work for a token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SILENCE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer as a user saw it."""

    asked: float
    pieces: tuple[float, ...]
    """When each piece of text came, seconds."""
    tokens: int
    text: str


class _Client(asyncio.Protocol):
    """Sends one request and keeps what comes, with its time, until the server closes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.arrived: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.arrived.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def ask(api: str, prompt: str, tokens: int) -> Stream:
    """Ask the node at `api`; greedy, no early stop. Raises ``RuntimeError`` for a refusal and for silence."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = time.perf_counter()
    return read(asked, await _exchange(api, json.dumps(body).encode()))


async def _exchange(api: str, body: bytes) -> list[tuple[float, bytes]]:
    """What the server says to a chat request, as it arrives."""
    server = urlsplit(api)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(
        lambda: _Client(head.encode() + body), server.hostname, server.port
    )
    try:
        heard = -1
        while not client.closed.done():
            if heard == len(client.arrived):
                raise RuntimeError(f"{api} is silent for {SILENCE_TIMEOUT_S:.0f} s")
            heard = len(client.arrived)
            await asyncio.wait([client.closed], timeout=SILENCE_TIMEOUT_S)
    finally:
        transport.abort()
    return client.arrived


def read(asked: float, arrived: Sequence[tuple[float, bytes]]) -> Stream:
    """The answer in what a server sent. Raises ``RuntimeError`` for a refusal."""
    if not arrived or b" 200 " not in arrived[0][1].split(b"\r\n", 1)[0]:
        raise RuntimeError(b"".join(data for _, data in arrived)[:500].decode(errors="replace") or "no answer")
    pieces, text, count, rest = [], "", 0, b""
    for when, data in arrived:
        # An event is one line and one chunk, so that the sizes of chunks stand on lines of their own.
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:500])
                count = (event.get("usage") or {}).get("completion_tokens", count)
                for choice in event.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        pieces.append(when)
                        text += piece
    return Stream(asked, tuple(pieces), count, text)
