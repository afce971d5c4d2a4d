"""Blobs between peers, with real TLS on loopback: honest peers, and every way to be another kind."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anyio
import pytest
from aiohttp import web

from swarm.model.store import PartialBlob, Store
from swarm.protocol.errors import StoreError
from swarm.protocol.ids import BlobId, NodeId
from swarm.ring import blob_server, transfer
from swarm.ring.blob_server import CHUNK_BYTES, NODE_HEADER, BlobServer
from swarm.ring.identity import Identity, load_or_create
from swarm.ring.pairing import http_token
from swarm.ring.transfer import (
    AttemptError,
    BlobFetcher,
    BlobSource,
    BusyError,
    RateMeter,
    RefusedError,
    SourceChoice,
    TransferProgress,
)
from tests.loopwatch import loopwatch

pytestmark = pytest.mark.anyio

SECRET = b"s" * 32
CLIENT = NodeId("c" * 32)
DATA = bytes(range(256)) * 8192  # 2 MiB, four chunks
BLOB = BlobId(hashlib.sha256(DATA).hexdigest())

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Peer:
    identity: Identity
    source: BlobSource
    store: Store
    server: BlobServer
    requests: list[web.Request]
    answered: anyio.Event
    """Set when the first request is done with."""


@contextlib.asynccontextmanager
async def peer(
    home: Path, handler: Handler | None = None, *, blobs: tuple[bytes, ...] = (DATA,), stall_timeout_s: float = 15.0
) -> AsyncIterator[Peer]:
    """A node that serves `blobs`; with `handler`, one that answers as the handler likes."""
    identity = load_or_create(home)
    store = opened(home / "store")
    for data in blobs:
        store.put_bytes(data)
    server = BlobServer(store, identity.node, SECRET, stall_timeout_s=stall_timeout_s)
    requests: list[web.Request] = []
    answered = anyio.Event()

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        requests.append(request)
        try:
            return await handler(request)
        finally:
            answered.set()

    app = web.Application(middlewares=[note])
    app.add_routes(server.routes() if handler is None else [web.get("/blob/{blob}", handler)])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate_path, identity.key_path)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        source = BlobSource(identity.node, f"127.0.0.1:{runner.addresses[0][1]}")
        yield Peer(identity, source, store, server, requests, answered)
    finally:
        await runner.cleanup()


def opened(root: Path) -> Store:
    store = Store(root)
    store.open()
    return store


def fetcher(store: Store, **options: float) -> BlobFetcher:
    return BlobFetcher(store, CLIENT, SECRET, **options)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return opened(tmp_path / "mine")


async def send_all(request: web.Request, data: bytes, *, claimed: int | None = None) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_length = len(data) if claimed is None else claimed
    await response.prepare(request)
    await response.write(data)
    return response


def cutting(data: bytes, arrived: anyio.Event) -> Handler:
    """Claims to send `DATA` from the start, sends `data`, and cuts when that has arrived."""

    async def cut(request: web.Request) -> web.StreamResponse:
        response = await send_all(request, data, claimed=len(DATA))
        with anyio.fail_after(20):
            await arrived.wait()
        assert request.transport is not None
        request.transport.close()
        return response

    return cut


def when(have: int, event: anyio.Event) -> Callable[[int], None]:
    return lambda now: event.set() if now >= have else None


# --- the serving side, through a plain client -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def ask(
    served: Peer, method: str = "GET", blob: str = BLOB, **headers: str
) -> AsyncIterator[tuple[int, aiohttp.ClientResponse]]:
    token = http_token(SECRET, served.identity.node, CLIENT)
    headers = {NODE_HEADER: CLIENT, "Authorization": f"Swarm {token}", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"https://{served.source.address}/blob/{blob}", headers=headers, ssl=False) as response,
    ):
        yield response.status, response


async def test_whole_blob_and_head(tmp_path: Path) -> None:
    async with peer(tmp_path) as served:
        async with ask(served) as (status, response):
            assert (status, await response.read()) == (200, DATA)
            assert served.server.sent == {CLIENT: len(DATA)}
        async with ask(served, "HEAD") as (status, response):
            assert (status, response.headers["Content-Length"]) == (200, str(len(DATA)))


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=1000-", 1000, len(DATA)),
        ("bytes=-7", len(DATA) - 7, len(DATA)),
        (f"bytes=5-{10 * len(DATA)}", 5, len(DATA)),
        (f"bytes={CHUNK_BYTES - 1}-{CHUNK_BYTES}", CHUNK_BYTES - 1, CHUNK_BYTES + 1),
    ],
)
async def test_ranges(tmp_path: Path, wanted: str, start: int, stop: int) -> None:
    async with peer(tmp_path) as served, ask(served, Range=wanted) as (status, response):
        assert (status, await response.read()) == (206, DATA[start:stop])
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"


@pytest.mark.parametrize("wanted", [f"bytes={len(DATA)}-", "bytes=9-3", "bytes=a-b", "rows=1-2", "bytes=-"])
async def test_ranges_that_cannot_be(tmp_path: Path, wanted: str) -> None:
    async with peer(tmp_path) as served, ask(served, Range=wanted) as (status, response):
        assert (status, response.headers["Content-Range"]) == (416, f"bytes */{len(DATA)}")


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({NODE_HEADER: ""}, "needs the headers"),
        ({"Authorization": "Bearer x"}, "needs the headers"),
        ({"Authorization": "Swarm x"}, "the token is wrong"),
        ({NODE_HEADER: "d" * 32}, "the token is wrong"),
    ],
)
async def test_only_the_swarm_is_served(tmp_path: Path, headers: dict[str, str], reason: str) -> None:
    async with peer(tmp_path) as served, ask(served, **headers) as (status, response):
        assert status == 403
        assert reason in await response.text()


@pytest.mark.parametrize("blob", ["0" * 64, "x", "..%2f..%2fsecrets.json", BLOB.upper()])
async def test_unknown_blob(tmp_path: Path, blob: str) -> None:
    async with peer(tmp_path) as served, ask(served, blob=blob) as (status, _):
        assert status == 404


async def test_transfers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_server, "MAX_SENDS", 1)
    monkeypatch.setattr(blob_server, "QUEUE_TIMEOUT_S", 0.05)
    large = bytes(32 * 1024**2)  # more than the sockets' buffers hold
    name = hashlib.sha256(large).hexdigest()
    async with peer(tmp_path, blobs=(large,)) as served, ask(served, blob=name) as (status, slow):
        assert status == 200
        await slow.content.read(1)  # and then takes nothing more
        async with ask(served, blob=name) as (status, response):
            assert (status, response.headers["Retry-After"]) == (503, "1")


async def test_a_receiver_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    large = bytes(32 * 1024**2)
    name = hashlib.sha256(large).hexdigest()
    async with peer(tmp_path, blobs=(large,), stall_timeout_s=0.1) as served, ask(served, blob=name) as (_, slow):
        with anyio.fail_after(20):
            await served.answered.wait()
        with pytest.raises(aiohttp.ClientError):
            await slow.read()


# --- the fetching side ----------------------------------------------------------------------------------------------


async def test_fetch(tmp_path: Path, store: Store) -> None:
    seen: list[int] = []
    async with peer(tmp_path / "a") as served, fetcher(store) as mine:
        result = await mine.fetch(BLOB, len(DATA), [served.source], seen.append)
        assert result.by_node == {served.identity.node: len(DATA)}
        assert result.bytes == len(DATA)
        assert result.complaints == ()
        assert store.read(BLOB) == DATA
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == (0, len(DATA))
        again = await mine.fetch(BLOB, len(DATA), [])
        assert again.bytes == 0


async def test_neither_side_blocks_the_loop(tmp_path: Path, store: Store) -> None:
    large = bytes(32 * 1024**2)
    blob = BlobId(hashlib.sha256(large).hexdigest())
    async with peer(tmp_path / "a", blobs=(large,)) as served, fetcher(store) as mine:
        with loopwatch(0.25):
            await mine.fetch(blob, len(large), [served.source])


async def test_an_empty_blob(tmp_path: Path, store: Store) -> None:
    empty = BlobId(hashlib.sha256(b"").hexdigest())
    async with peer(tmp_path / "a", blobs=(b"",)) as served, fetcher(store) as mine:
        await mine.fetch(empty, 0, [served.source])
    assert store.read(empty) == b""


async def test_resumes_after_a_cut(tmp_path: Path, store: Store) -> None:
    arrived = anyio.Event()
    async with (
        peer(tmp_path / "a", cutting(DATA[:CHUNK_BYTES], arrived)) as first,
        peer(tmp_path / "b") as second,
        fetcher(store) as mine,
    ):
        result = await mine.fetch(BLOB, len(DATA), [first.source, second.source], when(CHUNK_BYTES, arrived))
        assert second.requests[0].headers["Range"] == f"bytes={CHUNK_BYTES}-"
    assert result.by_node == {first.identity.node: CHUNK_BYTES, second.identity.node: len(DATA) - CHUNK_BYTES}
    assert "cut" in result.complaints[0]
    assert store.read(BLOB) == DATA


async def test_resumes_after_a_restart(tmp_path: Path, store: Store) -> None:
    with store.partial(BLOB, len(DATA)) as partial:
        partial.append(DATA[:777])
    async with peer(tmp_path / "a") as served, fetcher(opened(store.root)) as mine:
        result = await mine.fetch(BLOB, len(DATA), [served.source])
        assert served.requests[0].headers["Range"] == "bytes=777-"
    assert result.bytes == len(DATA) - 777
    assert store.read(BLOB) == DATA


async def test_a_stalled_peer_is_left(tmp_path: Path, store: Store) -> None:
    never = anyio.Event()

    async def stalling(request: web.Request) -> web.StreamResponse:
        response = await send_all(request, DATA[:100], claimed=len(DATA))
        with anyio.move_on_after(30):
            await never.wait()
        return response

    async with (
        peer(tmp_path / "a", stalling) as first,
        peer(tmp_path / "b") as second,
        fetcher(store, stall_timeout_s=0.3) as mine,
    ):
        result = await mine.fetch(BLOB, len(DATA), [first.source, second.source])
        never.set()
    assert result.by_node[second.identity.node] == len(DATA) - 100
    assert "next to nothing for 0.3 s" in result.complaints[0]


async def test_wrong_bytes_are_found_and_the_peer_is_not_asked_again(tmp_path: Path, store: Store) -> None:
    async def lying(request: web.Request) -> web.StreamResponse:
        return await send_all(request, b"x" * len(DATA))

    async with peer(tmp_path / "a", lying) as liar, peer(tmp_path / "b") as honest, fetcher(store) as mine:
        result = await mine.fetch(BLOB, len(DATA), [liar.source, honest.source])
        assert store.read(BLOB) == DATA
        assert "starting over" in result.complaints[0]
        assert set(mine.distrusted) == {liar.identity.node}
        with pytest.raises(StoreError, match="no peer to ask"):
            await mine.fetch(BlobId("1" * 64), 5, [liar.source])
        assert len(liar.requests) == 1


async def test_wrong_bytes_from_an_earlier_run_blame_nobody(tmp_path: Path, store: Store) -> None:
    with store.partial(BLOB, len(DATA)) as partial:
        partial.append(b"x" * 777)
    async with peer(tmp_path / "a") as served, fetcher(store) as mine:
        await mine.fetch(BLOB, len(DATA), [served.source])
        assert mine.distrusted == {}
    assert store.read(BLOB) == DATA


async def test_wrong_bytes_behind_a_cut_never_blame_the_honest_peer(tmp_path: Path, store: Store) -> None:
    arrived = anyio.Event()
    async with (
        peer(tmp_path / "a", cutting(b"x" * CHUNK_BYTES, arrived)) as liar,
        peer(tmp_path / "b") as honest,
        fetcher(store) as mine,
    ):
        result = await mine.fetch(BLOB, len(DATA), [liar.source, honest.source], when(CHUNK_BYTES, arrived))
        assert mine.distrusted == {}
    assert result.by_node[honest.identity.node] == 2 * len(DATA) - CHUNK_BYTES
    assert store.read(BLOB) == DATA


@pytest.mark.parametrize("length", [len(DATA) - 1, len(DATA) + 1])
async def test_another_size_is_refused(tmp_path: Path, store: Store, length: int) -> None:
    async def sending(request: web.Request) -> web.StreamResponse:
        return await send_all(request, bytes(length))

    async with peer(tmp_path / "a", sending) as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match="another size"):
            await mine.fetch(BLOB, len(DATA), [served.source])


async def test_nobody_has_it(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a", blobs=()) as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match=r"refuses \(404\).*does not have the blob"):
            await mine.fetch(BLOB, len(DATA), [served.source])
        assert len(served.requests) == 1


async def test_a_wrong_token_is_told(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a") as served, BlobFetcher(store, CLIENT, b"another secret") as mine:
        with pytest.raises(StoreError, match=r"refuses \(403\).*another secret"):
            await mine.fetch(BLOB, len(DATA), [served.source])


async def test_the_certificate_is_checked_before_anything_is_said(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a") as served, fetcher(store) as mine:
        impostor = BlobSource(NodeId("e" * 32), served.source.address)
        with pytest.raises(StoreError, match="another node answers"):
            await mine.fetch(BLOB, len(DATA), [impostor])
        assert served.requests == []
        assert served.server.sent == {}


async def test_a_peer_that_is_gone_is_left(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a") as gone:
        pass
    async with peer(tmp_path / "b") as served, fetcher(store) as mine:
        result = await mine.fetch(BLOB, len(DATA), [gone.source, served.source])
    assert result.by_node == {served.identity.node: len(DATA)}
    assert "cannot be reached" in result.complaints[0]


async def test_a_busy_peer_is_waited_for(tmp_path: Path, store: Store) -> None:
    answers = iter([503, 503, 503, 503, 503, 200])

    async def busy(request: web.Request) -> web.StreamResponse:
        if next(answers) == 503:
            raise web.HTTPServiceUnavailable
        return await send_all(request, DATA)

    async with peer(tmp_path / "a", busy) as served, fetcher(store) as mine:
        result = await mine.fetch(BLOB, len(DATA), [served.source])
    assert result.bytes == len(DATA)


async def test_a_redirect_is_not_followed(tmp_path: Path, store: Store) -> None:
    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"https://127.0.0.1:1/blob/{BLOB}")

    async with peer(tmp_path / "a", elsewhere) as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match=r"refuses \(302\)"):
            await mine.fetch(BLOB, len(DATA), [served.source])


async def test_a_full_disk_is_the_store_s_error(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: PartialBlob, _data: bytes) -> None:
        raise StoreError("the disk is full", expected="5 more bytes", found="0 bytes free")

    monkeypatch.setattr(PartialBlob, "append", refuse)
    async with peer(tmp_path / "a") as first, peer(tmp_path / "b") as second, fetcher(store) as mine:
        with pytest.raises(StoreError, match="disk is full"):
            await mine.fetch(BLOB, len(DATA), [first.source, second.source])
        assert second.requests == []
        assert mine.distrusted == {}


async def test_cancelled_in_the_middle_it_stays_resumable(tmp_path: Path, store: Store) -> None:
    half = anyio.Event()

    async def half_way(request: web.Request) -> web.StreamResponse:
        response = await send_all(request, DATA[: len(DATA) // 2], claimed=len(DATA))
        with anyio.move_on_after(30):
            await half.wait()
        return response

    async with peer(tmp_path / "a", half_way) as slow, peer(tmp_path / "b") as served, fetcher(store) as mine:
        async with anyio.create_task_group() as group:

            def stop_at_half(have: int) -> None:
                if have >= len(DATA) // 2:
                    group.cancel_scope.cancel()

            group.start_soon(mine.fetch, BLOB, len(DATA), [slow.source], stop_at_half)
        half.set()
        result = await mine.fetch(BLOB, len(DATA), [served.source])
    assert result.bytes == len(DATA) // 2
    assert store.read(BLOB) == DATA


# --- several blobs --------------------------------------------------------------------------------------------------


async def test_fetch_all_spreads_over_the_sources_and_adds_up(tmp_path: Path, store: Store) -> None:
    blobs = tuple(bytes([n]) * (CHUNK_BYTES + n) for n in range(8))
    wanted = [(BlobId(hashlib.sha256(data).hexdigest()), len(data)) for data in blobs]
    total = sum(map(len, blobs))
    store.put_bytes(blobs[0])
    seen: list[TransferProgress] = []
    async with peer(tmp_path / "a", blobs=blobs) as a, peer(tmp_path / "b", blobs=blobs) as b, fetcher(store) as mine:
        summary = await mine.fetch_all(wanted, [a.source, b.source], seen.append)
    assert [store.read(blob) for blob, _ in wanted] == list(blobs)
    assert [one.blob for one in summary.blobs] == [blob for blob, _ in wanted]
    assert set(summary.by_node) == {a.identity.node, b.identity.node}
    assert sum(summary.by_node.values()) == total - len(blobs[0])
    assert (seen[-1].done, seen[-1].total) == (total, total)


async def test_fetch_all_is_bounded(tmp_path: Path, store: Store) -> None:
    running, most = 0, 0
    enough = anyio.Event()

    async def counting(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == transfer.MAX_FETCHES:
            enough.set()
        with anyio.fail_after(10):
            await enough.wait()
        running -= 1
        return await send_all(request, blobs[request.match_info["blob"]])

    blobs = {hashlib.sha256(bytes([n])).hexdigest(): bytes([n]) for n in range(12)}
    async with peer(tmp_path / "a", counting) as served, fetcher(store) as mine:
        await mine.fetch_all([(BlobId(blob), 1) for blob in blobs], [served.source], lambda _: None)
    assert most == transfer.MAX_FETCHES


async def test_fetch_all_raises_plainly(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a") as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match="404"):
            await mine.fetch_all([(BLOB, len(DATA)), (BlobId("1" * 64), 5)], [served.source], lambda _: None)


# --- decisions ------------------------------------------------------------------------------------------------------

A, B = BlobSource(NodeId("a" * 32), "a:1"), BlobSource(NodeId("b" * 32), "b:1")


def test_choice_takes_the_idle_source() -> None:
    choice = SourceChoice.among([A, B, A])
    assert choice.next({}) == A
    assert choice.next({A.node: 1}) == B


def test_choice_gives_up_in_the_end_and_backs_off() -> None:
    choice = SourceChoice.among([A])
    waits = [choice.failed(A, AttemptError("cut"), progressed=False) for _ in range(transfer.MAX_FAILURES)]
    assert waits == [0.5, 1.0, 2.0, 0.0]
    assert choice.next({}) is None
    assert len(choice.complaints) == transfer.MAX_FAILURES


def test_choice_goes_on_while_bytes_arrive() -> None:
    choice = SourceChoice.among([A])
    for _ in range(100):
        choice.failed(A, AttemptError("cut"), progressed=True)
    assert choice.next({}) == A
    assert len(choice.complaints) <= 8


def test_choice_drops_a_refusal_at_once_and_waits_long_for_a_busy_one() -> None:
    choice = SourceChoice.among([A, B])
    assert choice.failed(A, RefusedError("404"), progressed=False) == 0.0
    for _ in range(transfer.MAX_BUSY - 1):
        choice.failed(B, BusyError("busy"), progressed=False)
    assert choice.next({}) == B
    choice.failed(B, BusyError("busy"), progressed=False)
    assert choice.next({}) is None


def test_rate_is_that_of_the_window() -> None:
    meter = RateMeter(0.0)
    for tenth in range(1, 101):
        meter.add(10, tenth / 10)
    assert meter.rate(10.0) == pytest.approx(100, rel=0.1)
    for tenth in range(101, 201):
        meter.add(50, tenth / 10)
    assert meter.rate(20.0) == pytest.approx(500, rel=0.1)
    assert RateMeter(1.0).rate(1.0) == 0.0
