"""Fetching blobs from peers: layers, embedding, head and graph come straight from node to node (see `blob_server`).

All peers that have a blob give pieces of it at the same time. A transfer that was cut goes on with the pieces that are
here. `pieces` decides who is asked for what, `review` who sent wrong bytes; this is the shell around them.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from swarm.model.disk import require_free
from swarm.model.partial import PartialBlob, piece_span
from swarm.model.store import Store
from swarm.protocol.errors import StoreError, SwarmError
from swarm.protocol.ids import BlobId, NodeId
from swarm.ring.blob_client import BlobClient, BlobSource
from swarm.ring.blob_server import STALL_TIMEOUT_S
from swarm.ring.pieces import AttemptError, Flight, Schedule
from swarm.ring.review import Review

MAX_STREAMS = 8
"""Pieces on their way to a node at once, and so many in memory."""

STREAMS_PER_SOURCE = 2
"""One request is answered while the next one travels."""

MAX_OPEN = 128
"""Blobs in the making at once, each an open file. A stage seldom has more."""

MAX_DAMAGES = 2
"""Times that the disk may lose what was written of one blob before that is an error."""

IDLE_S = 0.25
"""A stream without work looks again: a peer may have become slow, or has rested."""

MAX_COMPLAINTS = 8

PROGRESS_INTERVAL_S = 0.2
RATE_WINDOW_S = 3.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FetchSummary:
    by_node: Mapping[NodeId, int]
    """Bytes received, by the node that sent them; empty where all was here already."""
    complaints: tuple[str, ...] = ()
    """What went wrong on the way, one line each, peers named."""


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """All blobs of a fetch together; what was here already counts as done."""

    done: int
    total: int
    rate: float
    """Bytes per second over the last seconds."""


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


OnProgress: TypeAlias = Callable[[TransferProgress], None]


class BlobFetcher:
    """Fetches blobs into `store`. Use it as ``async with BlobFetcher(…) as fetcher``.

    A peer that once sent wrong bytes is not asked again: `distrusted` says who, and why; `notice` is told.
    """

    def __init__(
        self,
        store: Store,
        node: NodeId,
        secret: bytes,
        notice: Callable[[str], None] = lambda _: None,
        *,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._store = store
        self._notice = notice
        self._client = BlobClient(node, secret, stall_timeout_s)
        self._fetching: dict[BlobId, anyio.Event] = {}
        self.distrusted: dict[NodeId, str] = {}

    async def __aenter__(self) -> BlobFetcher:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def fetch_all(
        self, wanted: Sequence[tuple[BlobId, int]], sources: Sequence[BlobSource], on_progress: OnProgress
    ) -> FetchSummary:
        """Bring ``(blob, size)`` pairs into the store, verified, from all sources at once.

        What another task fetches already is waited for, not fetched twice. May be cancelled: pieces that are here stay
        for resuming. Raises `StoreError` where the disk refuses or no source can give a blob.
        """
        sizes = dict(wanted)
        total = _Total(sum(sizes.values()), on_progress)
        received: Counter[NodeId] = Counter()
        complaints: list[str] = []
        while sizes:
            ours = {blob: size for blob, size in sizes.items() if blob not in self._fetching}
            others = [event for blob, event in self._fetching.items() if blob in sizes]
            ended = anyio.Event()
            self._fetching |= dict.fromkeys(ours, ended)
            try:
                fetch = _Fetch(self._store, self._client, self._distrust, self.distrusted, sources, total)
                await fetch.run(ours)
                received.update(fetch.received)
                complaints += fetch.complaints
            finally:
                for blob in ours:
                    del self._fetching[blob]
                ended.set()
            # Whoever was here first waits for nobody who came later, so that two never wait for each other.
            for event in others:
                await event.wait()
            sizes = {blob: size for blob, size in sizes.items() if blob not in ours}
        total.report()
        return FetchSummary(dict(received), tuple(complaints))

    def _distrust(self, source: BlobSource, reason: str) -> None:
        self.distrusted[source.node] = reason
        self._notice(f"{source.address} ({source.node[:8]}) {reason}; it is not asked for layers again")


class _Fetch:
    """One fetch: its schedule, its blobs in the making, and the streams that fill them."""

    def __init__(
        self,
        store: Store,
        client: BlobClient,
        distrust: Callable[[BlobSource, str], None],
        distrusted: Mapping[NodeId, str],
        sources: Sequence[BlobSource],
        total: _Total,
    ) -> None:
        self._store = store
        self._client = client
        self._distrust = distrust
        self._distrusted = distrusted
        self._sources = {source.node: source for source in sources if source.node not in distrusted}
        self._total = total
        self._schedule = Schedule(self._sources)
        self._partials: dict[BlobId, PartialBlob] = {}
        self._reviews: dict[BlobId, Review] = {}
        self._damages: Counter[BlobId] = Counter()
        self._scopes: dict[Flight, anyio.CancelScope] = {}
        self._left: set[BlobId] = set()
        self._files = anyio.Semaphore(MAX_OPEN)
        self._slots = anyio.CapacityLimiter(MAX_STREAMS)
        self._moved = anyio.Event()
        """Set, and made anew, when a stream that had nothing to do may have something."""
        self._error: SwarmError | None = None
        self.received: Counter[NodeId] = Counter()
        self.complaints: deque[str] = deque(maxlen=MAX_COMPLAINTS)

    async def run(self, sizes: Mapping[BlobId, int]) -> None:
        """Raises `StoreError`."""
        self._left = set(sizes)
        if not sizes:
            return
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._guard, group, self._open_all, sizes)
                for source in [*self._sources.values()] * STREAMS_PER_SOURCE:
                    group.start_soon(self._guard, group, self._stream, source)
        finally:
            with anyio.CancelScope(shield=True):
                for partial in self._partials.values():
                    await anyio.to_thread.run_sync(partial.close)
        if self._error is not None:
            raise self._error

    async def _guard(self, group: TaskGroup, task: Callable[[_T], Awaitable[None]], argument: _T) -> None:
        """The first error ends everything, and so does the last blob."""
        try:
            await task(argument)
        except SwarmError as error:
            self._error = self._error or error
        if self._error is not None or not self._left:
            group.cancel_scope.cancel()

    # --- blobs ------------------------------------------------------------------------------------------------------

    async def _open_all(self, sizes: Mapping[BlobId, int]) -> None:
        await anyio.to_thread.run_sync(self._require_room, sizes)
        for blob, size in sizes.items():
            await self._files.acquire()
            if await anyio.to_thread.run_sync(self._store.is_whole, blob, size):
                self._total.here(size)
                self._done(blob)
                continue
            partial = await anyio.to_thread.run_sync(self._store.partial(blob, size).__enter__)
            self._partials[blob], self._reviews[blob] = partial, Review()
            missing = partial.missing
            self._total.here(size - _bytes_of(size, missing))
            self._schedule.add(blob, size, missing)
            if missing:
                self._changed()
            else:
                await self._complete(blob)

    def _require_room(self, sizes: Mapping[BlobId, int]) -> None:
        """For all of them, before a byte is fetched. One that was begun has its place on most disks."""
        new = [blob for blob in sizes if not self._store.has(blob) and not self._store.begun_bytes(blob)]
        require_free(self._store.root, sum(sizes[blob] for blob in new))

    async def _complete(self, blob: BlobId) -> None:
        """All pieces are here: into the store with it, or find out which are wrong."""
        partial, review = self._partials[blob], self._reviews[blob]
        if await anyio.to_thread.run_sync(partial.finish):
            for node in review.right(partial.digests):
                self._convict(node, blob)
            self._schedule.remove(blob)
            self._done(blob)
        elif lost := await anyio.to_thread.run_sync(partial.recheck):
            self._damages[blob] += 1
            if self._damages[blob] > MAX_DAMAGES:
                found = f"{len(lost)} pieces of blob {blob[:12]} changed"
                raise StoreError("the disk does not keep what is written", found=found, action="Check the disk.")
            self._again(blob, lost)
        else:
            await self._review(blob)
        self._changed()

    async def _review(self, blob: BlobId) -> None:
        """The bytes that came are wrong: compare with one peer after the other. Raises `StoreError` after the last."""
        partial, review = self._partials[blob], self._reviews[blob]
        while True:
            convicted = review.wrong()
            if convicted is not None:
                self._convict(convicted, blob)
            node = review.next(node for node in self._sources if self._schedule.able(node, blob))
            if node is None:
                raise _nobody(blob, partial.size, ["its bytes are not those of the blob", *self.complaints])
            began = time.monotonic()
            try:
                claimed = await self._client.pieces(self._sources[node], blob, partial.size)
            except AttemptError as failure:
                self._complain(node, failure)
                await anyio.sleep(self._schedule.blame(node, blob, failure, began, time.monotonic()))
                continue
            disputed = review.begin(node, claimed, partial.digests)
            if disputed:
                await anyio.to_thread.run_sync(partial.forget, disputed)
                self._again(blob, disputed, node)
                return

    def _again(self, blob: BlobId, indices: Sequence[int], only: NodeId | None = None) -> None:
        self._total.here(-_bytes_of(self._partials[blob].size, indices))
        self._schedule.again(blob, indices, only)

    def _done(self, blob: BlobId) -> None:
        self._left.discard(blob)
        self._files.release()

    # --- streams ----------------------------------------------------------------------------------------------------

    async def _stream(self, source: BlobSource) -> None:
        """Ask one peer for one piece after the other, until it is dropped or everything is here."""
        while self._left and self._schedule.asks(source.node):
            async with self._slots:
                flight = self._schedule.take(source.node, time.monotonic())
                if flight is not None:
                    await self._fly(flight, source)
                    continue
            with anyio.move_on_after(IDLE_S):
                await self._moved.wait()

    async def _fly(self, flight: Flight, source: BlobSource) -> None:
        def count(received: int) -> None:
            flight.received = received

        data, size = None, self._partials[flight.blob].size
        try:
            with anyio.CancelScope() as scope:
                self._scopes[flight] = scope
                data = await self._client.range(source, flight.blob, size, flight.start, flight.stop, count)
        except AttemptError as failure:
            if not flight.lost:
                self._complain(source.node, failure)
                self._schedule.failed(flight, failure, time.monotonic())
                self._changed()
        finally:
            del self._scopes[flight]
            self.received[source.node] += flight.received
        if data is not None and not flight.lost:
            await self._land(flight, data)

    async def _land(self, flight: Flight, data: bytearray) -> None:
        node, blob = flight.node, flight.blob
        for other in self._schedule.claim(flight):
            self._scopes[other].cancel()
        review = self._reviews[blob]
        expected = review.expected(node, flight.index)
        contradicts = expected is not None and expected != await anyio.to_thread.run_sync(_digest, data)
        if contradicts or node in self._distrusted:
            self._convict(node, blob)
            self._schedule.ended(flight)
            self._changed()
            return
        await anyio.to_thread.run_sync(self._partials[blob].put, flight.index, data)
        review.landed(node, flight.index)
        self._total.add(len(data))
        if self._schedule.landed(flight, time.monotonic()):
            await self._complete(blob)

    def _changed(self) -> None:
        """There may be something to do, or nothing that could be done. Raises `StoreError`."""
        self._moved.set()
        self._moved = anyio.Event()
        blob = self._schedule.stuck()
        if blob is not None:
            raise _nobody(blob, self._partials[blob].size, self.complaints)

    def _convict(self, node: NodeId, blob: BlobId) -> None:
        if node not in self._distrusted:
            self._distrust(self._sources[node], f"sent wrong bytes for blob {blob[:12]}")
            self._complain(node, self._distrusted[node])
        self._schedule.drop(node)

    def _complain(self, node: NodeId, reason: object) -> None:
        self.complaints.append(f"{self._sources[node].address} ({node[:8]}): {reason}")


def _digest(data: bytearray) -> bytes:
    return hashlib.sha256(data).digest()


def _bytes_of(size: int, indices: Sequence[int]) -> int:
    """Of these pieces of a blob of `size` bytes."""
    return sum(stop - start for start, stop in (piece_span(size, index) for index in indices))


def _nobody(blob: BlobId, size: int, complaints: Iterable[str]) -> StoreError:
    return StoreError(
        "a piece of the model cannot be fetched",
        expected=f"blob {blob[:12]} ({size} bytes) from a peer",
        found="; ".join(complaints) or "no peer to ask",
        action="It is tried again when the ring is planned anew; what arrived is kept.",
    )


class _Total:
    """Progress of several blobs as one, reported at most every `PROGRESS_INTERVAL_S`."""

    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._total = total
        self._done = 0
        self._meter = RateMeter(time.monotonic())
        self._reported = float("-inf")

    def here(self, count: int) -> None:
        """Bytes that did not come now; negative for those that have to come again."""
        self._done += count

    def add(self, count: int) -> None:
        """Bytes that came."""
        now = time.monotonic()
        self._done += count
        self._meter.add(count, now)
        if now - self._reported >= PROGRESS_INTERVAL_S:
            self.report()

    def report(self) -> None:
        self._reported = time.monotonic()
        self._on_progress(TransferProgress(self._done, self._total, self._meter.rate(self._reported)))
