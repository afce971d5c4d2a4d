"""Segments under way in one attempt, in the order they were sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from swarm.coordinator.token_log import Piece
from swarm.protocol.messages import Drawn


@dataclass(frozen=True, slots=True)
class Flight:
    """A segment on its way. Its answer begins at the position after the first wanted row."""

    piece: Piece
    number: int
    """Of the segment in its attempt."""
    wanted: int
    sent_at: float

    @property
    def answer_position(self) -> int:
        return self.piece.end - self.wanted + 1


class Flights:
    def __init__(self) -> None:
        self._under_way: deque[Flight] = deque()
        self._sent = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._under_way)

    @property
    def rows(self) -> int:
        return sum(flight.piece.rows for flight in self._under_way)

    def end(self, fed: int) -> int:
        """Where the next segment begins; `fed` where nothing is under way."""
        return self._under_way[-1].piece.end if self._under_way else fed

    def send(self, piece: Piece, wanted: int, now: float) -> Flight:
        flight = Flight(piece, self._sent, wanted, now)
        self._sent += 1
        self._under_way.append(flight)
        return flight

    def land(self, answer: Drawn) -> Flight | None:
        """Take out the segment that `answer` belongs to, and those before it; None for an answer to nothing.

        Stages run the segments of an attempt in order: an answer to a later one proves that the earlier ones were run.
        """
        flight = next((flight for flight in self._under_way if flight.answer_position == answer.position), None)
        if flight is None or flight.wanted != len(answer.tokens):
            return None
        while self._under_way.popleft() is not flight:
            pass
        return flight

    def clear(self) -> None:
        """A new attempt."""
        self._under_way.clear()
        self._sent = 0
