"""The timed engine: no model. Every forward takes a given time and tokens follow from a hash.

For rings that do not fit on this PC: 70B on many nodes, slow links, chaos tests, all on the real protocol and
scheduler. Hidden rows carry a running hash of the session's ids, so that the drawn token depends on every id before it
and a stage that lost or mixed up a row is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.engine.base import Output, check_rows
from swarm.engine.blocks import BlockPool
from swarm.protocol.errors import CapacityError
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Segment
from swarm.protocol.tensors import Array

HIDDEN_SIZE = 2
"""Row: the hash, and how many stages have seen it."""

_MODULUS = 65_521  # the largest prime below 2^16: exact in f32


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What a forward costs: a base, and each row beyond the first."""

    forward_ms: float
    row_ms: float = 0.0

    def of(self, rows: int) -> float:
        return self.forward_ms + self.row_ms * (rows - 1)


class TimedEngine:
    """Implements `base.Engine`. `sleep` is called with seconds, in the engine's thread."""

    def __init__(
        self,
        first: bool,
        last: bool,
        kv_tokens: int,
        times: StageTimes,
        vocabulary: int = 32_000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._first = first
        self._last = last
        self._times = times
        self._vocabulary = vocabulary
        self._sleep = sleep
        self._pool = BlockPool(-(-kv_tokens // 32), 32)

    @property
    def hidden_size(self) -> int:
        return 0 if self._first else HIDDEN_SIZE

    @property
    def max_rows(self) -> int:
        return 1024

    @property
    def free_tokens(self) -> int:
        return self._pool.free_blocks * self._pool.size

    @property
    def shares(self) -> bool:
        return True

    def check(self, segment: Segment) -> None:
        check_rows(segment, self._vocabulary, self.hidden_size)
        self._pool.check(segment.session, segment.start, len(segment.tokens))
        end = segment.start + len(segment.tokens)
        if end > self._pool.blocks * self._pool.size:
            raise CapacityError("a session longer than the KV cache", found=str(end))

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        self._pool.reserve((segment.session, segment.start, len(segment.tokens)) for segment in batch)
        outputs = []
        for segment in batch:
            table = self._pool.extend(segment.session, segment.start, segment.tokens, segment.kind)
            self._pool.publish(table)
            hidden = self._rows(table.tokens, segment)
            if self._last:
                drawn = tuple(int(row[0]) % self._vocabulary for row in hidden[len(hidden) - segment.wanted :])
                outputs.append(Output(drawn=drawn))
            else:
                outputs.append(Output(hidden=hidden))
        self._sleep(self._times.of(sum(len(segment.tokens) for segment in batch)) / 1000)
        return outputs

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> int:
        return len(self._pool.adopt(session, tokens).tokens)

    def close_session(self, session: SessionId) -> None:
        self._pool.close(session)

    def reset(self) -> None:
        self._pool.reset()

    def close(self) -> None:
        pass

    def _rows(self, tokens: list[int], segment: Segment) -> Array:
        """``[rows, 2]`` f32: what the stage before computed, checked against our own ids, one stage deeper."""
        value, rows = 0, []
        for position, token in enumerate(tokens):
            value = (value * 31 + token + 7) % _MODULUS
            if position >= segment.start:
                rows.append([value, 1.0])
        own = np.array(rows, np.float32)
        if not self._first:
            if segment.hidden is None or not np.array_equal(segment.hidden[:, 0], own[:, 0]):
                raise AssertionError(f"rows of {segment.session} at {segment.start} do not follow from its ids")
            own[:, 1] += segment.hidden[:, 1]
        return own
