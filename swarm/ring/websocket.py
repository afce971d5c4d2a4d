"""Links over the network: a WebSocket in TLS 1.3, served and dialled by aiohttp.

TLS checks no authority: certificates are self-signed, and the handshake binds the one that was shown to the swarm's
secret (see `handshake`). No compression, no WebSocket heartbeat (the ring pings by itself), TCP_NODELAY.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import aiohttp
import anyio
import yarl
from aiohttp import web

from swarm.protocol.codec import Buffer
from swarm.protocol.config import DEFAULT_PORT, parse_peer
from swarm.protocol.errors import DeadlineError, LinkClosedError, ProtocolError, SwarmError, UsageError
from swarm.protocol.ids import NodeId
from swarm.protocol.limits import (
    HANDSHAKE_TIMEOUT_S,
    MAX_HALF_OPEN_LINKS,
    MAX_HALF_OPEN_LINKS_PER_ADDRESS,
    MAX_TENSOR_BYTES,
    NONCE_BYTES,
)
from swarm.ring.handshake import Credentials, Dialler, Listener
from swarm.ring.identity import Identity
from swarm.ring.link import CLOSE_TIMEOUT_S, FramedLink, Link, open_link

PORTS_TRIED = 20
"""From the default port upwards, before any free one will do."""

IDLE_TIMEOUT_S = 30.0
"""A connection that asks for nothing is closed after this."""

MAX_FRAME_BYTES = MAX_TENSOR_BYTES + 1
"""aiohttp refuses a frame of this length, and takes those below it."""

WebSocket: TypeAlias = "web.WebSocketResponse[Any] | aiohttp.ClientWebSocketResponse[Any]"


_log = logging.getLogger(__name__)


class WebSocketChannel:
    """A `link.Channel` over either end of a WebSocket."""

    def __init__(self, ws: WebSocket, session: aiohttp.ClientSession | None = None) -> None:
        """`session`: of a dialled WebSocket; closed with it."""
        self._ws = ws
        self._session = session
        # Taken now: aiohttp forgets the transport when the connection goes.
        self._socket = ws.get_extra_info("socket")

    async def write(self, frame: Buffer) -> None:
        try:
            # aiohttp takes any buffer, and waits where more than 256 KiB and the transport's own buffer are full.
            await self._ws.send_bytes(frame)  # type: ignore[arg-type]
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            raise LinkClosedError("connection lost", found=str(error)) from None

    async def read(self) -> Buffer:
        try:
            message = await self._ws.receive()
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            raise LinkClosedError("connection lost", found=str(error)) from None
        if message.type is aiohttp.WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if message.type is aiohttp.WSMsgType.TEXT:
            raise ProtocolError("a text frame", expected="binary frames")
        if message.type is aiohttp.WSMsgType.ERROR and isinstance(message.data, aiohttp.WebSocketError):
            raise ProtocolError("a broken WebSocket frame", found=str(message.data))
        raise LinkClosedError("connection lost")

    async def aclose(self) -> None:
        try:
            await self._ws.close()
        except (OSError, RuntimeError, aiohttp.ClientError):
            self.abort()
        finally:
            if self._session is not None:
                await self._session.close()

    def abort(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was closed before


class LinkServer:
    """Listens for links; other HTTPS routes may stand beside them. `start` and `close` once each."""

    def __init__(self, own: Credentials, on_link: Callable[[Link], Awaitable[None]]) -> None:
        """`on_link` runs once for each link that shook hands; the link ends when it returns."""
        self._own = own
        self._on_link = on_link
        self._app = web.Application()
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self._half_open: Counter[str] = Counter()
        self._links: set[FramedLink] = set()
        self._port = 0

    @property
    def port(self) -> int:
        """Where it listens; 0 before `start`."""
        return self._port

    def add_routes(self, routes: Iterable[web.AbstractRouteDef]) -> None:
        """Serve these too; before `start`. Whoever adds them checks who asks (`pairing.check_http_token`)."""
        self._app.add_routes(routes)

    async def start(self, port: int | None = None, host: str | None = None) -> None:
        """Listen on `port`; None: the default one or, where it is taken, the next free one.

        `host`: an address of this PC; None for all of them. Raises `UsageError` where a named port cannot be had.
        """
        self._app.router.add_get("/link", self._accept)
        self._runner = web.AppRunner(
            self._app, access_log=None, keepalive_timeout=IDLE_TIMEOUT_S, shutdown_timeout=CLOSE_TIMEOUT_S
        )
        await self._runner.setup()
        assert self._runner.server is not None
        loop, context = asyncio.get_running_loop(), _server_context(self._own.identity)
        for listening in _bind(port, host):
            self._port = listening.getsockname()[1]
            self._servers.append(
                await loop.create_server(
                    self._runner.server, sock=listening, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                )
            )

    async def close(self) -> None:
        """Stop listening and abort the links that are still up."""
        for server in self._servers:
            server.close()
        for link in list(self._links):
            link.abort("this node stops")
        if self._runner is not None:
            await self._runner.cleanup()

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        address = _address(request)
        ws = web.WebSocketResponse(compress=False, max_msg_size=MAX_FRAME_BYTES, timeout=CLOSE_TIMEOUT_S)
        try:
            with self._half_open_place(request.remote or ""):
                await ws.prepare(request)
                side = Listener(self._own, nonce=secrets.token_bytes(NONCE_BYTES))
                link = await open_link(WebSocketChannel(ws), side, address)
        except SwarmError as error:
            _log.info("no link with %s: %s", address, error)
            return ws
        self._links.add(link)
        try:
            await self._on_link(link)
        finally:
            self._links.discard(link)
            with anyio.CancelScope(shield=True):
                await link.close("closed")
        return ws

    @contextmanager
    def _half_open_place(self, address: str) -> Iterator[None]:
        if (
            self._half_open.total() >= MAX_HALF_OPEN_LINKS
            or self._half_open[address] >= MAX_HALF_OPEN_LINKS_PER_ADDRESS
        ):
            raise web.HTTPServiceUnavailable(text="too many links are being opened", headers={"Retry-After": "1"})
        self._half_open[address] += 1
        try:
            yield
        finally:
            self._half_open[address] -= 1
            if not self._half_open[address]:
                del self._half_open[address]


async def dial(address: str, own: Credentials, *, expected: NodeId | None = None) -> Link:
    """Open a link to ``host:port``; `expected` is the node that must answer there, where it is known.

    Raises `HandshakeError` where dialling again cannot help: another version, swarm, code or node, or this node itself.
    Raises `LinkClosedError`, `ProtocolError` or `DeadlineError` where it may.
    """
    try:
        host, port = parse_peer(address)
    except UsageError as error:
        raise LinkClosedError(str(error)) from None
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=_client_context(), limit=1, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    try:
        ws = await _connect(session, host, port, address)
        certificate = ws.get_extra_info("ssl_object").getpeercert(binary_form=True)
        side = Dialler(own, certificate=certificate, expected=expected, nonce=secrets.token_bytes(NONCE_BYTES))
        return await open_link(WebSocketChannel(ws, session), side, address)
    except BaseException:
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await session.close()
        raise


async def _connect(
    session: aiohttp.ClientSession, host: str, port: int, address: str
) -> aiohttp.ClientWebSocketResponse[Any]:
    url = yarl.URL.build(scheme="wss", host=host, port=port, path="/link")
    try:
        with anyio.fail_after(HANDSHAKE_TIMEOUT_S):
            return await session.ws_connect(
                url, max_msg_size=MAX_FRAME_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S)
            )
    except TimeoutError:
        raise DeadlineError(
            f"{address} did not answer within {HANDSHAKE_TIMEOUT_S:g} s",
            action="Check that a node runs there and that no firewall is in between.",
        ) from None
    except aiohttp.WSServerHandshakeError as error:
        raise LinkClosedError(f"{address} gave no link", found=f"HTTP status {error.status}") from None
    except (OSError, aiohttp.ClientError) as error:
        raise LinkClosedError(
            f"cannot reach {address}",
            found=str(error),
            action="Check that a node runs there and that no firewall is in between.",
        ) from None


def _server_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity.certificate_path, identity.key_path)
    return context


@cache
def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No authority vouches for office PCs: the handshake does, for the very certificate that is shown here.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _bind(port: int | None, host: str | None) -> list[socket.socket]:
    """Sockets that listen on one port, for IPv4 and, where the system has it, IPv6. Raises `UsageError`."""
    candidates = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED), 0]
    failure: OSError | None = None
    for candidate in candidates:
        try:
            if host is not None:
                return [_listen(socket.AF_INET6 if ":" in host else socket.AF_INET, host, candidate)]
            first = _listen(socket.AF_INET, "0.0.0.0", candidate)
        except OSError as error:
            failure = error
            continue
        try:
            return [first, _listen(socket.AF_INET6, "::", first.getsockname()[1])]
        except OSError:
            return [first]  # no IPv6 here
    assert failure is not None
    raise UsageError(
        "cannot listen" if port is None else f"cannot listen on port {port}",
        expected="a free port",
        found=failure.strerror or str(failure),
        action="Stop what uses it, name another with --port, or leave --port away.",
    )


def _listen(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":
            # There, SO_REUSEADDR would let two programs share the port.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        # Not left to the server: with SO_REUSEADDR, a port that another node took shows only here.
        listening.listen(128)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _address(request: web.Request) -> str:
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not peer:
        return "unknown"
    host, port = peer[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
