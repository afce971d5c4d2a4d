"""A virtual clock, cores that share their time, and what work costs by its rows: the ground of `bench.simulator`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

PATIENCE_S = 86_400.0
"""Simulated."""


class World:
    """The clock: actions in the order of their times, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), action))

    def run(self, until: Callable[[], bool]) -> None:
        """Act until `until`. Raises ``RuntimeError`` where nothing is left to happen before, or within `PATIENCE_S`."""
        give_up = self.now + PATIENCE_S
        while not until():
            if not self._heap or self.now > give_up:
                raise RuntimeError("the simulated world stands still")
            self.now, _, action = heapq.heappop(self._heap)
            action()


class Core:
    """One core. What runs on it at once shares it evenly."""

    def __init__(self, world: World) -> None:
        self.busy_s = 0.0
        self._world = world
        self._jobs: list[_Job] = []
        self._settled = 0.0
        self._changes = 0

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        """Work that takes `seconds` alone; `then` is called when it is done."""
        self._settle()
        self._jobs.append(_Job(seconds, then))
        self._watch()

    def _settle(self) -> None:
        elapsed, self._settled = self._world.now - self._settled, self._world.now
        if self._jobs:
            self.busy_s += elapsed
        for job in self._jobs:
            job.left_s -= elapsed / len(self._jobs)

    def _watch(self) -> None:
        self._changes += 1
        if self._jobs:
            shortest = min(job.left_s for job in self._jobs)
            self._world.after(max(0.0, shortest) * len(self._jobs), partial(self._done, self._changes))

    def _done(self, changes: int) -> None:
        if changes != self._changes:
            return  # something began meanwhile, and another end is awaited
        self._settle()
        job = min(self._jobs, key=lambda job: job.left_s)
        self._jobs.remove(job)
        self._watch()
        job.then()


@dataclass(eq=False, slots=True)
class _Job:
    left_s: float
    then: Callable[[], None]


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Milliseconds of a forward by its rows: measured points, straight lines between them and beyond the last."""

    points: tuple[tuple[int, float], ...]

    def times(self, factor: float) -> RowCosts:
        return RowCosts(tuple((rows, ms * factor) for rows, ms in self.points))

    def of(self, rows: int) -> float:
        lines = list(itertools.pairwise(self.points))
        (few, low), (many, high) = next((line for line in lines if rows <= line[1][0]), lines[-1])
        return low + (high - low) * (max(rows, self.points[0][0]) - few) / (many - few)
