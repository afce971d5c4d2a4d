"""A ring of stages without a model, one message at a time: the real queue, caches as lists, links that can lose."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from swarm.protocol.ids import Epoch, SessionId
from swarm.protocol.messages import Drawn, Refused, RowKind, Segment
from swarm.protocol.plan import Plan
from swarm.protocol.tensors import Array
from swarm.ring.schedule import StepScheduler
from tests.coordinator.fake_stages import Row

STOP = 97
LETTERS = 6
"""Few, so that n-grams are found and some of them are right."""


def next_token(rows: Sequence[Row]) -> int:
    """Of all ids before it and how each row was run; `STOP` is one of the letters."""
    return STOP + zlib.crc32(repr([(token, int(kind)) for token, kind in rows]).encode()) % LETTERS


def traces(rows: Sequence[Row], start: int) -> Array:
    """``[rows, 1]`` f32 in place of hidden rows: each depends on all rows before it."""
    hashes = [zlib.crc32(repr(rows[: end + 1]).encode()) % 65536 for end in range(start, len(rows))]
    return np.array(hashes, np.float32).reshape(-1, 1)


class FakeStage:
    """The rules of `messages.Segment`."""

    def __init__(self, epoch: Epoch, stages: int, first: bool, last: bool) -> None:
        self.epoch = epoch
        self.first = first
        self.last = last
        self.queue = StepScheduler(stages, first=first)
        self.caches: dict[SessionId, list[Row]] = {}
        self.ran: dict[SessionId, tuple[int, int, int]] = {}

    def run(self, segment: Segment) -> Segment | Drawn | Refused | None:
        session = segment.session
        cache = self.caches.setdefault(session, [])
        attempt, number, end = self.ran.get(session, (-1, -1, -1))
        behind = (attempt, end) == (segment.attempt, segment.start) and segment.number - 1 <= number <= segment.number
        if segment.number and not behind:
            return refusal(segment, "a gap in the attempt")
        if segment.start > len(cache):
            return refusal(segment, "a gap in the cache")
        assert segment.kind is RowKind.DECODE or len(segment.tokens) > 1, "a prefill chunk of one row"
        cache[segment.start :] = [(token, segment.kind) for token in segment.tokens]
        self.ran[session] = (segment.attempt, segment.number, len(cache))
        hidden = traces(cache, segment.start)
        assert self.first or np.array_equal(segment.hidden, hidden), "rows of another history than the stage before's"
        if not self.last:
            return replace(segment, hidden=hidden)
        if not segment.wanted:
            return None
        first = len(cache) - segment.wanted + 1
        tokens = tuple(next_token(cache[:position]) for position in range(first, len(cache) + 1))
        return Drawn(session, self.epoch, segment.attempt, first, tokens)


class FakeRing:
    """`links[i]` leads to stage i; what comes back to the coordinator lies in `answers`."""

    def __init__(self, plan: Plan) -> None:
        self.epoch = plan.epoch
        count = len(plan.stages)
        self.stages = [FakeStage(plan.epoch, count, i == 0, i == count - 1) for i in range(count)]
        self.links: list[deque[Segment]] = [deque() for _ in range(count)]
        self.answers: list[Drawn | Refused] = []

    @property
    def busy(self) -> list[int]:
        """Stages that something waits at or travels to."""
        return [i for i, stage in enumerate(self.stages) if self.links[i] or len(stage.queue)]

    def arrive(self, stage: int, attempt: int | None = None) -> None:
        """The next segment on the link, of `attempt` where one is given, is queued."""
        link = self.links[stage]
        segment = next(s for s in link if attempt is None or s.attempt == attempt)
        link.remove(segment)
        if segment.epoch == self.epoch:
            self.stages[stage].queue.push(segment, 0.0)
        else:
            self.answers.append(refusal(segment, "another epoch"))

    def step(self, stage: int, refuse: bool = False) -> None:
        """What waits at the stage is run, or refused."""
        batch = self.stages[stage].queue.take(1024, 0.0)
        self.stages[stage].queue.ran(batch, 1.0, 0.0)
        for segment in batch:
            result = refusal(segment, "the cache is full") if refuse else self.stages[stage].run(segment)
            if isinstance(result, Segment):
                self.links[stage + 1].append(result)
            elif result is not None:
                self.answers.append(result)

    def forget(self, stage: int, session: SessionId) -> None:
        """The stage gives up its cache, seconds after it was last used: what was overtaken on the link is long gone."""
        attempt, *_ = self.stages[stage].ran.pop(session, (0, 0, 0))
        self.links[stage] = deque(segment for segment in self.links[stage] if segment.attempt >= attempt)
        self.stages[stage].queue.forget(session)
        self.stages[stage].caches.pop(session, None)

    def advance(self, stage: int) -> None:
        """One undisturbed move of a busy stage."""
        if self.links[stage]:
            self.arrive(stage)
        else:
            self.step(stage)


def refusal(segment: Segment, reason: str) -> Refused:
    return Refused(segment.session, segment.epoch, segment.attempt, reason, fatal=False)
