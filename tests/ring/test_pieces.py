"""Who fetches which piece from whom: pure, against peers of every kind."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.model.partial import PIECE_BYTES, piece_count
from swarm.protocol.ids import BlobId, NodeId
from swarm.ring import pieces
from swarm.ring.pieces import AttemptError, BusyError, DeniedError, Flight, RefusedError, Schedule

A, B, C = (NodeId(letter * 32) for letter in "abc")
ONE, TWO = BlobId("1" * 64), BlobId("2" * 64)


def schedule(count: int = 3, *nodes: NodeId) -> Schedule:
    """One blob of `count` pieces."""
    made = Schedule(nodes or (A, B))
    made.add(ONE, count * PIECE_BYTES, range(count))
    return made


def take(plan: Schedule, node: NodeId, now: float = 0.0) -> Flight:
    flight = plan.take(node, now)
    assert flight is not None
    return flight


def bring(plan: Schedule, flight: Flight, now: float = 0.0) -> bool:
    plan.claim(flight)
    return plan.landed(flight, now)


def test_every_piece_once_in_order() -> None:
    plan = schedule(3)
    flights = [take(plan, node) for node in (A, B, A)]
    assert [flight.index for flight in flights] == [0, 1, 2]
    assert plan.take(B, 0.0) is None
    assert [bring(plan, flight) for flight in flights] == [False, False, True]


def test_the_last_piece_is_shorter() -> None:
    plan = Schedule([A])
    plan.add(ONE, PIECE_BYTES + 7, [1])
    flight = take(plan, A)
    assert (flight.start, flight.stop) == (PIECE_BYTES, PIECE_BYTES + 7)


def test_what_failed_is_given_to_others_and_the_peer_rests() -> None:
    plan = schedule(1)
    flight = take(plan, A)
    plan.failed(flight, AttemptError("cut"), 1.0)
    assert plan.take(A, 1.4) is None
    assert take(plan, B, 1.4).index == 0
    assert plan.take(A, 1.6) is None


def test_a_peer_is_given_up_in_the_end() -> None:
    plan = schedule(1, A)
    now, rests = 0.0, []
    while plan.asks(A):
        flight = take(plan, A, now)
        plan.failed(flight, AttemptError("cut"), now)
        before = now
        while plan.asks(A) and plan.take(A, now) is None:
            now += 0.125
        rests.append(now - before)
        plan = plan if not plan.asks(A) else _back(plan, now)
    assert rests == [0.5, 1.0, 2.0, 0.0]
    assert plan.stuck() == ONE


def _back(plan: Schedule, now: float) -> Schedule:
    """The piece that the test took only to see that it can."""
    for flights in list(plan._blobs[ONE].flights.values()):
        plan.ended(flights[0])
    return plan


def test_two_streams_of_one_peer_fail_once() -> None:
    plan = schedule(2, A)
    first, second = take(plan, A), take(plan, A)
    plan.failed(first, AttemptError("cut"), 1.0)
    plan.failed(second, AttemptError("cut"), 1.1)
    assert take(plan, A, 1.5).index == 0


def test_a_whole_piece_is_a_new_start() -> None:
    plan, now = schedule(50, A), 0.0
    for _ in range(20):
        plan.failed(take(plan, A, now), AttemptError("cut"), now)
        now += 5.0
        bring(plan, take(plan, A, now), now)
    assert plan.asks(A)


def test_a_busy_peer_is_waited_for_long() -> None:
    plan, now = schedule(1, A), 0.0
    for _ in range(pieces.MAX_BUSY):
        assert plan.stuck() is None
        plan.failed(take(plan, A, now), BusyError("busy"), now)
        assert plan.take(A, now + 0.1) is None
        now += 0.3
    assert plan.stuck() == ONE


def test_what_was_refused_is_not_asked_again() -> None:
    plan = schedule(2)
    plan.add(TWO, PIECE_BYTES, [0])
    plan.failed(take(plan, A), RefusedError("404"), 0.0)
    assert take(plan, A).blob == TWO
    assert plan.take(A, 0.0) is None
    assert take(plan, B).blob == ONE
    plan.drop(B)
    assert plan.stuck() is None  # its piece is still on its way
    plan.failed(plan._blobs[ONE].flights[0][0], AttemptError("cut"), 0.0)
    assert plan.stuck() == ONE


def test_a_peer_that_gives_nothing_is_left_at_once() -> None:
    plan = schedule(2)
    plan.failed(take(plan, A), DeniedError("403"), 0.0)
    assert not plan.asks(A)
    assert plan.take(A, 100.0) is None


def test_a_slow_piece_is_taken_over_near_the_end() -> None:
    plan = schedule(2)
    slow, quick = take(plan, A), take(plan, B)
    bring(plan, quick, 0.1)
    slow.received = PIECE_BYTES // 100
    assert plan.take(B, 0.2) is None  # too early to tell
    over = take(plan, B, 2.0)
    assert over.index == slow.index
    assert plan.take(B, 2.0) is None  # not by a third
    assert plan.claim(over) == [slow]
    assert slow.lost
    assert plan.landed(over, 2.1)


@pytest.mark.parametrize("received", [PIECE_BYTES - 1, PIECE_BYTES // 4 * 3])
def test_a_piece_that_is_nearly_here_is_not(received: int) -> None:
    plan = schedule(2)
    slow, quick = take(plan, A), take(plan, B)
    bring(plan, quick, 1.0)
    slow.received = received
    assert plan.take(B, 1.1) is None


def test_a_peer_does_not_take_over_from_itself() -> None:
    plan = schedule(1, A)
    take(plan, A)
    assert plan.take(A, 1000.0) is None


def test_only_one_peer_while_it_can() -> None:
    plan = schedule(1)
    bring(plan, take(plan, A))
    plan.again(ONE, [0], only=B)
    assert plan.take(A, 0.0) is None
    flight = take(plan, B)
    plan.failed(flight, RefusedError("404"), 0.0)
    assert take(plan, A).index == 0


@dataclass
class Kind:
    """How a simulated peer behaves."""

    pace_s: float
    refuses: frozenset[BlobId]
    failures: list[type[AttemptError] | None]
    """Of its flights, one after the other; then it does what it should."""
    stalls: bool
    told: set[BlobId] = field(default_factory=set)


KINDS = st.builds(
    Kind,
    st.sampled_from([0.01, 0.1, 1.0, 30.0]),
    st.frozensets(st.sampled_from([ONE, TWO])),
    st.lists(st.sampled_from([None, AttemptError, BusyError, DeniedError]), max_size=12),
    st.booleans(),
)
STALL_S = 15.0


@given(st.lists(KINDS, min_size=1, max_size=4), st.integers(0, 6 * PIECE_BYTES), st.integers(1, 2 * PIECE_BYTES))
@settings(max_examples=200, deadline=None)
def test_it_ends_whole_or_with_nobody_to_ask(kinds: list[Kind], first: int, second: int) -> None:
    """Two streams to every peer, in simulated time: no piece twice, no refusal twice, and an end."""
    nodes = {NodeId(f"{number:032x}"): kind for number, kind in enumerate(kinds)}
    steady = any(not (kind.stalls or kind.failures or kind.refuses) for kind in kinds)
    plan = Schedule(nodes)
    left = {}
    for blob, size in ((ONE, first), (TWO, second)):
        if size:
            plan.add(blob, size, range(piece_count(size)))
            left[blob] = set(range(piece_count(size)))
    now, number = 0.0, 0
    ends: list[tuple[float, int, Flight, type[AttemptError] | None]] = []
    busy = dict.fromkeys(nodes, 0)
    while any(left.values()) and plan.stuck() is None:
        assert now < 3600
        for node, kind in nodes.items():
            while busy[node] < 2 and (flight := plan.take(node, now)) is not None:
                assert flight.blob not in kind.told, "asked again for what it refused"
                assert flight.index in left[flight.blob]
                failure = kind.failures.pop() if kind.failures else AttemptError if kind.stalls else None
                lasts = STALL_S if failure is AttemptError else kind.pace_s
                if flight.blob in kind.refuses:
                    failure, lasts = RefusedError, 0.001
                number += 1
                busy[node] += 1
                heapq.heappush(ends, (now + lasts, number, flight, failure))
        until = ends[0][0] if ends and ends[0][0] < now + 0.25 else now + 0.25
        now = until
        while ends and ends[0][0] <= now:
            _, _, flight, failure = heapq.heappop(ends)
            busy[flight.node] -= 1
            if flight.lost:
                continue
            if failure is not None:
                if failure is RefusedError:
                    nodes[flight.node].told.add(flight.blob)
                plan.failed(flight, failure("it"), now)
                continue
            plan.claim(flight)
            left[flight.blob].remove(flight.index)
            assert plan.landed(flight, now) == (not left[flight.blob])
    stuck = plan.stuck()
    if stuck is not None:
        assert not any(plan.able(node, stuck) for node in nodes)
    if steady:
        assert not any(left.values())
