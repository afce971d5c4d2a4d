"""Who fetches which piece from whom: the decisions of a fetch over several blobs and peers. Pure.

Every stream to a peer takes the first piece that nobody fetches yet. One that finds none takes over what a slower peer
is at: the first of the two to end counts. A peer that refuses a blob is not asked for it again; one that fails rests
for a while, longer each time, and is given up in the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarm.model.partial import piece_span
from swarm.protocol.errors import SwarmError
from swarm.protocol.ids import BlobId, NodeId

MAX_FAILURES = 4
"""In a row and without a whole piece, after which a peer is given up."""

MAX_BUSY = 60
"""Answers of "busy" after which a peer is given up: ten minutes of waiting in its queue."""

BUSY_REST_S = 0.25
"""It made us wait before it said so."""

FIRST_PACE_S = 1.0
"""For a piece, of a peer that has not sent one yet."""


class AttemptError(SwarmError):
    """Why one request to one peer failed. Never leaves the fetching side."""


class BusyError(AttemptError):
    """The peer serves others; later it can."""


class RefusedError(AttemptError):
    """The peer cannot give this blob."""


class DeniedError(AttemptError):
    """The peer gives us nothing at all."""


@dataclass(slots=True, eq=False)
class Flight:
    """A piece on its way from one peer."""

    blob: BlobId
    index: int
    start: int
    stop: int
    """The half-open range of bytes."""
    node: NodeId
    began: float
    received: int = 0
    whole: bool = False
    """It brought the piece, which is on its way to the disk."""
    lost: bool = False
    """Another flight brought the piece."""

    def left_s(self, now: float) -> float:
        """How long it will go on as it went so far."""
        return (now - self.began) * (self.stop - self.start - self.received) / max(1, self.received)


@dataclass(slots=True)
class _Peer:
    failures: int = 0
    failed_at: float = float("-inf")
    busy: int = 0
    rests_until: float = float("-inf")
    pace_s: float = FIRST_PACE_S
    """What it needs for a piece."""


@dataclass(slots=True)
class _Blob:
    size: int
    missing: list[int]
    """A heap: pieces that nobody fetches."""
    left: int
    """Pieces that have not landed."""
    flights: dict[int, list[Flight]] = field(default_factory=dict)
    refused: set[NodeId] = field(default_factory=set)
    only: NodeId | None = None
    """As long as it can, nobody else gives this blob."""


class Schedule:
    """One per fetch. The clock is passed in."""

    def __init__(self, nodes: Iterable[NodeId]) -> None:
        self._peers = {node: _Peer() for node in nodes}
        self._blobs: dict[BlobId, _Blob] = {}

    def add(self, blob: BlobId, size: int, missing: Collection[int]) -> None:
        """Fetch these pieces of a blob, after those of earlier ones."""
        self._blobs[blob] = _Blob(size, sorted(missing), len(missing))

    def again(self, blob: BlobId, indices: Collection[int], only: NodeId | None = None) -> None:
        """Fetch pieces once more; with `only`, from that peer while it can."""
        state = self._blobs[blob]
        state.only = only
        state.left += len(indices)
        for index in indices:
            heapq.heappush(state.missing, index)

    def remove(self, blob: BlobId) -> None:
        """The blob is in the store."""
        del self._blobs[blob]

    def able(self, node: NodeId, blob: BlobId) -> bool:
        """Whether the peer may still have something of the blob for us."""
        return node in self._peers and node not in self._blobs[blob].refused

    def asks(self, node: NodeId) -> bool:
        """False where the peer was dropped."""
        return node in self._peers

    def stuck(self) -> BlobId | None:
        """A blob that is not whole and that no peer can give any more."""
        for blob, state in self._blobs.items():
            if state.left and not state.flights and not any(self.able(node, blob) for node in self._peers):
                return blob
        return None

    def take(self, node: NodeId, now: float) -> Flight | None:
        """What a stream to the peer fetches next; None where there is nothing for it now."""
        peer = self._peers.get(node)
        if peer is None or now < peer.rests_until:
            return None
        for blob, state in self._blobs.items():
            if state.missing and self._may_give(node, blob):
                return self._fly(node, blob, heapq.heappop(state.missing), now)
        slow = self._slowest(node, peer.pace_s, now)
        return None if slow is None else self._fly(node, slow.blob, slow.index, now)

    def claim(self, flight: Flight) -> list[Flight]:
        """All bytes of the piece are here, and this flight brought them: the others, which now are for nothing."""
        flights = self._blobs[flight.blob].flights
        others = [other for other in flights[flight.index] if other is not flight]
        for other in others:
            other.lost = True
        flight.whole = True
        flights[flight.index] = [flight]
        return others

    def landed(self, flight: Flight, now: float) -> bool:
        """The piece of a claimed flight is on disk; True where it was the last one of its blob."""
        peer = self._peers.get(flight.node)
        if peer is not None:
            peer.failures = peer.busy = 0
            peer.pace_s += (now - flight.began - peer.pace_s) / 2
        state = self._blobs[flight.blob]
        del state.flights[flight.index]
        state.left -= 1
        return state.left == 0

    def failed(self, flight: Flight, failure: AttemptError, now: float) -> None:
        """The flight ended without the piece; somebody else may take it."""
        self.ended(flight)
        self.blame(flight.node, flight.blob, failure, flight.began, now)

    def ended(self, flight: Flight) -> None:
        """The flight is over without the piece."""
        state = self._blobs[flight.blob]
        flights = state.flights[flight.index]
        flights.remove(flight)
        if not flights:
            del state.flights[flight.index]
            heapq.heappush(state.missing, flight.index)

    def blame(self, node: NodeId, blob: BlobId, failure: AttemptError, began: float, now: float) -> float:
        """What a failed request that began then says about the peer; how many seconds it rests."""
        peer = self._peers.get(node)
        if peer is None:
            return 0.0
        rest_s = 0.0
        if isinstance(failure, DeniedError):
            self.drop(node)
        elif isinstance(failure, RefusedError):
            self._blobs[blob].refused.add(node)
        elif isinstance(failure, BusyError):
            peer.busy += 1
            rest_s = BUSY_REST_S
        elif began >= peer.failed_at:  # else it is the other stream's end of the same trouble
            peer.failures += 1
            peer.failed_at = now
            rest_s = 2.0 ** (peer.failures - 2)
        peer.rests_until = max(peer.rests_until, now + rest_s)
        if peer.failures >= MAX_FAILURES or peer.busy >= MAX_BUSY:
            self.drop(node)
        return rest_s

    def drop(self, node: NodeId) -> None:
        """Ask the peer for nothing any more."""
        self._peers.pop(node, None)

    def _may_give(self, node: NodeId, blob: BlobId) -> bool:
        only = self._blobs[blob].only
        return self.able(node, blob) and (only is None or only == node or not self.able(only, blob))

    def _fly(self, node: NodeId, blob: BlobId, index: int, now: float) -> Flight:
        state = self._blobs[blob]
        flight = Flight(blob, index, *piece_span(state.size, index), node, now)
        state.flights.setdefault(index, []).append(flight)
        return flight

    def _slowest(self, node: NodeId, pace_s: float, now: float) -> Flight | None:
        """The flight that ends last, of those that the peer would overtake from a standing start."""
        alone = [
            flights[0]
            for blob, state in self._blobs.items()
            if self._may_give(node, blob)
            for flights in state.flights.values()
            if len(flights) == 1
        ]
        slow = [one for one in alone if one.node != node and not one.whole and now - one.began >= pace_s]
        slowest = max(slow, key=lambda flight: flight.left_s(now), default=None)
        return slowest if slowest is not None and slowest.left_s(now) > pace_s else None
