"""Hands blobs of the store to other nodes: HTTPS with ranges, on the port of the links.

A node shows who it is and that it knows the swarm's secret (`pairing.http_token`) with every request.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO

import anyio
import anyio.to_thread
from aiohttp import web

from swarm.model.partial import DIGEST_BYTES, PIECE_BYTES, piece_count
from swarm.model.store import Store
from swarm.protocol.ids import BlobId, NodeId, is_blob_id, is_node_id
from swarm.ring.pairing import check_http_token

CHUNK_BYTES = 512 * 1024
"""Read from disk, sent, received, hashed and written at once."""

MAX_SENDS = 8
"""Blobs that a node sends at once: 4 MiB of memory, and enough to fill a gigabit line."""

QUEUE_TIMEOUT_S = 10.0
"""A request waits this long for one of `MAX_SENDS` before it is told that we are busy."""

STALL_TIMEOUT_S = 15.0
"""One chunk takes at most this long, either way: silence, or less than 35 kB/s, ends the transfer."""

NODE_HEADER = "X-Swarm-Node"
SCHEME = "Swarm"
"""Of the header ``Authorization: Swarm TOKEN``."""


class BlobServer:
    """Answers ``GET`` and ``HEAD /blob/<id>`` and ``GET /blob/<id>/pieces`` for nodes that know the swarm's secret."""

    def __init__(self, store: Store, node: NodeId, secret: bytes, *, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._store = store
        self._node = node
        self._secret = secret
        self._stall_timeout_s = stall_timeout_s
        self._slots = anyio.Semaphore(MAX_SENDS)
        self.sent: Counter[NodeId] = Counter()
        """Bytes handed to the socket, by receiver."""

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/blob/{blob}", self._serve), web.get("/blob/{blob}/pieces", self._serve_pieces)]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        client = self._authorised(request)
        file, size = await self._open_named(request)
        with file:
            return await self._answer(request, client, file, size)

    async def _serve_pieces(self, request: web.Request) -> web.StreamResponse:
        """SHA-256 of every piece, one after the other, as they lie on the disk now.

        Who asks for them suspects somebody: where it is our disk that is wrong, the blob goes.
        """
        self._authorised(request)
        file, size = await self._open_named(request)
        blob, whole = BlobId(request.match_info["blob"]), hashlib.sha256()
        with file:
            response = web.StreamResponse()
            response.content_type = "application/octet-stream"
            response.content_length = piece_count(size) * DIGEST_BYTES
            async with self._slot():
                await response.prepare(request)
                for left in reversed(range(piece_count(size))):
                    digest = await anyio.to_thread.run_sync(_next_digest, file, whole)
                    if not left and whole.hexdigest() != blob:
                        await anyio.to_thread.run_sync(self._store.drop, blob)
                    if not await self._write(response, digest):
                        _cut(request)
                        break
            return response

    async def _open_named(self, request: web.Request) -> tuple[BinaryIO, int]:
        name = request.match_info["blob"]
        if not is_blob_id(name):
            raise web.HTTPNotFound(text="not the name of a blob")
        opened = await anyio.to_thread.run_sync(self._open, BlobId(name))
        if opened is None:
            raise web.HTTPNotFound(text="this node does not have the blob")
        return opened

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        with anyio.move_on_after(QUEUE_TIMEOUT_S) as waiting:
            await self._slots.acquire()
        if waiting.cancelled_caught:
            raise web.HTTPServiceUnavailable(text="busy with other nodes", headers={"Retry-After": "1"})
        try:
            yield
        finally:
            self._slots.release()

    def _authorised(self, request: web.Request) -> NodeId:
        client = request.headers.get(NODE_HEADER, "")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if not is_node_id(client) or scheme != SCHEME:
            raise web.HTTPForbidden(text=f"needs the headers {NODE_HEADER} and Authorization: {SCHEME} TOKEN")
        if not check_http_token(self._secret, self._node, NodeId(client), token):
            raise web.HTTPForbidden(text="the token is wrong: this swarm has another secret")
        return NodeId(client)

    def _open(self, blob: BlobId) -> tuple[BinaryIO, int] | None:
        path = self._store.path_of(blob)
        try:
            return path.open("rb"), path.stat().st_size
        except OSError:  # not here, or removed meanwhile
            return None

    async def _answer(self, request: web.Request, client: NodeId, file: BinaryIO, size: int) -> web.StreamResponse:
        start, stop = _requested(request, size)
        response = web.StreamResponse(headers={"Accept-Ranges": "bytes"})
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        if stop - start < size:
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if request.method == "HEAD":
            await response.prepare(request)
            return response
        async with self._slot():
            try:
                await response.prepare(request)
                file.seek(start)
                while start < stop and (count := await self._send_chunk(response, file, stop - start)):
                    start += count
                    self.sent[client] += count
            except ConnectionError:  # the receiver went; it resumes elsewhere or later
                start = stop
        if start < stop:
            _cut(request)
        return response

    async def _send_chunk(self, response: web.StreamResponse, file: BinaryIO, most: int) -> int:
        """How many bytes went; 0 where the receiver takes none, or the file has no more."""
        data = await anyio.to_thread.run_sync(file.read, min(CHUNK_BYTES, most))
        return len(data) if await self._write(response, data) else 0

    async def _write(self, response: web.StreamResponse, data: bytes) -> bool:
        """False where the receiver takes nothing for too long."""
        with anyio.move_on_after(self._stall_timeout_s) as waiting:
            await response.write(data)
        return not waiting.cancelled_caught


def _cut(request: web.Request) -> None:
    """The one way to say, after the header, that no more comes."""
    if request.transport is not None:
        request.transport.abort()


def _requested(request: web.Request, size: int) -> tuple[int, int]:
    """The half-open range of bytes that a request asks for. Raises 416 where there is none."""
    try:
        wanted = request.http_range
    except ValueError:
        wanted = slice(size, size)
    start, stop, _ = wanted.indices(size)
    if start >= stop and (size or wanted.start is not None):
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    return start, stop


def _next_digest(file: BinaryIO, whole: hashlib._Hash) -> bytes:
    data = file.read(PIECE_BYTES)
    whole.update(data)
    return hashlib.sha256(data).digest()
