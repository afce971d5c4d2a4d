"""``ask`` and ``status``: through the HTTP API of the node that runs here."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any, TextIO

import aiohttp
import anyio

from swarm.cli import running
from swarm.cli.args import Ask
from swarm.protocol.config import Settings
from swarm.protocol.errors import DeadlineError, LinkClosedError, SessionError, SwarmError

READY_TIMEOUT_S = 900.0
"""How long ``ask`` waits for a ring that is still forming: fetching and compiling a large shard takes minutes."""

SILENCE_TIMEOUT_S = 180.0
"""A node that streams nothing for this long is stuck: its own deadlines are shorter."""


async def ask(settings: Settings, request: Ask, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> None:
    """Print the answer, alone, on `out`. Raises `SwarmError` where there is none."""
    node = running.find(settings.home)
    async with _session() as session:
        await _wait_until_ready(session, node.api, err)
        body = _body(request)
        pieces: list[str] = []
        summary: dict[str, Any] = {}
        async for event in _events(session, node.api, body):
            summary |= {key: event[key] for key in ("model", "usage", "system_fingerprint", "seed") if event.get(key)}
            for choice in event.get("choices", ()):
                piece = choice.get("delta", {}).get("content") or ""
                pieces.append(piece)
                if piece and not request.json:
                    out.write(piece)
                    out.flush()
                summary["finish_reason"] = choice.get("finish_reason") or summary.get("finish_reason")
        if request.json:
            json.dump({"text": "".join(pieces), **summary}, out, ensure_ascii=False)
        out.write("\n")
        out.flush()


async def status(settings: Settings) -> dict[str, Any]:
    """The object of ``GET /status``. Raises `UsageError` where no node runs."""
    node = running.find(settings.home)
    async with _session() as session:
        return await _status(session, node.api)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_TIMEOUT_S)
    )


def _body(request: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": request.prompt}],
        "temperature": request.sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    if request.seeded:
        body["seed"] = request.sampling.seed
    return body


async def _status(session: aiohttp.ClientSession, api: str) -> dict[str, Any]:
    try:
        async with session.get(f"{api}/status") as response:
            found: dict[str, Any] = await response.json()
            return found
    except (aiohttp.ClientError, ValueError) as error:
        raise LinkClosedError("the node that runs here does not answer", found=f"{api}: {error}"[:300]) from None


async def _wait_until_ready(session: aiohttp.ClientSession, api: str, err: TextIO) -> None:
    told = ""
    try:
        with anyio.fail_after(READY_TIMEOUT_S):
            while True:
                found = await _status(session, api)
                if found["ready"]:
                    return
                told = str(found.get("reason") or "the ring")
                if err.isatty():
                    err.write(f"\r\x1b[Kwaiting: {told}"[: 2 + 200])
                    err.flush()
                if found.get("missing_bytes"):
                    raise SessionError(
                        "the swarm cannot hold the model", found=told, action="Add a PC, or give more --memory."
                    )
                await anyio.sleep(0.5)
    except TimeoutError:
        raise DeadlineError(f"the ring was not ready within {READY_TIMEOUT_S:g} s", found=told) from None
    finally:
        if told and err.isatty():
            err.write("\r\x1b[K")


async def _events(session: aiohttp.ClientSession, api: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of a streamed answer."""
    try:
        async with session.post(f"{api}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise _refusal(response.status, await response.json())
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise _refusal(response.status, event)
                    yield event
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise LinkClosedError("the answer broke off", found=f"{type(error).__name__}: {error}"[:300]) from None


def _refusal(status: int, body: dict[str, Any]) -> SwarmError:
    return SessionError(str(body.get("error", {}).get("message", f"HTTP status {status}")))
