"""Which rows a draft model runs next: asks of several sessions, and what its cache holds of each; pure.

The cache of a session is brought to what an ask and it have in common, so only what is new is run: of a growing
answer a row or two, after a rejection the correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.coordinator.chunks import prefill_chunks
from swarm.coordinator.events import AskDraft
from swarm.coordinator.times import MODEL, confidence
from swarm.engine.base import Output
from swarm.protocol.ids import NO_EPOCH, NodeId, SessionId
from swarm.protocol.messages import RowKind, Segment

CHUNK_ROWS = 64
"""Of prefill in one step: a new ask, and the stage that shares the cores, wait no longer than this takes."""

SIBLING_ROWS = 8
"""Up to so many new rows go in as decode rows, the way the target ran them: the draft then agrees to the last bit where
it is the same model. More are prefilled, which is faster."""

MAX_SESSIONS = 16
"""Caches kept; the longest unused go first."""

_NOBODY = NodeId("0" * 32)
_COMPARE = 1024  # ids compared at once


@dataclass(slots=True, eq=False)
class Job:
    """One ask being answered."""

    session: SessionId
    ask: AskDraft
    count: int
    """Tokens still wanted in all; 0 where nobody waits any more and the rows are only fed."""
    drafted: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """How sure the model is of each of them (`times.confidence`)."""
    chance: float = 1.0
    """That all of them are right."""
    start: int = -1
    """Rows of the sequence that the cache holds; -1 before the first step."""
    kind: RowKind = RowKind.DECODE

    def rows(self, start: int, end: int) -> tuple[int, ...]:
        """Ids ``[start, end)`` of the ask's tokens and those drafted since."""
        known = len(self.ask.tokens)
        return self.ask.tokens[start:end] + tuple(self.drafted[max(0, start - known) : max(0, end - known)])

    @property
    def length(self) -> int:
        return len(self.ask.tokens) + len(self.drafted)

    @property
    def over(self) -> bool:
        if self.count > 0:
            return len(self.drafted) >= self.count or (len(self.drafted) > 0 and self.doubtful)
        return self.start >= self.length

    @property
    def doubtful(self) -> bool:
        """Another token is not worth its time."""
        return bool(self.ask.chances) and self.chance * self.ask.chances[-MODEL] < self.ask.least

    def say(self, output: Output) -> None:
        """Take the token that was drawn behind all others."""
        source = confidence(output.margins[-1]) if output.margins else MODEL
        self.drafted.append(output.drawn[-1])
        self.sources.append(source)
        if self.ask.chances:
            self.chance *= self.ask.chances[-source]


class DraftBook:
    def __init__(self) -> None:
        self._jobs: dict[SessionId, Job] = {}
        self._held: dict[SessionId, list[int]] = {}
        """Ids in the cache of each session, the longest unused first."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def put(self, session: SessionId, ask: AskDraft) -> tuple[Job, Job | None]:
        """The job of a new ask, and the one that it replaces."""
        older = self._jobs.pop(session, None)
        job = self._jobs[session] = Job(session, ask, ask.count)
        return job, older

    def drop(self, job: Job) -> None:
        """Nobody wants its answer, and nothing more is fed."""
        if self._jobs.get(job.session) is job:
            del self._jobs[job.session]

    def close(self, session: SessionId) -> Job | None:
        """Forget a session; its job, where one ran."""
        self._held.pop(session, None)
        return self._jobs.pop(session, None)

    def surplus(self) -> list[SessionId]:
        """Sessions whose caches go because there are too many."""
        return self.unused()[: max(0, len(self._held) - MAX_SESSIONS)]

    def unused(self) -> list[SessionId]:
        """Sessions that hold a cache and ask for nothing, the longest unused first."""
        return [session for session in self._held if session not in self._jobs]

    def step(self, max_rows: int) -> list[Segment]:
        """The next batch: one segment of every job that has room in it, decode rows before prefill."""
        for job in self._jobs.values():
            if job.start < 0:
                self._begin(job)
        batch: list[Segment] = []
        rows, prefills = 0, False
        for job in sorted(self._jobs.values(), key=lambda job: job.kind is RowKind.PREFILL):
            segment = _segment(job)
            prefill = segment.kind is RowKind.PREFILL
            if rows + len(segment.tokens) > max_rows or (prefill and prefills):
                continue
            batch.append(segment)
            rows, prefills = rows + len(segment.tokens), prefills or prefill
        return batch

    def ran(self, batch: Sequence[Segment], outputs: Sequence[Output]) -> list[Job]:
        """Take down what came of a batch; the jobs that are over with it."""
        over = []
        for segment, output in zip(batch, outputs, strict=True):
            held = self._held.pop(segment.session, [])
            del held[segment.start :]
            held += segment.tokens
            self._held[segment.session] = held
            job = self._jobs.get(segment.session)
            end = segment.start + len(segment.tokens)
            if job is None or job.start != segment.start or job.rows(segment.start, end) != segment.tokens:
                continue  # replaced while the batch ran
            job.start = end
            if end == job.length:
                job.kind = RowKind.DECODE
                if output.drawn and len(job.drafted) < job.count:
                    job.say(output)
            if job.over:
                del self._jobs[job.session]
                over.append(job)
        return over

    def _begin(self, job: Job) -> None:
        tokens = job.ask.tokens
        job.start = min(_common(self._held.get(job.session, []), tokens), len(tokens) - 1)
        job.kind = RowKind.PREFILL if len(tokens) - job.start > SIBLING_ROWS else RowKind.DECODE

    def validate_state(self) -> None:
        """Every job stands within its sequence, and its cache holds what it was fed."""
        for session, job in self._jobs.items():
            assert session == job.session
            assert -1 <= job.start <= job.length
            if job.start > 0:
                assert tuple(self._held[session][: job.start]) == job.rows(0, job.start)


def _segment(job: Job) -> Segment:
    missing = job.length - job.start
    rows = prefill_chunks(missing, CHUNK_ROWS)[0] if job.kind is RowKind.PREFILL else missing
    end = job.start + rows
    wanted = int(end == job.length and job.count > 0)
    tokens = job.rows(job.start, end)
    return Segment(job.session, _NOBODY, NO_EPOCH, 0, job.start, job.kind, tokens, wanted, job.ask.sampling)


def _common(held: Sequence[int], tokens: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    most, same = min(len(held), len(tokens)), 0
    while same < most:
        end = min(same + _COMPARE, most)
        if tuple(held[same:end]) != tokens[same:end]:
            break
        same = end
    while same < most and held[same] == tokens[same]:
        same += 1
    return same
