"""A ring as an event simulation: N stages with a cost model, U users, messages that take a while. No clock, no I/O."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from swarm.protocol.messages import RowKind, Segment
from swarm.ring.schedule import StepScheduler
from tests.ring.stage_harness import segment

COSTS = ((1, 90.0), (2, 83.0), (4, 96.0), (8, 131.0), (16, 201.0), (32, 361.0))
"""(rows, ms) of the whole model on one core: Qwen2.5-Coder-1.5B, `bench/results/shards.json`."""

HOP_MS = 1.0
FRAME_MS = 0.3
"""Between two messages that were sent together."""


def model_ms(rows: int) -> float:
    """Of a forward through all layers."""
    rows = max(rows, 2)
    for (low, below), (high, above) in itertools.pairwise(COSTS):
        if rows <= high:
            return below + (above - below) * (rows - low) / (high - low)
    return COSTS[-1][1] + 10.0 * (rows - COSTS[-1][0])


@dataclass
class Simulation:
    """`shares[i]`: the part of the layers that stage i has."""

    shares: list[float]
    seed: int = 0
    window: int = 1
    """Chunks of a prompt in flight."""
    now: float = 0.0
    """ms."""
    drawn: dict[int, list[float]] = field(default_factory=dict)
    """By user, when each token came."""
    prompt: dict[int, int] = field(default_factory=dict)
    """By user, rows of its prompt that are not sent yet."""

    def __post_init__(self) -> None:
        count = len(self.shares)
        self.random = Random(self.seed)
        self.stages = [StepScheduler(count, first=number == 0) for number in range(count)]
        self.busy = [False] * count
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._position: dict[int, int] = {}

    def join(self, user: int, at: float = 0.0, prompt: int = 0) -> None:
        """A user who decodes from `at` on, after a prompt of so many tokens."""
        self._position[user], self.prompt[user], self.drawn[user] = 0, prompt, []
        for _ in range(self.window if prompt else 1):
            self.after(at - self.now, self._ask, user)

    def leave(self, user: int) -> None:
        del self._position[user]

    def run_until(self, end: float) -> None:
        while self._events and self._events[0][0] < end:
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        self.now = end

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), call, arguments))

    def _ask(self, user: int) -> None:
        if user not in self._position:
            return
        start, left = self._position[user], self.prompt[user]
        rows = min(left, 256) or 1
        if not left and start and self._prefilling(user):
            return
        self.prompt[user] = max(0, left - rows)
        self._position[user] += rows
        kind = RowKind.PREFILL if rows > 1 else RowKind.DECODE
        self._arrive(0, segment(user, start, rows, kind=kind))

    def _prefilling(self, user: int) -> bool:
        """The answer to an inner chunk, when all are sent: nothing follows from it."""
        return not self.drawn[user]

    def _arrive(self, stage: int, one: Segment) -> None:
        self.stages[stage].push(one, self.now / 1000)
        self._look(stage)

    def _look(self, stage: int) -> None:
        scheduler = self.stages[stage]
        scheduler.validate_state()
        due = scheduler.due()
        if self.busy[stage] or due is None:
            return
        if due * 1000 > self.now + 1e-6:
            self.after(due * 1000 - self.now, self._look, stage)
            return
        batch = scheduler.take(1024, self.now / 1000)
        assert batch
        took = model_ms(sum(len(one.tokens) for one in batch)) * self.shares[stage] * self.random.uniform(0.95, 1.05)
        self.busy[stage] = True
        self.after(took, self._ran, stage, batch, took)

    def _ran(self, stage: int, batch: list[Segment], took: float) -> None:
        self.busy[stage] = False
        self.stages[stage].ran(batch, took, self.now / 1000)
        hop = HOP_MS * self.random.uniform(0.7, 1.3)
        for number, one in enumerate(batch):
            delay = hop + FRAME_MS * number
            if stage + 1 < len(self.stages):
                following = len(batch) - 1 - number
                self.after(delay, self._arrive, stage + 1, replace(one, following=following))
            elif one.wanted:
                self.after(delay, self._answer, one)
        self._look(stage)

    def _answer(self, one: Segment) -> None:
        user = int(one.session.split("-")[1], 16)
        if user not in self._position:
            return
        if one.start + len(one.tokens) == self._position[user] and not self.prompt[user]:
            self.drawn[user].append(self.now)
        self.after(HOP_MS * self.random.uniform(0.7, 1.3), self._ask, user)

    def rate(self, since: float) -> float:
        """Tokens per ms, of all."""
        return sum(at > since for times in self.drawn.values() for at in times) / (self.now - since)


def ideal_rate(shares: list[float], users: int) -> float:
    """Tokens per ms of equal groups, one for each stage, without transit: as the slowest stage or the chain allows."""
    groups = min(users, len(shares))
    sizes = [users // groups + (number < users % groups) for number in range(groups)]
    busiest = max(shares) * sum(model_ms(size) for size in sizes)
    return users / max(busiest, sum(shares) * model_ms(sizes[0]))
