"""What this node tells every screen: the progress of its own work, and once a second what its stage and users do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from swarm.protocol.ids import NodeId
from swarm.protocol.messages import Message, Phase, Progress, StageReport
from swarm.protocol.plan import Plan
from swarm.ring.board import Board
from swarm.ring.machine import resident_bytes
from swarm.ring.worker import NO_STATS, StageWorker

REPORT_S = 1.0
PROGRESS_S = 0.5
"""Between two progress messages of one phase."""

Meter: TypeAlias = Callable[[], tuple[float, int, tuple[int, ...]]]
"""Tokens per second, sessions, and sessions on each ring, of this node's coordinator."""


class Reporter:
    """Writes on this node's own board, and tells the others."""

    def __init__(self, node: NodeId, board: Board, tell: Callable[[Message], None], meter: Meter) -> None:
        self._node = node
        self._board = board
        self._tell = tell
        self._meter = meter
        self._progress_told = (Phase.IDLE, float("-inf"))
        self._reported = float("-inf")

    def progress(self, phase: Phase, label: str, done: int, total: int, rate: float) -> bool:
        """Whether the others were told: not too often, but of each phase's beginning and end."""
        progress = Progress(self._node, phase, label, done, total, rate)
        self._board.progress[self._node] = progress
        (told, when), now = self._progress_told, time.monotonic()
        if phase is told and now - when < PROGRESS_S and done != total:
            return False
        self._progress_told = (phase, now)
        self._tell(progress)
        return True

    def stage(self, plan: Plan, worker: StageWorker | None, round_trip_ms: Callable[[NodeId], float | None]) -> None:
        """Called often; reports every `REPORT_S`."""
        now = time.monotonic()
        if now - self._reported < REPORT_S:
            return
        self._reported = now
        rate, sessions, ring_sessions = self._meter()
        stats = worker.stats() if worker is not None else NO_STATS
        following = plan.after(self._node) if plan.stage_of(self._node) else None
        trip = round_trip_ms(following.node) if following else None
        report = StageReport(
            node=self._node,
            epoch=plan.epoch,
            step_ms=stats.step_ms,
            hop_ms=(trip or 0.0) / 2,
            rows_per_second=stats.rows_per_second,
            tokens_per_second=rate,
            sessions=sessions,
            waiting=stats.waiting,
            memory_bytes=resident_bytes(),
            ring_sessions=ring_sessions,
        )
        self._board.reports[self._node] = report
        self._tell(report)
