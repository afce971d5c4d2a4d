"""The interface every engine has: a batch of segments in, hidden rows or drawn tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swarm.protocol.errors import SessionError
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Segment
from swarm.protocol.tensors import Array


@dataclass(frozen=True, slots=True)
class Output:
    """What came of one segment. `hidden` and `drawn` are this output's own memory, not views of the engine's."""

    hidden: Array | None = None
    """``[rows, hidden]`` f32 for the next stage; None after the last layer."""
    drawn: tuple[int, ...] = ()
    """After the last layer: one token for each wanted row."""
    margins: tuple[float, ...] = ()
    """How far each of them was ahead of the next; only from an engine that drafts (`sampling.draw_with_margin`)."""


class Engine(Protocol):
    """Runs one shard. Not thread-safe: whoever owns it calls from one thread at a time.

    A segment's `start` says where its session's cache must stand; the engine brings it there, so there is no rewind, no
    reset and no mask in the interface.
    """

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden row that comes in; 0 at the first stage. Caches that later layers read widen it."""

    @property
    def max_rows(self) -> int:
        """Rows that one batch may hold in all."""

    @property
    def free_tokens(self) -> int:
        """Positions of KV cache that are not taken."""

    @property
    def shares(self) -> bool:
        """Whether a session may begin with what was computed for others (`adopt`)."""

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        """Run all segments in one forward; blocking. At most one segment of each session.

        Raises `CapacityError` where the KV cache is full and `SessionError` where a segment starts behind what its
        session's cache holds; then nothing was run and the caches are as before.
        """

    def check(self, segment: Segment) -> None:
        """Raise what `run` would raise for this segment alone; cheap.

        A segment may come from a peer: ids outside the vocabulary and rows of another width are `SessionError`s.
        """

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> int:
        """Begin a new session with what the cache holds of these first ids; returns how many positions that are.

        They were computed for other sessions as prefill rows, so the bits are the same. 0 where nothing can be shared.
        """

    def close_session(self, session: SessionId) -> None:
        """Free what is held for `session`; unknown ones are ignored."""

    def reset(self) -> None:
        """Close all sessions."""

    def close(self) -> None:
        """Free everything. The engine cannot be used again."""


def check_rows(segment: Segment, vocabulary: int, hidden_size: int) -> None:
    """Check a segment's ids and hidden rows; `hidden_size` is 0 at the first stage, which takes ids.

    An id outside the table would be read from foreign memory.
    """
    if not all(0 <= token < vocabulary for token in segment.tokens):
        raise SessionError("a token id outside the vocabulary", expected=f"0 to {vocabulary - 1}")
    found = None if segment.hidden is None else (segment.hidden.shape, segment.hidden.dtype)
    expected = ((len(segment.tokens), hidden_size), np.dtype(np.float32)) if hidden_size else None
    if found != expected:
        raise SessionError("a segment for another stage", expected=str(expected or "ids only"), found=str(found))


def first_line(error: Exception) -> str:
    """What OpenVINO says, without where in its source it says it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
