"""The HTTP API of one node: OpenAI-compatible chat completions, models, status and health."""

from __future__ import annotations

import errno
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from aiohttp import hdrs, web

from swarm.api.chat import Completion, Reply, parse
from swarm.api.errors import RequestError, body_of, status_of
from swarm.api.guard import host_allowed, origin_allowed
from swarm.api.pump import Pump, pumped
from swarm.api.status import progress, retry_after_s, status
from swarm.coordinator.requests import Delta, Generator, in_line
from swarm.protocol import limits
from swarm.protocol.errors import SwarmError, UsageError
from swarm.protocol.snapshot import Snapshot

log = logging.getLogger(__name__)

_PORTS_TRIED = 100
"""From the default port upwards, where it is taken."""

_QUIET_S = 10.0
"""A stream that is silent for this long sends a comment, so that nobody in between takes it for dead."""

_BUSY_RETRY_S = 2

_CLOSE_GRACE_S = 0.5
"""Answers still running when the API closes get this long to end, and once more after being cancelled."""

_SEED_BITS = 31
"""A drawn seed is small enough for every client's JSON."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiServer:
    """Serves one node's API. `start` binds, `close` ends what runs; both from the same event loop."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        generator: Generator,
        *,
        max_answers: int = limits.MAX_API_ANSWERS,
        quiet_s: float = _QUIET_S,
        write_timeout_s: float = limits.API_WRITE_TIMEOUT_S,
    ) -> None:
        self._snapshot = snapshot
        self._generator = generator
        self._max_answers = max_answers
        self._quiet_s = quiet_s
        self._write_timeout_s = write_timeout_s
        self._answers = 0
        self._host = ""
        self._created = 0
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, fixed: bool) -> int:
        """Listen and return the port: `port`, or the next free one unless it is `fixed`; 0 takes any.

        Raises `UsageError` where that cannot be.
        """
        self._host = host
        self._created = int(time.time())
        app = web.Application(client_max_size=limits.MAX_API_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/status", self._status)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_GRACE_S)
        await runner.setup()
        try:
            taken = await _bind(runner, host, port, fixed)
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        return taken

    async def close(self) -> None:
        """Stop listening, give running answers a moment, cancel the rest."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse what a web page may have forged; answer every error in OpenAI's shape."""
        try:
            host = request.headers.get(hdrs.HOST)
            if not host_allowed(self._host, host):
                raise RequestError(
                    "this API is for this PC only",
                    expected="a Host of localhost or 127.0.0.1",
                    found=repr((host or "")[:80]),
                    status=403,
                )
            if not origin_allowed(host, request.headers.get(hdrs.ORIGIN)):
                raise RequestError(
                    "requests of other web pages are refused",
                    expected="no Origin, or one of this PC",
                    found=repr(request.headers[hdrs.ORIGIN][:80]),
                    status=403,
                )
            return await handler(request)
        except SwarmError as error:
            return _refusal(error)
        except web.HTTPException as error:
            return _refusal(_of_aiohttp(request, error), error)
        except ConnectionError:
            # The client is gone, or reads nothing: without abort, what is buffered for it would be kept.
            if request.transport is not None:
                request.transport.abort()
            raise
        except Exception:
            log.exception("a request to the API failed: %s %s", request.method, request.path)
            return _refusal(SwarmError("internal error", action="The node's log says more."))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._snapshot()
        if not snapshot.ready:
            return _not_ready(snapshot)
        with self._slot():
            completion = parse(await _body(request), snapshot.model, lambda: secrets.randbits(_SEED_BITS))
            sampling = completion.request.sampling
            reply = Reply(
                id=f"chatcmpl-{secrets.token_hex(12)}",
                created=int(time.time()),
                model=snapshot.model,
                seed=None if sampling.greedy else sampling.seed,
            )
            async with pumped(self._generator.generate(completion.request)) as pump:
                if completion.stream:
                    return await self._stream(request, completion, reply, pump)
                deltas: list[Delta] = []
                while not deltas or deltas[-1].finish is None:
                    delta = await pump.next()
                    assert delta is not None
                    deltas.append(delta)
                return web.json_response(reply.whole(deltas))

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """One of the answers that may run at once."""
        if self._answers >= self._max_answers:
            raise RequestError(
                "too many requests at once",
                expected=f"at most {self._max_answers}",
                found=str(self._answers + 1),
                action="Ask again in a moment.",
                status=429,
                code="too_many_requests",
                retry_after_s=_BUSY_RETRY_S,
            )
        self._answers += 1
        try:
            yield
        finally:
            self._answers -= 1

    async def _stream(
        self, request: web.Request, completion: Completion, reply: Reply, pump: Pump
    ) -> web.StreamResponse:
        """Server-sent events. What fails before the first text, or soon, still gets a status of its own."""
        delta = await pump.next(self._quiet_s)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await self._send(response, reply.first_chunk())
        try:
            while True:
                if delta is None:
                    await self._write(response, b": waiting\n\n")
                elif delta.place:
                    await self._write(response, f": {in_line(delta.place)}\n\n".encode("ascii"))
                else:
                    if delta.text:
                        await self._send(response, reply.chunk({"content": delta.text}))
                    if delta.finish is not None:
                        break
                delta = await pump.next(self._quiet_s)
            await self._send(response, reply.last_chunk(delta))
            if completion.include_usage:
                await self._send(response, reply.usage_chunk(delta.usage))
        except SwarmError as error:  # the status is long sent: the stream itself tells
            await self._send(response, body_of(error))
        await self._write(response, b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        # ASCII only: some clients take U+2028 inside a text for a line end.
        await self._write(response, b"data: " + json.dumps(event).encode("ascii") + b"\n\n")

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Waits for a slow client, but not for ever. Raises ``ConnectionError``."""
        with anyio.move_on_after(self._write_timeout_s) as waiting:
            await response.write(data)
        if waiting.cancelled_caught:
            raise ConnectionAbortedError("the client does not read its answer")

    async def _models(self, _request: web.Request) -> web.Response:
        model = self._snapshot().model
        return web.json_response({"object": "list", "data": [self._card(model)] if model else []})

    async def _model(self, request: web.Request) -> web.Response:
        asked, model = request.match_info["model"], self._snapshot().model
        if asked != model:
            raise RequestError(
                "this swarm does not run that model",
                expected=repr(model),
                found=repr(asked[:80]),
                status=404,
                param="model",
                code="model_not_found",
            )
        return web.json_response(self._card(model))

    def _card(self, model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": self._created, "owned_by": "swarm"}

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response(status(self._snapshot()))

    async def _health(self, _request: web.Request) -> web.Response:
        snapshot = self._snapshot()
        return web.json_response({"status": "ok"}) if snapshot.ready else _not_ready(snapshot)


async def _bind(runner: web.AppRunner, host: str, port: int, fixed: bool) -> int:
    last = port if fixed or port == 0 else min(port + _PORTS_TRIED - 1, 65535)
    for candidate in range(port, last + 1):
        site = web.TCPSite(runner, host, candidate)
        try:
            await site.start()
        except OSError as error:
            # EACCES: Windows reserves ranges of ports, and Unix the lowest.
            if error.errno in (errno.EADDRINUSE, errno.EACCES) and candidate < last:
                continue
            raise _cannot_listen(host, port, last, error) from None
        return int(runner.addresses[-1][1])
    raise AssertionError("the loop returns or raises")


def _cannot_listen(host: str, port: int, last: int, error: OSError) -> UsageError:
    wanted = f"port {port}" if last == port else f"one port of {port} to {last}"
    return UsageError(
        "the API cannot listen",
        expected=f"{wanted} free on {host}",
        found=error.strerror or str(error),
        action="Name another one with --api-port.",
    )


async def _body(request: web.Request) -> bytes:
    try:
        with anyio.fail_after(limits.API_READ_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(
            "the request did not arrive in time", expected=f"within {limits.API_READ_TIMEOUT_S:.0f} s", status=408
        ) from None


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> RequestError:
    if error.status == 413:
        limit = f"at most {limits.MAX_API_BODY_BYTES} bytes"
        return RequestError("the request is too large", expected=limit, status=413)
    found = f"{request.method} {request.path[:80]}"
    known = "/v1/chat/completions, /v1/models, /status, /health"
    return RequestError(error.reason.lower(), expected=known, found=found, status=error.status)


def _refusal(error: SwarmError, original: web.HTTPException | None = None) -> web.Response:
    headers = {}
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        headers[hdrs.RETRY_AFTER] = str(error.retry_after_s)
    elif status_of(error) == 503:
        headers[hdrs.RETRY_AFTER] = str(_BUSY_RETRY_S)
    if original is not None and hdrs.ALLOW in original.headers:
        headers[hdrs.ALLOW] = original.headers[hdrs.ALLOW]
    return web.json_response(body_of(error), status=status_of(error), headers=headers)


def _not_ready(snapshot: Snapshot) -> web.Response:
    """503, when to come back, and what the swarm is busy with meanwhile."""
    seconds = retry_after_s(snapshot)
    error = RequestError(
        "the ring is not ready",
        found=snapshot.reason or "the ring is not formed yet",
        action=f"Ask again in {seconds} s; /status shows the progress.",
        status=503,
        code="not_ready",
    )
    body = {**body_of(error), "progress": progress(snapshot), "missing_bytes": status(snapshot)["missing_bytes"]}
    return web.json_response(body, status=503, headers={hdrs.RETRY_AFTER: str(seconds)})
