"""Blobs between peers, with real TLS on loopback: honest peers, and every way to be another kind."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from swarm.model.partial import PIECE_BYTES, PartialBlob, piece_span
from swarm.model.store import Store
from swarm.protocol.errors import StoreError
from swarm.protocol.ids import BlobId, NodeId
from swarm.ring import blob_server, pieces, transfer
from swarm.ring.blob_client import BlobSource
from swarm.ring.blob_server import CHUNK_BYTES, NODE_HEADER, BlobServer
from swarm.ring.identity import Identity, load_or_create
from swarm.ring.pairing import http_token
from swarm.ring.transfer import BlobFetcher, FetchSummary, RateMeter, TransferProgress
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
    app.add_routes(
        server.routes()
        if handler is None
        else [web.get("/blob/{blob}", handler), web.get("/blob/{blob}/pieces", handler)]
    )
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

PIECES = 4
BIG = bytes(range(251)) * (PIECES * PIECE_BYTES // 251 + 1)
BIG = BIG[: (PIECES - 1) * PIECE_BYTES + 777]
BIG_BLOB = BlobId(hashlib.sha256(BIG).hexdigest())
WANTED = [(BIG_BLOB, len(BIG))]


def none(_progress: TransferProgress) -> None:
    pass


def asked(request: web.Request, size: int) -> tuple[int, int]:
    start, stop, _ = request.http_range.indices(size)
    return start, stop


async def send_part(request: web.Request, data: bytes, *, most: int | None = None) -> web.StreamResponse:
    """What was asked for of `data`; with `most`, only the beginning of that."""
    start, stop = asked(request, len(data))
    response = web.StreamResponse(status=200 if stop - start == len(data) else 206)
    response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    response.content_length = stop - start
    await response.prepare(request)
    await response.write(data[start:stop] if most is None else data[start : min(stop, start + most)])
    return response


def pieces_of(data: bytes) -> bytes:
    spans = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    return b"".join(hashlib.sha256(span).digest() for span in spans)


def serving(data: bytes, listed: bytes | None = None) -> Handler:
    """Has `data` where `BIG` should be; says so too, or `listed`."""

    async def serve(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/pieces"):
            return await send_all(request, pieces_of(data) if listed is None else listed)
        return await send_part(request, data)

    return serve


def damaged(*indices: int) -> bytes:
    data = bytearray(BIG)
    for index in indices:
        data[index * PIECE_BYTES + 5] ^= 1
    return bytes(data)


async def test_fetch(tmp_path: Path, store: Store) -> None:
    seen: list[TransferProgress] = []
    async with peer(tmp_path / "a", blobs=(BIG,)) as served, fetcher(store) as mine:
        result = await mine.fetch_all(WANTED, [served.source], seen.append)
        assert result == FetchSummary({served.identity.node: len(BIG)})
        assert store.read(BIG_BLOB) == BIG
        assert [now.done for now in seen] == sorted(now.done for now in seen)
        assert (seen[-1].done, seen[-1].total) == (len(BIG), len(BIG))
        again = await mine.fetch_all(WANTED, [], none)
        assert again.by_node == {}
    assert list((store.root / "partial").iterdir()) == []


async def test_one_blob_comes_from_all_sources_at_once(tmp_path: Path, store: Store) -> None:
    """Each peer answers only when all three have been asked."""
    nodes: set[int] = set()
    everybody = anyio.Event()

    def waiting(number: int) -> Handler:
        async def wait(request: web.Request) -> web.StreamResponse:
            nodes.add(number)
            if len(nodes) == 3:
                everybody.set()
            with anyio.fail_after(20):
                await everybody.wait()
            return await send_part(request, BIG)

        return wait

    async with (
        peer(tmp_path / "a", waiting(0)) as a,
        peer(tmp_path / "b", waiting(1)) as b,
        peer(tmp_path / "c", waiting(2)) as c,
        fetcher(store) as mine,
    ):
        result = await mine.fetch_all(WANTED, [a.source, b.source, c.source], none)
        assert sum(len(served.requests) for served in (a, b, c)) == PIECES  # nothing twice
    assert sum(result.by_node.values()) == len(BIG)
    assert store.read(BIG_BLOB) == BIG


async def test_neither_side_blocks_the_loop(tmp_path: Path, store: Store) -> None:
    large = bytes(32 * 1024**2)
    blob = BlobId(hashlib.sha256(large).hexdigest())
    async with peer(tmp_path / "a", blobs=(large,)) as served, fetcher(store) as mine:
        with loopwatch(0.25):
            await mine.fetch_all([(blob, len(large))], [served.source], none)


async def test_an_empty_blob(tmp_path: Path, store: Store) -> None:
    empty = BlobId(hashlib.sha256(b"").hexdigest())
    async with fetcher(store) as mine:
        await mine.fetch_all([(empty, 0)], [], none)
        assert store.read(empty) == b""
        with pytest.raises(StoreError, match="not those of the blob"):
            await mine.fetch_all([(BLOB, 0)], [], none)


async def test_a_peer_that_dies_in_mid_range(tmp_path: Path, store: Store) -> None:
    async def dying(request: web.Request) -> web.StreamResponse:
        response = await send_part(request, BIG, most=1000)
        assert request.transport is not None
        request.transport.close()
        return response

    async with (
        peer(tmp_path / "a", dying) as first,
        peer(tmp_path / "b", blobs=(BIG,)) as second,
        fetcher(store) as mine,
    ):
        result = await mine.fetch_all(WANTED, [first.source, second.source], none)
        assert store.read(BIG_BLOB) == BIG
        assert result.by_node[second.identity.node] == len(BIG)
        assert "cut" in result.complaints[0]
        assert first.source.address in result.complaints[0]
        assert mine.distrusted == {}


@pytest.mark.parametrize("damage", [False, True])
async def test_resumes_after_a_restart(tmp_path: Path, store: Store, damage: bool) -> None:
    with store.partial(BIG_BLOB, len(BIG)) as partial:
        for index in (0, 2):
            partial.put(index, BIG[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
    if damage:  # as a power loss leaves it
        with (store.root / "partial" / BIG_BLOB).open("r+b") as file:
            file.seek(2 * PIECE_BYTES + 99)
            file.write(b"?")
    async with peer(tmp_path / "a", blobs=(BIG,)) as served, fetcher(opened(store.root)) as mine:
        result = await mine.fetch_all(WANTED, [served.source], none)
        ranges = {request.headers["Range"] for request in served.requests}
    missing = (1, 2, 3) if damage else (1, 3)
    spans = [piece_span(len(BIG), index) for index in missing]
    assert ranges == {f"bytes={start}-{stop - 1}" for start, stop in spans}
    assert sum(result.by_node.values()) == sum(stop - start for start, stop in spans)
    assert store.read(BIG_BLOB) == BIG


async def test_a_stalled_peer_is_relieved_and_left(tmp_path: Path, store: Store) -> None:
    never = anyio.Event()

    async def stalling(request: web.Request) -> web.StreamResponse:
        response = await send_part(request, BIG, most=100)
        with anyio.move_on_after(30):
            await never.wait()
        return response

    async with (
        peer(tmp_path / "a", stalling) as first,
        peer(tmp_path / "b", blobs=(BIG,)) as second,
        fetcher(store, stall_timeout_s=0.3) as mine,
    ):
        result = await mine.fetch_all(WANTED, [first.source, second.source], none)
        never.set()
    assert store.read(BIG_BLOB) == BIG
    assert result.by_node[second.identity.node] == len(BIG)


async def test_the_last_piece_does_not_wait_for_the_slowest(tmp_path: Path, store: Store) -> None:
    """The stall limit is far away: only because the piece is taken over does this end."""
    never, asked_once = anyio.Event(), anyio.Event()

    async def stalling(request: web.Request) -> web.StreamResponse:
        response = await send_part(request, BIG, most=100)
        asked_once.set()
        await never.wait()
        return response

    async def later(request: web.Request) -> web.StreamResponse:
        with anyio.fail_after(20):
            await asked_once.wait()
        return await send_part(request, BIG)

    async with (
        peer(tmp_path / "a", stalling) as first,
        peer(tmp_path / "b", later) as second,
        fetcher(store, stall_timeout_s=600.0) as mine,
    ):
        with anyio.fail_after(60):
            result = await mine.fetch_all(WANTED, [first.source, second.source], none)
        never.set()
    assert store.read(BIG_BLOB) == BIG
    assert result.complaints == ()
    assert result.by_node[second.identity.node] == len(BIG)


async def test_a_peer_that_only_stalls_is_given_up(tmp_path: Path, store: Store, monkeypatch: Any) -> None:
    monkeypatch.setattr(pieces, "MAX_FAILURES", 2)

    async def dripping(request: web.Request) -> web.StreamResponse:
        response = await send_part(request, BIG, most=100)
        assert request.transport is not None
        with anyio.move_on_after(30):
            while not request.transport.is_closing():
                await anyio.sleep(0.02)
                await response.write(b"x")
        return response

    async with peer(tmp_path / "a", dripping) as served, fetcher(store, stall_timeout_s=0.2) as mine:
        with pytest.raises(StoreError, match=r"next to nothing for 0.2 s"):
            await mine.fetch_all(WANTED, [served.source], none)


@pytest.mark.parametrize("first", ["liar", "honest"])
@pytest.mark.parametrize("tells", [True, False], ids=["says what it has", "says what it should have"])
async def test_a_liar_is_found_and_only_its_pieces_come_again(
    tmp_path: Path, store: Store, first: str, tells: bool
) -> None:
    """It gives the first two pieces, wrong, before the honest one is asked."""
    bad = damaged(0, 1)
    both = anyio.Event()
    given: list[int] = []
    notices: list[str] = []

    async def lying(request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/pieces"):
            given.append(asked(request, len(BIG))[0])
            if len(given) == 2:
                both.set()
        return await serving(bad, None if tells else pieces_of(BIG))(request)

    async def honest(request: web.Request) -> web.StreamResponse:
        with anyio.fail_after(20):
            await both.wait()
        return await serving(BIG)(request)

    async with (
        peer(tmp_path / "a", lying) as liar,
        peer(tmp_path / "b", honest) as good,
        BlobFetcher(store, CLIENT, SECRET, notices.append) as mine,
    ):
        order = [liar.source, good.source] if first == "liar" else [good.source, liar.source]
        result = await mine.fetch_all(WANTED, order, none)
        assert store.read(BIG_BLOB) == BIG
        assert set(mine.distrusted) == {liar.identity.node}
        assert [liar.source.address in notice for notice in notices] == [True]
        assert any("wrong bytes" in complaint for complaint in result.complaints)
        assert result.by_node[good.identity.node] <= 2 * len(BIG)
        asked_before = len(liar.requests)
        with pytest.raises(StoreError, match="no peer to ask"):
            await mine.fetch_all([(BlobId("1" * 64), 5)], [liar.source], none)
        assert len(liar.requests) == asked_before


async def test_a_peer_whose_disk_is_wrong_finds_out(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a", blobs=(BIG,)) as rotten, fetcher(store) as mine:
        rotten.store.path(BIG_BLOB).write_bytes(damaged(2))
        with pytest.raises(StoreError, match="not those of the blob"):
            await mine.fetch_all(WANTED, [rotten.source], none)
        assert not rotten.store.has(BIG_BLOB)


async def test_good_pieces_are_not_fetched_again(tmp_path: Path, store: Store) -> None:
    """One piece of an earlier run is wrong on the disk, and its digest fits: nobody can be blamed."""
    bad = damaged(2)
    with store.partial(BIG_BLOB, len(BIG)) as partial:
        for index in range(PIECES):
            partial.put(index, bad[slice(*piece_span(len(BIG), index))])
    async with peer(tmp_path / "a", blobs=(BIG,)) as served, fetcher(store) as mine:
        result = await mine.fetch_all(WANTED, [served.source], none)
        assert result.by_node == {served.identity.node: PIECE_BYTES}
        assert mine.distrusted == {}
    assert store.read(BIG_BLOB) == BIG


async def test_where_all_lie_nobody_is_left(tmp_path: Path, store: Store) -> None:
    async with (
        peer(tmp_path / "a", serving(damaged(0))) as one,
        peer(tmp_path / "b", serving(damaged(3))) as two,
        fetcher(store) as mine,
    ):
        with pytest.raises(StoreError, match="not those of the blob"):
            await mine.fetch_all(WANTED, [one.source, two.source], none)
        assert len(mine.distrusted) == 2
    assert not store.has(BIG_BLOB)


async def test_a_disk_that_forgets_blames_nobody(tmp_path: Path, store: Store, monkeypatch: Any) -> None:
    def put_badly(self: PartialBlob, index: int, data: bytearray) -> None:
        put(self, index, data)
        if index == 0:
            with self._claim.open("r+b") as file:
                file.write(b"?" if data[0] != ord("?") else b"!")
            self.forget([])  # hashed again from the disk

    put = PartialBlob.put
    monkeypatch.setattr(PartialBlob, "put", put_badly)
    async with peer(tmp_path / "a", blobs=(BIG,)) as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match="does not keep"):
            await mine.fetch_all(WANTED, [served.source], none)
        assert mine.distrusted == {}
        monkeypatch.undo()
        await mine.fetch_all(WANTED, [served.source], none)
    assert store.read(BIG_BLOB) == BIG


@pytest.mark.parametrize("length", [len(DATA) - 1, len(DATA) + 1])
async def test_another_size_is_refused(tmp_path: Path, store: Store, length: int) -> None:
    async def sending(request: web.Request) -> web.StreamResponse:
        return await send_part(request, bytes(length))

    async with peer(tmp_path / "a", sending) as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match="another size"):
            await mine.fetch_all([(BLOB, len(DATA))], [served.source], none)


async def test_nobody_has_it(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a", blobs=()) as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match=r"refuses \(404\).*does not have the blob"):
            await mine.fetch_all([(BLOB, 5)], [served.source], none)
        assert len(served.requests) == 1


async def test_what_a_peer_refused_is_not_asked_again(tmp_path: Path, store: Store) -> None:
    async with (
        peer(tmp_path / "a", blobs=(DATA,)) as some,
        peer(tmp_path / "b", blobs=(DATA, BIG)) as all_of_it,
        fetcher(store) as mine,
    ):
        await mine.fetch_all([*WANTED, (BLOB, len(DATA))], [some.source, all_of_it.source], none)
        refused = [request for request in some.requests if BIG_BLOB in request.path]
        assert len(refused) <= transfer.STREAMS_PER_SOURCE  # those that were under way together
    assert (store.read(BIG_BLOB), store.read(BLOB)) == (BIG, DATA)


async def test_a_wrong_token_is_told(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a") as served, BlobFetcher(store, CLIENT, b"another secret") as mine:
        with pytest.raises(StoreError, match=r"refuses \(403\).*another secret"):
            await mine.fetch_all([(BLOB, len(DATA))], [served.source], none)


async def test_the_certificate_is_checked_before_anything_is_said(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a") as served, fetcher(store) as mine:
        impostor = BlobSource(NodeId("e" * 32), served.source.address)
        with pytest.raises(StoreError, match="another node answers"):
            await mine.fetch_all([(BLOB, len(DATA))], [impostor], none)
        assert served.requests == []
        assert served.server.sent == {}


async def test_a_peer_that_is_gone_is_left(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a") as gone:
        pass
    async with peer(tmp_path / "b", blobs=(BIG,)) as served, fetcher(store) as mine:
        result = await mine.fetch_all(WANTED, [gone.source, served.source], none)
    assert result.by_node[served.identity.node] == len(BIG)
    assert "cannot be reached" in result.complaints[0]


async def test_a_busy_peer_is_waited_for(tmp_path: Path, store: Store) -> None:
    answers = iter([503, 503, 503, 503, 503])

    async def busy(request: web.Request) -> web.StreamResponse:
        if next(answers, 200) == 503:
            raise web.HTTPServiceUnavailable
        return await send_part(request, BIG)

    async with peer(tmp_path / "a", busy) as served, fetcher(store) as mine:
        await mine.fetch_all(WANTED, [served.source], none)
    assert store.read(BIG_BLOB) == BIG


async def test_a_redirect_is_not_followed(tmp_path: Path, store: Store) -> None:
    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"https://127.0.0.1:1/blob/{BLOB}")

    async with peer(tmp_path / "a", elsewhere) as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match=r"refuses \(302\)"):
            await mine.fetch_all([(BLOB, len(DATA))], [served.source], none)


async def test_a_full_disk_is_the_store_s_error(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: PartialBlob, _index: int, _data: bytes) -> None:
        raise StoreError("the disk is full", expected="5 more bytes", found="0 bytes free")

    async with peer(tmp_path / "a") as first, fetcher(store) as mine:
        with monkeypatch.context() as patch:
            patch.setattr(PartialBlob, "put", refuse)
            with pytest.raises(StoreError, match="disk is full"):
                await mine.fetch_all([(BLOB, len(DATA))], [first.source], none)
        assert mine.distrusted == {}
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=len(BIG)))
            asked_before = len(first.requests)
            with pytest.raises(StoreError, match=f"expected {len(BIG) + len(DATA)} more bytes; found {len(BIG)} bytes"):
                await mine.fetch_all([*WANTED, (BlobId("9" * 64), len(DATA))], [first.source], none)
            assert len(first.requests) == asked_before


async def test_cancelled_in_the_middle_it_stays_resumable(tmp_path: Path, store: Store) -> None:
    never = anyio.Event()

    async def one_piece(request: web.Request) -> web.StreamResponse:
        if asked(request, len(BIG))[0]:
            with anyio.move_on_after(30):
                await never.wait()
        return await send_part(request, BIG)

    async with peer(tmp_path / "a", one_piece) as slow, peer(tmp_path / "b", blobs=(BIG,)) as served:
        async with fetcher(store) as mine, anyio.create_task_group() as group:

            def stop(now: TransferProgress) -> None:
                if now.done:
                    group.cancel_scope.cancel()

            group.start_soon(mine.fetch_all, WANTED, [slow.source], stop)
        never.set()
        async with fetcher(store) as mine:
            result = await mine.fetch_all(WANTED, [served.source], none)
    assert result.by_node == {served.identity.node: len(BIG) - PIECE_BYTES}
    assert store.read(BIG_BLOB) == BIG


async def test_a_blob_that_was_cut_short_is_fetched_again(tmp_path: Path, store: Store) -> None:
    store.put_bytes(BIG)
    with store.path(BIG_BLOB).open("r+b") as file:
        file.truncate(PIECE_BYTES)
    async with peer(tmp_path / "a", blobs=(BIG,)) as served, fetcher(store) as mine:
        await mine.fetch_all(WANTED, [served.source], none)
    assert store.read(BIG_BLOB) == BIG


async def test_two_tasks_fetch_a_blob_once(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a", blobs=(BIG, DATA)) as served, fetcher(store) as mine:
        async with anyio.create_task_group() as group:
            group.start_soon(mine.fetch_all, WANTED, [served.source], none)
            group.start_soon(mine.fetch_all, [*WANTED, (BLOB, len(DATA))], [served.source], none)
            group.start_soon(mine.fetch_all, [(BLOB, len(DATA)), *WANTED], [served.source], none)
        assert served.server.sent == {CLIENT: len(BIG) + len(DATA)}
    assert (store.read(BIG_BLOB), store.read(BLOB)) == (BIG, DATA)


async def test_who_waited_for_one_that_failed_fetches_itself(tmp_path: Path, store: Store) -> None:
    asked_first = anyio.Event()

    async def refusing(request: web.Request) -> web.StreamResponse:
        asked_first.set()
        raise web.HTTPNotFound

    async with (
        peer(tmp_path / "a", refusing) as useless,
        peer(tmp_path / "b", blobs=(BIG,)) as served,
        fetcher(store) as mine,
    ):

        async def fails() -> None:
            with pytest.raises(StoreError, match="404"):
                await mine.fetch_all(WANTED, [useless.source], none)

        async with anyio.create_task_group() as group:
            group.start_soon(fails)
            await asked_first.wait()
            await mine.fetch_all(WANTED, [served.source], none)
    assert store.read(BIG_BLOB) == BIG


# --- several blobs --------------------------------------------------------------------------------------------------


async def test_many_blobs_add_up(tmp_path: Path, store: Store) -> None:
    blobs = tuple(bytes([n]) * (PIECE_BYTES // 4 + n) for n in range(8))
    wanted = [(BlobId(hashlib.sha256(data).hexdigest()), len(data)) for data in blobs]
    total = sum(map(len, blobs))
    store.put_bytes(blobs[0])
    seen: list[TransferProgress] = []
    async with (
        peer(tmp_path / "a", blobs=blobs[:5]) as a,
        peer(tmp_path / "b", blobs=blobs[3:]) as b,
        fetcher(store) as mine,
    ):
        summary = await mine.fetch_all(wanted, [a.source, b.source], seen.append)
    assert [store.read(blob) for blob, _ in wanted] == list(blobs)
    assert set(summary.by_node) == {a.identity.node, b.identity.node}
    assert sum(summary.by_node.values()) == total - len(blobs[0])
    assert (seen[-1].done, seen[-1].total) == (total, total)


async def test_streams_are_bounded(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_STREAMS", 3)
    monkeypatch.setattr(transfer, "MAX_OPEN", 5)
    running, most = 0, 0
    enough = anyio.Event()
    blobs = {hashlib.sha256(bytes([n])).hexdigest(): bytes([n]) for n in range(12)}

    async def counting(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == transfer.MAX_STREAMS:
            enough.set()
        with anyio.fail_after(10):
            await enough.wait()
        running -= 1
        return await send_part(request, blobs[request.match_info["blob"]])

    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(peer(tmp_path / str(n), counting)) for n in range(3)]
        mine = await stack.enter_async_context(fetcher(store))
        await mine.fetch_all([(BlobId(blob), 1) for blob in blobs], [one.source for one in served], none)
    assert most == transfer.MAX_STREAMS


async def test_an_error_is_raised_plainly(tmp_path: Path, store: Store) -> None:
    async with peer(tmp_path / "a") as served, fetcher(store) as mine:
        with pytest.raises(StoreError, match="404"):
            await mine.fetch_all([(BLOB, len(DATA)), (BlobId("1" * 64), 5)], [served.source], none)


def test_rate_is_that_of_the_window() -> None:
    meter = RateMeter(0.0)
    for tenth in range(1, 101):
        meter.add(10, tenth / 10)
    assert meter.rate(10.0) == pytest.approx(100, rel=0.1)
    for tenth in range(101, 201):
        meter.add(50, tenth / 10)
    assert meter.rate(20.0) == pytest.approx(500, rel=0.1)
    assert RateMeter(1.0).rate(1.0) == 0.0
