"""Asks other nodes for pieces of blobs: the client's side of `blob_server`.

The certificate must belong to the node that is wanted before anything is said.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

import aiohttp
import anyio

from swarm.model.partial import DIGEST_BYTES, piece_count
from swarm.protocol.ids import BlobId, NodeId
from swarm.ring.blob_server import CHUNK_BYTES, NODE_HEADER, SCHEME, STALL_TIMEOUT_S
from swarm.ring.identity import node_of
from swarm.ring.pairing import http_token
from swarm.ring.pieces import AttemptError, BusyError, DeniedError, RefusedError

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class BlobSource:
    """A peer that may have the blob."""

    node: NodeId
    address: str
    """``host:port`` of its links."""


class BlobClient:
    """Keeps connections. Use it as ``async with BlobClient(…) as client``."""

    def __init__(self, node: NodeId, secret: bytes, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._node = node
        self._secret = secret
        self._stall_timeout_s = stall_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._pins: dict[NodeId, _NodePin] = {}

    async def __aenter__(self) -> BlobClient:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._stall_timeout_s)
        self._session = aiohttp.ClientSession(
            timeout=timeout, auto_decompress=False, read_bufsize=CHUNK_BYTES, cookie_jar=aiohttp.DummyCookieJar()
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def range(
        self, source: BlobSource, blob: BlobId, size: int, start: int, stop: int, on_bytes: Callable[[int], None]
    ) -> bytearray:
        """The bytes ``[start, stop)`` of a blob of `size` bytes; `on_bytes` is told how many are here.

        Raises `AttemptError`.
        """
        part = "" if stop - start == size else f"bytes {start}-{stop - 1}/{size}"
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        async with self._get(source, f"/blob/{blob}", headers) as response:
            found = response.headers.get("Content-Range", "") if response.status == 206 else ""
            if found != part or response.content_length != stop - start:
                raise RefusedError(
                    "it has the blob in another size",
                    expected=part or f"{size} bytes",
                    found=found or f"{response.content_length} bytes",
                )
            return await self._read(response, stop - start, on_bytes)

    async def pieces(self, source: BlobSource, blob: BlobId, size: int) -> list[bytes]:
        """SHA-256 of each piece of a blob, as the peer has it. Raises `AttemptError`."""
        length = piece_count(size) * DIGEST_BYTES
        async with self._get(source, f"/blob/{blob}/pieces", {}) as response:
            if response.content_length != length:
                found = f"{response.content_length} bytes"
                raise RefusedError("its list of pieces is another", expected=f"{length} bytes", found=found)
            data = bytes(await self._read(response, length, lambda _: None))
        return [data[start : start + DIGEST_BYTES] for start in range(0, length, DIGEST_BYTES)]

    async def _read(self, response: aiohttp.ClientResponse, length: int, on_bytes: Callable[[int], None]) -> bytearray:
        data = bytearray()
        while len(data) < length:
            until = min(length, len(data) + CHUNK_BYTES)
            with anyio.fail_after(self._stall_timeout_s):
                while len(data) < until:
                    piece = await response.content.read(until - len(data))
                    if not piece:
                        raise AttemptError("the transfer was cut", expected=f"{length} bytes", found=str(len(data)))
                    data += piece
                    on_bytes(len(data))
        return data

    @asynccontextmanager
    async def _get(
        self, source: BlobSource, path: str, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request, every failure of it as an `AttemptError`."""
        if self._session is None:
            raise ValueError("the client is used outside its async with")
        headers |= {
            NODE_HEADER: self._node,
            "Authorization": f"{SCHEME} " + http_token(self._secret, source.node, self._node),
            "Accept-Encoding": "identity",
        }
        pin = self._pins.setdefault(source.node, _NodePin(source.node))
        try:
            url = f"https://{source.address}{path}"
            async with self._session.get(url, headers=headers, ssl=pin, allow_redirects=False) as response:
                await _check_status(response)
                yield response
        except aiohttp.ServerFingerprintMismatch:
            raise DeniedError("another node answers at this address") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise AttemptError(f"it cannot be reached: {error}") from None
        except (TimeoutError, aiohttp.ServerTimeoutError):  # in Python 3.10 the second is not of the first
            raise AttemptError(f"sent next to nothing for {self._stall_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AttemptError(f"the transfer was cut: {error or type(error).__name__}") from None


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status in (200, 206):
        return
    if response.status == 503:
        raise BusyError("it is busy with other nodes")
    reason = (await response.content.read(200)).decode(errors="replace").splitlines()
    kind = DeniedError if response.status == 403 else RefusedError if response.status < 500 else AttemptError
    raise kind(f"it refuses ({response.status})", found=reason[0] if reason else response.reason or "")


class _NodePin(aiohttp.Fingerprint):
    """Accepts only the certificate that a node id is the hash of. aiohttp asks it before a request is sent."""

    def __init__(self, node: NodeId) -> None:
        super().__init__(bytes(32))
        self._node = node

    def check(self, transport: asyncio.Transport) -> None:
        tls = transport.get_extra_info("ssl_object")
        certificate = tls.getpeercert(binary_form=True) if tls is not None else b""
        if not certificate or node_of(certificate) != self._node:
            host, port, *_ = transport.get_extra_info("peername")
            found = hashlib.sha256(certificate).digest()
            raise aiohttp.ServerFingerprintMismatch(bytes.fromhex(self._node), found, host, port)
