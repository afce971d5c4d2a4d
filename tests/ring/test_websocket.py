"""Links over real sockets and TLS, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest
from aiohttp import web

from swarm.protocol.codec import Decoder, encode
from swarm.protocol.errors import (
    DeadlineError,
    HandshakeError,
    LinkClosedError,
    ProtocolError,
    UsageError,
)
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.limits import MAX_HALF_OPEN_LINKS_PER_ADDRESS, MAX_INFLIGHT_FRAMES
from swarm.protocol.messages import Goodbye, Message, Ping, RowKind, Segment
from swarm.protocol.sampling import GREEDY
from swarm.ring import link as link_module
from swarm.ring import websocket
from swarm.ring.handshake import Credentials
from swarm.ring.identity import fingerprint_of, load_or_create
from swarm.ring.link import Link
from swarm.ring.pairing import OPEN_SECRET
from swarm.ring.websocket import LinkServer, WebSocketChannel, dial
from tests.loopwatch import loopwatch

pytestmark = pytest.mark.anyio

SECRET = b"s" * 32


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Credentials]:
    def credentials(name: str) -> Credentials:
        return Credentials(load_or_create(tmp_path_factory.mktemp(name)), name, "office", SECRET)

    return {name: credentials(name) for name in ("alice", "bob", "mallory")}


@pytest.fixture
def alice(people: dict[str, Credentials]) -> Credentials:
    return people["alice"]


@pytest.fixture
def bob(people: dict[str, Credentials]) -> Credentials:
    return people["bob"]


@pytest.fixture
def mallory(people: dict[str, Credentials]) -> Credentials:
    return people["mallory"]


class Host:
    """A listening node; its links wait in `links` for the test, and stay up until it is done."""

    def __init__(self, own: Credentials) -> None:
        self.server = LinkServer(own, self._on_link)
        self.node = own.node
        self.count = 0
        self._links: asyncio.Queue[Link] = asyncio.Queue()

    async def _on_link(self, link: Link) -> None:
        self.count += 1
        self._links.put_nowait(link)
        await asyncio.wait([link._writer])  # type: ignore[attr-defined]

    async def link(self) -> Link:
        with anyio.fail_after(10):
            return await self._links.get()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@contextlib.asynccontextmanager
async def hosting(own: Credentials) -> AsyncIterator[Host]:
    host = Host(own)
    await host.server.start(0, "127.0.0.1")
    try:
        yield host
    finally:
        await host.server.close()


def segment(start: int, rows: int, hidden: int) -> Segment:
    values = np.random.default_rng(start).random((rows, hidden), dtype="f4")
    return Segment(
        SessionId("a" * 8 + "-1-" + "b" * 8), NodeId("a" * 32), Epoch(1, NodeId("a" * 32)), 0, start,
        RowKind.PREFILL, tuple(range(rows)), 0, GREEDY, values,
    )  # fmt: skip


async def received(link: Link) -> Message:
    with anyio.fail_after(10):
        return await link.receive()


async def ending(link: Link) -> str:
    """The reason the link closes with; what still arrives is dropped."""
    with anyio.fail_after(10):
        while True:
            try:
                await link.receive()
            except LinkClosedError as error:
                return str(error)


async def test_two_nodes_over_tls(alice: Credentials, bob: Credentials) -> None:
    async with hosting(bob) as host:
        ours = await dial(host.address, alice, expected=bob.node)
        theirs = await host.link()
        assert (ours.peer, ours.peer_name, ours.peer_address) == (bob.node, "bob", host.address)
        assert (theirs.peer, theirs.peer_name) == (alice.node, "alice")
        assert theirs.peer_address.startswith("127.0.0.1:")
        for rows, hidden in ((1, 8), (2, 1536), (256, 4096), (0, 8)):
            for sender, receiver in ((ours, theirs), (theirs, ours)):
                sent = segment(rows, rows, hidden)
                await sender.send(sent)
                got = await received(receiver)
                assert isinstance(got, Segment)
                assert got.hidden is not None
                np.testing.assert_array_equal(got.hidden, sent.hidden)
                assert replace(got, hidden=None) == replace(sent, hidden=None)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ours.close, "going home")
            assert "going home" in await ending(theirs)


async def test_the_connection_is_tls_13_without_delay_or_compression(alice: Credentials, bob: Credentials) -> None:
    async with hosting(bob) as host:
        ours, theirs = await dial(host.address, alice), await host.link()
        for link in (ours, theirs):
            ws = link._channel._ws  # type: ignore[attr-defined]
            assert ws.get_extra_info("ssl_object").version() == "TLSv1.3"
            assert ws.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not ws.compress
        ours.abort("done")


async def test_large_frames_leave_the_loop_free(alice: Credentials, bob: Credentials) -> None:
    with loopwatch(0.5):
        async with hosting(bob) as host:
            ours, theirs = await dial(host.address, alice), await host.link()
            for start in range(4):
                await ours.send(segment(start, 256, 4096))
                await received(theirs)
            ours.abort("done")


async def test_a_wrong_code_is_told_to_both(alice: Credentials, bob: Credentials) -> None:
    async with hosting(bob) as host:
        with pytest.raises(HandshakeError, match='Start "alice" with --code and the code shown on "bob"'):
            await dial(host.address, replace(alice, secret=b"w" * 32))
        with pytest.raises(HandshakeError, match="has a pairing code"):
            await dial(host.address, replace(alice, secret=OPEN_SECRET))
        with pytest.raises(HandshakeError, match="two different swarms"):
            await dial(host.address, replace(alice, swarm="lab"))
        with pytest.raises(HandshakeError, match="dialled itself"):
            await dial(host.address, bob)
        with pytest.raises(HandshakeError, match="another node"):
            await dial(host.address, alice, expected=alice.node)
        assert host.count == 0
        (await dial(host.address, alice)).abort("done")


@pytest.mark.parametrize("secret", [SECRET, OPEN_SECRET])
async def test_a_man_in_the_middle_gets_no_link(
    alice: Credentials, bob: Credentials, mallory: Credentials, secret: bytes
) -> None:
    """Mallory ends TLS with her own certificate and passes every byte on to bob."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(
            "127.0.0.1", host.server.port, ssl=websocket._client_context()
        )

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

    async with hosting(replace(bob, secret=secret)) as host:
        context = websocket._server_context(mallory.identity)
        proxy = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
        try:
            port = proxy.sockets[0].getsockname()[1]
            with pytest.raises(ProtocolError, match="TLS certificate"):
                await dial(f"127.0.0.1:{port}", replace(alice, secret=secret))
            assert host.count == 0
        finally:
            proxy.close()


@contextlib.asynccontextmanager
async def stranger(host: Host) -> AsyncIterator[WebSocketChannel]:
    """A raw WebSocket that can send anything."""
    url, context = f"wss://{host.address}/link", websocket._client_context()
    async with aiohttp.ClientSession() as session, session.ws_connect(url, ssl=context) as ws:
        yield WebSocketChannel(ws)


async def said_goodbye(channel: WebSocketChannel) -> Goodbye:
    with anyio.fail_after(10):
        message = Decoder().feed(await channel.read())
    assert isinstance(message, Goodbye)
    return message


NEVER_SHAKES_HANDS: list[Callable[[Any], Any]] = [
    lambda ws: ws.send_bytes(b"\xff\x00garbage"),
    lambda ws: ws.send_bytes(b""),
    lambda ws: ws.send_bytes(b"\x00" * 300_000),
    lambda ws: ws.send_str("hello"),
    lambda ws: ws.send_bytes(encode(Ping(1))[0]),
    lambda ws: ws.send_bytes(encode(segment(0, 1, 8))[0]),
]


@pytest.mark.parametrize("send", NEVER_SHAKES_HANDS)
async def test_who_breaks_the_protocol_is_told_and_nobody_else_notices(
    alice: Credentials, bob: Credentials, send: Callable[[Any], Any]
) -> None:
    async with hosting(bob) as host:
        ours, theirs = await dial(host.address, alice), await host.link()
        async with stranger(host) as channel:
            await send(channel._ws)
            assert (await said_goodbye(channel)).retry
            with pytest.raises(LinkClosedError), anyio.fail_after(10):
                await channel.read()
        await ours.send(Ping(1))
        assert await received(theirs) == Ping(1)
        assert host.count == 1
        ours.abort("done")


async def test_breaking_the_protocol_later_ends_that_link_alone(alice: Credentials, bob: Credentials) -> None:
    async with hosting(bob) as host:
        bad = await dial(host.address, alice)
        bad_end = await host.link()
        good, good_end = await dial(host.address, alice), await host.link()
        await bad._channel.write(b"\xff")  # type: ignore[attr-defined]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ending, bad_end)
            assert "CBOR" in await ending(bad)
        assert "broke the protocol" in (bad_end.closed or "")
        await good_end.send(Ping(1))
        assert await received(good) == Ping(1)
        good.abort("done")


async def test_a_frame_over_the_limit_is_not_taken(
    alice: Credentials, bob: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "MAX_FRAME_BYTES", 100_000 + 1)
    async with hosting(bob) as host:
        ours, theirs = await dial(host.address, alice), await host.link()
        await ours.send(segment(0, 100, 250))  # 100,000 bytes: the most there may be
        await received(theirs)
        await ours.send(segment(0, 1, 25_001))
        assert await ending(theirs)
        assert await ending(ours)


async def test_silence_in_the_handshake_has_an_end(
    alice: Credentials, bob: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with hosting(bob) as host, stranger(host) as channel:
        with pytest.raises(LinkClosedError), anyio.fail_after(10):
            await channel.read()


async def test_half_open_links_are_bounded(
    alice: Credentials, bob: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(bob) as host, contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(stranger(host)) for _ in range(MAX_HALF_OPEN_LINKS_PER_ADDRESS)]
        with pytest.raises(LinkClosedError, match="503"):
            await dial(host.address, alice)
        await idle[0].aclose()
        (await dial(host.address, alice)).abort("done")
        # Those that are up do not count.
        for _ in range(MAX_HALF_OPEN_LINKS_PER_ADDRESS):
            await dial(host.address, alice)


async def test_a_listener_that_says_nothing(alice: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "HANDSHAKE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DeadlineError, match="did not answer"):
        await dial(f"127.0.0.1:{silent.getsockname()[1]}", alice)


async def test_addresses_where_no_node_is(alice: Credentials, bob: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    app_runner = web.AppRunner(web.Application())
    await app_runner.setup()
    site = web.TCPSite(app_runner, "127.0.0.1", 0, ssl_context=websocket._server_context(bob.identity))
    await site.start()
    elsewhere = app_runner.addresses[0][1]
    try:
        for address, text in (
            (f"127.0.0.1:{free}", "cannot reach"),
            (f"127.0.0.1:{elsewhere}", "404"),
            ("no.such.host.invalid:1", "cannot reach"),
            ("127.0.0.1:99999", "port out of range"),
            ("", "cannot read a peer"),
        ):
            with pytest.raises(LinkClosedError, match=text):
                await dial(address, alice)
    finally:
        await app_runner.cleanup()


async def test_a_dead_peer_is_noticed_at_once(alice: Credentials, bob: Credentials) -> None:
    async with hosting(bob) as host:
        for crashes in (0, 1):
            ends = await dial(host.address, alice), await host.link()
            ends[crashes].abort("crash")
            assert await ending(ends[1 - crashes]) == "connection lost"
            assert await ending(ends[crashes]) == "crash"


async def test_a_stopping_server_ends_its_links(alice: Credentials, bob: Credentials) -> None:
    async with hosting(bob) as host:
        ours = await dial(host.address, alice)
        await host.link()
        with anyio.fail_after(10):
            await host.server.close()
        assert await ending(ours)
        with pytest.raises(LinkClosedError):
            await dial(host.address, alice)


async def test_a_slow_reader_makes_the_sender_wait_and_control_overtakes(alice: Credentials, bob: Credentials) -> None:
    async with hosting(bob) as host:
        for slow in (0, 1):
            ends = await dial(host.address, alice), await host.link()
            reader, writer = ends[slow], ends[1 - slow]
            message, accepted = segment(0, 256, 1024), 0
            with anyio.move_on_after(1.0):
                while True:
                    await writer.send(message)
                    accepted += 1
            # The queue, and what sockets and TLS hold: some megabytes on either side.
            assert accepted < MAX_INFLIGHT_FRAMES // 2 + 40
            with anyio.fail_after(5):
                await writer.send(Ping(1))
            before = 0
            while not isinstance(await received(reader), Ping):
                before += 1
            assert before <= accepted - MAX_INFLIGHT_FRAMES // 2 + 2
            for _ in range(accepted - before):
                assert isinstance(await received(reader), Segment)
            writer.abort("done")


async def test_other_routes_stand_beside_the_links(alice: Credentials, bob: Credentials, mallory: Credentials) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=b"blob")

    host = Host(bob)
    host.server.add_routes([web.get("/blob", answer)])
    await host.server.start(0, "127.0.0.1")
    try:
        ours = await dial(host.address, alice)
        right = aiohttp.Fingerprint(ours.peer_fingerprint)
        wrong = aiohttp.Fingerprint(pin_of(mallory))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"https://{host.address}/blob", ssl=right) as response:
                assert await response.read() == b"blob"
            with pytest.raises(aiohttp.ServerFingerprintMismatch):
                await session.get(f"https://{host.address}/blob", ssl=wrong)
        theirs = await host.link()
        assert theirs.peer_fingerprint == pin_of(alice)
        ours.abort("done")
    finally:
        await host.server.close()


def pin_of(whose: Credentials) -> bytes:
    return fingerprint_of(whose.identity.certificate)


async def test_the_default_port_and_those_behind_it(
    alice: Credentials, bob: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(websocket, "DEFAULT_PORT", port)
        host = Host(bob)
        await host.server.start()
        try:
            assert host.server.port != port
            (await dial(host.address, alice)).abort("done")
        finally:
            await host.server.close()


@pytest.mark.parametrize("host_name", [None, "127.0.0.1"])
async def test_a_named_port_that_is_taken(bob: Credentials, host_name: str | None) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        host = Host(bob)
        with pytest.raises(UsageError, match=rf"port {port}.*--port"):
            await host.server.start(port, host_name)
        await host.server.close()


async def test_two_nodes_never_share_a_port(alice: Credentials, bob: Credentials) -> None:
    async with hosting(bob) as host:
        other = Host(alice)
        with pytest.raises(UsageError):
            await other.server.start(host.server.port, "127.0.0.1")
        await other.server.close()


async def test_a_cancelled_dial_leaves_nothing(alice: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, anyio.move_on_after(0.1) as scope:
        await dial(f"127.0.0.1:{silent.getsockname()[1]}", alice)
    assert scope.cancelled_caught


async def test_a_plain_tls_client_that_asks_for_nothing_else(bob: Credentials) -> None:
    """No handshake in TLS 1.2, nor in the clear."""
    asyncio.get_running_loop().set_debug(False)  # where it is on, asyncio reports each refusal as an error
    async with hosting(bob) as host:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):  # noqa: PT011 - an alert or a reset, by the system's choice
            await asyncio.open_connection("127.0.0.1", host.server.port, ssl=old)
        reader, writer = await asyncio.open_connection("127.0.0.1", host.server.port)
        writer.write(b"GET /link HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError), anyio.fail_after(10):
            assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
