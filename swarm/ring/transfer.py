"""Fetching blobs from peers: layers, embedding, head and graph come straight from node to node (see `blob_server`).

A transfer that was cut goes on where it stopped. The certificate must belong to the node that is wanted before anything
is said, and every byte counts into the blob's hash; where a peer falls silent, refuses, or sends something else, the
next one is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

import aiohttp
import anyio
import anyio.to_thread

from swarm.model.store import PartialBlob, Store
from swarm.protocol.errors import StoreError, SwarmError
from swarm.protocol.ids import BlobId, NodeId
from swarm.ring.blob_server import CHUNK_BYTES, NODE_HEADER, SCHEME, STALL_TIMEOUT_S
from swarm.ring.identity import node_of
from swarm.ring.pairing import http_token

MAX_FETCHES = 4
"""Blobs that a node fetches at once."""

CONNECT_TIMEOUT_S = 5.0

MAX_FAILURES = 4
"""In a row and without a byte received, after which a peer is given up for a blob."""

MAX_BUSY = 60
"""Answers of "busy" after which a peer is given up: ten minutes of waiting in its queue."""

PROGRESS_INTERVAL_S = 0.2
RATE_WINDOW_S = 3.0


# --- decisions of the fetching side ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlobSource:
    """A peer that may have the blob."""

    node: NodeId
    address: str
    """``host:port`` of its links."""


@dataclass(frozen=True, slots=True)
class BlobFetched:
    """One blob that is now in the store."""

    blob: BlobId
    by_node: Mapping[NodeId, int]
    """Bytes received for it, by the node that sent them; empty where it was here already."""
    complaints: tuple[str, ...] = ()
    """What went wrong on the way, one line each, peers named."""

    @property
    def bytes(self) -> int:
        return sum(self.by_node.values())


@dataclass(frozen=True, slots=True)
class FetchSummary:
    blobs: tuple[BlobFetched, ...]

    @property
    def by_node(self) -> dict[NodeId, int]:
        total: Counter[NodeId] = Counter()
        for blob in self.blobs:
            total.update(blob.by_node)
        return dict(total)


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """All blobs of a `fetch_all` together; what was here already counts as done."""

    done: int
    total: int
    rate: float
    """Bytes per second over the last seconds."""


class AttemptError(SwarmError):
    """Why one attempt with one source ended. Never leaves this module."""

    busy = False
    final = False
    """True where the same source cannot do better."""


class BusyError(AttemptError):
    busy = True


class RefusedError(AttemptError):
    final = True


@dataclass(slots=True)
class _Candidate:
    source: BlobSource
    failures: int = 0
    busy: int = 0


@dataclass(slots=True)
class SourceChoice:
    """Which source to ask next for one blob: pure, one per fetch."""

    candidates: list[_Candidate]
    complaints: list[str] = field(default_factory=list)

    @classmethod
    def among(cls, sources: Sequence[BlobSource]) -> SourceChoice:
        return cls([_Candidate(source) for source in dict.fromkeys(sources)])

    def leave_out(self, nodes: Container[NodeId]) -> None:
        self.candidates = [one for one in self.candidates if one.source.node not in nodes]

    def next(self, active: Mapping[NodeId, int]) -> BlobSource | None:
        """The one with the fewest failures, then with the fewest transfers; None where all are used up."""
        best = min(self.candidates, key=lambda c: (c.failures + c.busy, active.get(c.source.node, 0)), default=None)
        return None if best is None else best.source

    def failed(self, source: BlobSource, failure: AttemptError, *, progressed: bool) -> float:
        """Note a failure; returns how many seconds to wait before the next attempt."""
        self.complaints.append(f"{source.address} ({source.node[:8]}): {failure}")
        del self.complaints[:-8]
        candidate = next(one for one in self.candidates if one.source == source)
        if progressed:
            candidate.failures = candidate.busy = 0
        candidate.busy += failure.busy
        candidate.failures += not failure.busy
        if failure.final or candidate.failures >= MAX_FAILURES or candidate.busy >= MAX_BUSY:
            self.candidates.remove(candidate)
        if any(one.failures + one.busy == 0 for one in self.candidates):
            return 0.0
        return float(min((2 ** (one.failures - 2) for one in self.candidates), default=0.0))


class RateMeter:
    """Bytes per second over a sliding window; pure, the clock is passed in."""

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])
        self._total = 0

    def add(self, count: int, now: float) -> None:
        self._total += count
        if now - self._samples[-1][0] >= RATE_WINDOW_S / 30:  # keeps the window at about 30 samples
            self._samples.append((now, self._total))
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_WINDOW_S:
            self._samples.popleft()

    def rate(self, now: float) -> float:
        then, total = self._samples[0]
        return (self._total - total) / (now - then) if now > then else 0.0


# --- the fetching side ----------------------------------------------------------------------------------------------


OnHave: TypeAlias = Callable[[int], None]
OnProgress: TypeAlias = Callable[[TransferProgress], None]


class BlobFetcher:
    """Fetches blobs into `store`. Use it as ``async with BlobFetcher(…) as fetcher``.

    A peer that once sent wrong bytes is not asked again: `distrusted` says who, and why.
    """

    def __init__(self, store: Store, node: NodeId, secret: bytes, *, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._store = store
        self._node = node
        self._secret = secret
        self._stall_timeout_s = stall_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._pins: dict[NodeId, _NodePin] = {}
        self._active: Counter[NodeId] = Counter()
        self.distrusted: dict[NodeId, str] = {}

    async def __aenter__(self) -> BlobFetcher:
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

    async def fetch(
        self, blob: BlobId, size: int, sources: Sequence[BlobSource], on_have: OnHave = lambda _have: None
    ) -> BlobFetched:
        """Bring one blob into the store, verified, from whichever source gives it.

        `on_have` is told how many of its `size` bytes are here. May be cancelled: what is here stays for resuming.
        Raises `StoreError` where the disk refuses or no source can give it.
        """
        if await anyio.to_thread.run_sync(self._store.has, blob):
            on_have(size)
            return BlobFetched(blob, {})
        choice = SourceChoice.among(sources)
        attempt = _Attempts(blob, size, on_have)
        while True:
            choice.leave_out(self.distrusted)
            source = choice.next(self._active)
            if source is None:
                raise _nobody(blob, size, choice.complaints)
            before = sum(attempt.by_node.values())
            self._active[source.node] += 1
            try:
                await self._try(attempt, source)
            except AttemptError as failure:
                progressed = sum(attempt.by_node.values()) > before
                wait_s = choice.failed(source, failure, progressed=progressed)
            else:
                return BlobFetched(blob, dict(attempt.by_node), tuple(choice.complaints))
            finally:
                self._active[source.node] -= 1
            await anyio.sleep(wait_s)

    async def fetch_all(
        self, wanted: Sequence[tuple[BlobId, int]], sources: Sequence[BlobSource], on_progress: OnProgress
    ) -> FetchSummary:
        """Fetch ``(blob, size)`` pairs, `MAX_FETCHES` at once, and report on all of them together.

        Raises `StoreError` as `fetch` does; the others are then given up, resumable.
        """
        sizes = dict(wanted)
        total = _Total(sizes, on_progress)
        limiter = anyio.CapacityLimiter(MAX_FETCHES)
        fetched: dict[BlobId, BlobFetched] = {}
        errors: list[SwarmError] = []

        async def one(blob: BlobId, size: int) -> None:
            async with limiter:
                try:
                    fetched[blob] = await self.fetch(blob, size, sources, lambda have: total.have(blob, have))
                except SwarmError as error:
                    errors.append(error)
                    group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for blob, size in sizes.items():
                group.start_soon(one, blob, size)
        if errors:
            raise errors[0]
        total.report()
        return FetchSummary(tuple(fetched[blob] for blob in sizes))

    async def _try(self, attempt: _Attempts, source: BlobSource) -> None:
        """One attempt with one source, ending in the whole blob or a `AttemptError`."""
        partial = await anyio.to_thread.run_sync(self._open, attempt, source.node)
        try:
            attempt.begin(partial.have)
            if partial.have < partial.size or partial.size == 0:
                await self._download(attempt, partial, source)
            await self._finish(attempt, partial)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(partial.close)

    def _open(self, attempt: _Attempts, node: NodeId) -> PartialBlob:
        partial = self._store.partial(attempt.blob, attempt.size).__enter__()
        if partial.have and not attempt.may_go_on(partial.have, node):
            partial.discard()
            partial = self._store.partial(attempt.blob, attempt.size).__enter__()
        return partial

    async def _finish(self, attempt: _Attempts, partial: PartialBlob) -> None:
        try:
            await anyio.to_thread.run_sync(partial.finish)
        except StoreError as error:
            if error.expected != f"SHA-256 {attempt.blob}":
                raise  # the disk's fault, not the bytes'
            for node in attempt.wrong():
                self.distrusted[node] = f"sent wrong bytes for blob {attempt.blob[:12]}"
            raise AttemptError("the bytes are not those of the blob; starting over") from None

    async def _download(self, attempt: _Attempts, partial: PartialBlob, source: BlobSource) -> None:
        if self._session is None:
            raise ValueError("the fetcher is used outside its async with")
        headers = {
            NODE_HEADER: self._node,
            "Authorization": f"{SCHEME} " + http_token(self._secret, source.node, self._node),
            "Accept-Encoding": "identity",
        }
        if partial.have:
            headers["Range"] = f"bytes={partial.have}-"
        pin = self._pins.setdefault(source.node, _NodePin(source.node))
        url = f"https://{source.address}/blob/{attempt.blob}"
        try:
            async with self._session.get(url, headers=headers, ssl=pin, allow_redirects=False) as response:
                await _check(response, partial)
                while partial.have < partial.size:
                    await self._take_chunk(attempt, partial, source, response.content)
        except aiohttp.ServerFingerprintMismatch:
            raise RefusedError("another node answers at this address") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise AttemptError(f"it cannot be reached: {error}") from None
        except (TimeoutError, aiohttp.ServerTimeoutError):  # in Python 3.10 the second is not of the first
            raise AttemptError(f"sent next to nothing for {self._stall_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AttemptError(f"the transfer was cut: {error or type(error).__name__}") from None

    async def _take_chunk(
        self, attempt: _Attempts, partial: PartialBlob, source: BlobSource, content: aiohttp.StreamReader
    ) -> None:
        wanted = min(CHUNK_BYTES, partial.size - partial.have)
        data = bytearray()
        try:
            with anyio.fail_after(self._stall_timeout_s):
                while len(data) < wanted:
                    piece = await content.read(wanted - len(data))
                    if not piece:
                        raise AttemptError(
                            "the transfer was cut", expected=f"{partial.size} bytes", found=str(partial.have)
                        )
                    data += piece
        finally:
            # What came before a cut counts too. Shielded: bytes on disk and bytes counted stay the same number.
            if data:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(partial.append, data)
                attempt.received(source.node, len(data), partial.have)


async def _check(response: aiohttp.ClientResponse, partial: PartialBlob) -> None:
    """That the peer is about to send exactly what is missing."""
    if response.status == 503:
        raise BusyError("it is busy with other nodes")
    if response.status not in (200, 206):
        reason = (await response.content.read(200)).decode(errors="replace").splitlines()
        kind = RefusedError if response.status < 500 else AttemptError
        raise kind(f"it refuses ({response.status})", found=reason[0] if reason else response.reason or "")
    missing = partial.size - partial.have
    expected = f"bytes {partial.have}-{partial.size - 1}/{partial.size}" if partial.have else ""
    found = response.headers.get("Content-Range", "") if response.status == 206 else ""
    if found != expected or response.content_length != missing:
        raise RefusedError(
            "it has the blob in another size",
            expected=f"{missing} more bytes",
            found=f"{response.content_length}, range {found or 'none'}",
        )


def _nobody(blob: BlobId, size: int, complaints: Sequence[str]) -> StoreError:
    return StoreError(
        "a piece of the model cannot be fetched",
        expected=f"blob {blob[:12]} ({size} bytes) from a peer",
        found="; ".join(complaints) or "no peer to ask",
        action="It is tried again when the ring is planned anew; what arrived is kept.",
    )


class _Attempts:
    """What is known about the bytes of one blob over all attempts: who sent them, and whom to blame."""

    def __init__(self, blob: BlobId, size: int, on_have: OnHave) -> None:
        self.blob = blob
        self.size = size
        self.by_node: Counter[NodeId] = Counter()
        self._on_have = on_have
        self._have = 0
        self._senders: set[NodeId] = set()
        self._strangers = False
        """Bytes that did not come through here: of an earlier run, or of another task with the same blob."""
        self._alone = False
        """From now on the whole blob comes from one sender, so that wrong bytes have one possible origin."""

    def may_go_on(self, have: int, node: NodeId) -> bool:
        """Whether `node` may add to the `have` bytes that are here."""
        return not self._alone or (have == self._have and self._senders <= {node})

    def begin(self, have: int) -> None:
        if have == 0:
            self._senders.clear()
        self._strangers = have > 0 and (self._strangers or have != self._have)
        self._have = have
        self._on_have(have)

    def received(self, node: NodeId, count: int, have: int) -> None:
        self.by_node[node] += count
        self._senders.add(node)
        self._have = have
        self._on_have(have)

    def wrong(self) -> frozenset[NodeId]:
        """The whole is wrong and was removed: who is to blame. Nobody where it may have been one of several."""
        certain = len(self._senders) == 1 and not self._strangers
        self._alone = True
        return frozenset(self._senders) if certain else frozenset()


class _Total:
    """Progress of several blobs as one, reported at most every `PROGRESS_INTERVAL_S`."""

    def __init__(self, sizes: Mapping[BlobId, int], on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._total = sum(sizes.values())
        self._have: dict[BlobId, int] = {}
        self._meter = RateMeter(time.monotonic())
        self._reported = float("-inf")

    def have(self, blob: BlobId, have: int) -> None:
        now = time.monotonic()
        if blob in self._have:  # the first figure is what was here before
            self._meter.add(max(0, have - self._have[blob]), now)
        self._have[blob] = have
        if now - self._reported >= PROGRESS_INTERVAL_S:
            self.report()

    def report(self) -> None:
        self._reported = time.monotonic()
        done = sum(self._have.values())
        self._on_progress(TransferProgress(done, self._total, self._meter.rate(self._reported)))


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
