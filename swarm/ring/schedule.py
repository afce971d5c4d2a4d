"""Which of the segments that wait at a stage run in its next forward, and when that begins. Pure.

**The cost model.** A forward takes a base and a little for each row: half of a 1.5B model on one core takes ``31 ms +
4.4 ms · rows`` (measured; one row is padded to two). U sessions that decode on N stages in G groups get a round of
``max(G · step(U/G), N · step(U/G) + transit)``. One group leaves all stages but one idle, and more groups than stages
pay the base again and again. So there is one group for each stage: the first stage takes an N-th of the decode rows
that are under way, and the others take what arrives. Where stages differ in size, rows gather before the slowest, which
takes them together: that costs it least.

**Groups stay together.** A group's rows come back one by one, within a few milliseconds. The first stage does not begin
with the first of them and pay the base for it alone: it waits for the rest, a fraction of a step at most. Nor does it
send one group more than there are stages while one of them is due (a limit on work in process: CONWIP, Spearman et al.
1990): left alone, that group would stay, and every step would be smaller than it could be. What did not come in time is
not waited for again. The other stages are told how many segments follow.

**Prefill goes into the rest.** `RowBudget` says how many rows of prefill may join; a segment that is larger is divided.
Later stages run the pieces as they come: one that was left behind would take a step alone, in the way of a group.
Coordinators take turns by what was run for each, and so do the sessions of one (virtual token counters, Sheng et al.
2024, "Fairness in Serving Large Language Models"). Decode and verify rows go in the order of their arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from swarm.protocol.ids import NodeId, SessionId
from swarm.protocol.messages import RowKind, Segment

LINGER = 0.25
"""Of a decode step, the longest wait for the rest of a group. The base, which it saves, is more than half of a step."""

DUE = 1.0
"""Of a decode step, the longest wait for a group that is due: by then the stage before us has ended its own step."""

STRETCH = 1.5
"""A step that also prefills, over one that only decodes: what a long prompt may cost those who are reading."""

EASY_MS = 20.0
"""Below this nobody sees a step's length, so prefill may always fill a step up to it."""

ALONE_MS = 500.0
"""A step of prefill alone while nobody decodes: what a question that comes meanwhile waits at most."""

LOST = 2.0
"""Of a decode step, for each stage: a group that is away for longer ended its answers, or is far, and is not due."""

MIN_PREFILL_ROWS = 4
"""Of a forward where prefill waits, whatever the times: a prompt always moves on. Deep in a long prompt it is all that
`STRETCH` allows: a row at 2,000 positions takes nearly twice what it takes at 100."""

MAX_PREFILL_ROWS = 256
"""Of prefill in one forward: more rows add working memory and hardly any speed."""

LEAST_ROWS = 2
"""Of a piece of prefill: one row alone goes through other kernels, whose last bits differ (see `engine.paged`)."""

_PROBE = 32
"""After so many steps with prefill one goes without, so that the price of decoding is known as sessions come and go."""

_WEIGHT = 0.2
"""Of the newest in a moving average."""


class RowBudget:
    """How many rows of prefill may join a step, from measured step times of decode and of prefill rows."""

    def __init__(self) -> None:
        self.decode_ms = 0.0
        """A step that only decodes; 0 before the first."""
        self.row_ms = 0.0
        """What a row of prefill adds; 0 before the first."""
        self._mixed = 0

    def observe(self, decode_rows: int, prefill_rows: int, took_ms: float) -> None:
        """A forward of so many rows took so long."""
        if not prefill_rows:
            self.decode_ms = _average(self.decode_ms, took_ms)
            self._mixed = 0
            return
        own_ms = took_ms - (min(self.decode_ms, took_ms) if decode_rows else 0.0)
        self.row_ms = _average(self.row_ms, max(own_ms / prefill_rows, 1e-3))
        self._mixed += bool(decode_rows)

    @property
    def probing(self) -> bool:
        """The next step with decode rows should do without prefill."""
        return self._mixed >= _PROBE

    def prefill_rows(self, *, decoding: bool) -> int:
        """Rows of prefill for the next forward, while others decode or not."""
        room_ms = max(STRETCH * self.decode_ms, EASY_MS) - self.decode_ms if decoding else ALONE_MS
        rows = int(room_ms / self.row_ms) if self.row_ms else MIN_PREFILL_ROWS if decoding else MAX_PREFILL_ROWS
        return max(MIN_PREFILL_ROWS, min(rows, MAX_PREFILL_ROWS))


@dataclass(slots=True)
class _Group:
    """The decode rows of one forward, perhaps none, and who of them has not come back."""

    out: dict[SessionId, int] = field(default_factory=dict)
    back: bool = False
    """Some have."""
    ended: float = float("inf")
    """When the forward here did."""


class StepScheduler:
    """Segments in, batches out. Segments of one session stay in order, and a batch has at most one of each session."""

    def __init__(self, stages: int, *, first: bool) -> None:
        """`first`: this is the first of `stages` and divides the decode rows among them."""
        self.budget = RowBudget()
        self._stages = stages
        self._first = first
        self._waiting: dict[SessionId, deque[Segment]] = {}
        """By arrival of the first of each session that waits."""
        self._count = 0
        self._attempts: dict[SessionId, int] = {}
        self._served: dict[NodeId | SessionId, int] = {}
        """Rows of prefill run for those of whom prefill waits."""
        self._groups: deque[_Group] = deque(maxlen=stages + 1)
        self._following = 0
        """Segments that are about to arrive, sent together with the newest."""
        self._running = False
        self._ready_at: float | None = None
        """Since when a forward could run: something waits and the stage is free."""
        self._decoded_at = float("-inf")
        self._step_ms = 0.0
        """A step with decode rows, others in it or not."""

    def __len__(self) -> int:
        return self._count

    @property
    def sessions(self) -> set[SessionId]:
        """Those of which something waits."""
        return set(self._waiting)

    def push(self, segment: Segment, now: float) -> None:
        """Queue `segment`; a newer attempt drops what waits of older ones, an older one is dropped itself."""
        session = segment.session
        newest = self._attempts.get(session, -1)
        if segment.attempt < newest:
            return
        if segment.attempt > newest:
            self.forget(session)
            self._attempts[session] = segment.attempt
        self._came_back(session)
        self._following = segment.following
        self._waiting.setdefault(session, deque()).append(segment)
        self._count += 1
        if not self._running and self._ready_at is None:
            self._ready_at = now

    def forget(self, session: SessionId) -> None:
        """Drop what waits of `session`, and wait for it no more."""
        self._attempts.pop(session, None)
        self._count -= len(self._waiting.pop(session, ()))
        if not self._count:
            self._ready_at = None
        for group in self._groups:
            group.out.pop(session, None)

    def due(self) -> float | None:
        """When the next forward should begin; None while nothing waits. In the past: now."""
        if not self._count or self._ready_at is None:
            return None
        step_s = self._step_ms / 1000
        if not self._first:
            return self._ready_at + (LINGER * step_s if self._following else 0.0)
        if self._waiting_decode_rows() >= self._share():
            return self._ready_at
        waits = [self._ready_at]
        for newer, group in enumerate(reversed(self._groups)):
            if not group.out.keys() - self._waiting.keys():
                continue
            if group.back:
                waits.append(self._ready_at + LINGER * step_s)
            elif newer >= self._stages - 1:
                waits.append(min(self._ready_at + DUE * step_s, group.ended + LOST * self._stages * step_s))
        return max(waits)

    def take(self, max_rows: int, now: float) -> list[Segment]:
        """The next batch, which runs from now on; empty only where nothing waits."""
        if not self._count:
            return []
        self._give_up()
        prompts = self._heads(RowKind.PREFILL)
        batch = list(self._decode_rows(max_rows))
        self._groups.append(_Group({segment.session: len(segment.tokens) for segment in batch}))
        decode_rows = sum(self._groups[-1].out.values())
        batch += self._prefill_rows(prompts, max_rows - decode_rows, now, beside=bool(batch))
        self._running, self._ready_at = True, None
        return batch

    def ran(self, batch: Sequence[Segment], took_ms: float, now: float) -> None:
        """What `take` gave has run; `batch` without what was refused."""
        decode = sum(len(segment.tokens) for segment in batch if segment.kind is RowKind.DECODE)
        prefill = sum(len(segment.tokens) for segment in batch) - decode
        if batch:
            self.budget.observe(decode, prefill, took_ms)
        if decode:
            self._decoded_at = now
            self._step_ms = _average(self._step_ms, took_ms)
        if self._groups:
            self._groups[-1].ended = now
        self._running = False
        self._ready_at = now if self._count else None

    def validate_state(self) -> None:
        """Assert the invariants; for tests and debugging."""
        assert self._count == sum(len(queue) for queue in self._waiting.values())
        assert all(self._waiting.values()), "a session of which nothing waits"
        assert all(s.attempt == self._attempts[name] for name, queue in self._waiting.items() for s in queue)
        assert not (self._running and self._ready_at is not None)
        assert self._running or bool(self._count) == (self._ready_at is not None)
        assert len(self._groups) <= self._stages + 1

    # --- decode rows ------------------------------------------------------------------------------------------------

    def _heads(self, kind: RowKind) -> list[Segment]:
        return [queue[0] for queue in self._waiting.values() if queue[0].kind is kind]

    def _waiting_decode_rows(self) -> int:
        return sum(len(s.tokens) for queue in self._waiting.values() for s in queue if s.kind is RowKind.DECODE)

    def _share(self) -> int:
        """An N-th of all decode rows, those that wait here and those that are away."""
        away = sum(sum(group.out.values()) for group in self._groups)
        return -(-(self._waiting_decode_rows() + away) // self._stages)

    def _decode_rows(self, max_rows: int) -> Iterator[Segment]:
        share, rows = self._share() if self._first else max_rows, 0
        for segment in self._heads(RowKind.DECODE):
            more = rows + len(segment.tokens)
            if rows and (more > max_rows or more - share > share - rows):  # further from the share than without it
                return
            rows = more
            yield self._pop(segment.session)

    def _pop(self, session: SessionId) -> Segment:
        """Take the first that waits of `session`; what is behind it queues anew."""
        queue = self._waiting.pop(session)
        self._count -= 1
        segment = queue.popleft()
        if queue:
            self._waiting[session] = queue
        return segment

    # --- groups -----------------------------------------------------------------------------------------------------

    def _ended(self) -> list[_Group]:
        """Groups whose forward here has ended; the newest may be running."""
        groups = list(self._groups)
        return groups[:-1] if self._running else groups

    def _came_back(self, session: SessionId) -> None:
        """The oldest row of `session` that is away has been round.

        A segment that arrives while the one before it still runs here proves nothing: it has windows in flight.
        """
        for group in self._ended():
            if group.out.pop(session, 0):
                group.back = True
                return

    def _give_up(self) -> None:
        """A batch begins: who did not come for it with the others of the group is not waited for again."""
        for group in self._groups:
            if group.back:
                group.out.clear()
        self._following = 0

    # --- prefill ----------------------------------------------------------------------------------------------------

    def _prefill_rows(self, heads: list[Segment], max_rows: int, now: float, *, beside: bool) -> list[Segment]:
        """Of `heads`, as much as the budget allows; `beside` decode rows or alone."""
        self._admit(heads)
        if self._first and beside and self.budget.probing:
            return []
        recent_s = LOST * self._stages * self._step_ms / 1000
        decoding = beside or now - self._decoded_at <= recent_s
        room = min(self.budget.prefill_rows(decoding=decoding) if self._first else MAX_PREFILL_ROWS, max_rows)
        taken: list[Segment] = []
        for segment in sorted(heads, key=self._turn):
            whole = len(segment.tokens)
            fits = whole <= room
            rows = _piece(whole, room, segment.wanted) if self._first or whole > max_rows else fits * whole
            if not rows and not taken and whole <= max_rows:
                rows = whole  # it cannot be divided, and nobody is passed over for ever
            if rows:
                room -= rows
                taken.append(self._divide(segment, rows))
        return taken

    def _turn(self, segment: Segment) -> tuple[int, int, int]:
        return self._served[segment.coordinator], self._served[segment.session], len(segment.tokens)

    def _admit(self, heads: Sequence[Segment]) -> None:
        """Who comes anew begins with the count of who was served least; who has nothing left is forgotten."""
        served = {}
        for names in ([s.coordinator for s in heads], [s.session for s in heads]):
            least = min((self._served[name] for name in names if name in self._served), default=0)
            served.update({name: self._served.get(name, least) for name in names})
        self._served = served

    def _divide(self, segment: Segment, rows: int) -> Segment:
        """The first `rows` of the session's first segment; the rest stays in its place."""
        self._served[segment.coordinator] += rows
        self._served[segment.session] += rows
        if rows == len(segment.tokens):
            return self._pop(segment.session)
        first, rest = divide(segment, rows)
        self._waiting[segment.session][0] = rest
        return first


def divide(segment: Segment, rows: int) -> tuple[Segment, Segment]:
    """The first `rows` and the others; the wanted ones are the last of the whole, and must be in the second part.

    The second part is never the first segment of its attempt: stages run it directly behind the first part only.
    """
    hidden = segment.hidden
    first = replace(segment, tokens=segment.tokens[:rows], wanted=0, hidden=None if hidden is None else hidden[:rows])
    rest = replace(
        segment,
        start=segment.start + rows,
        tokens=segment.tokens[rows:],
        hidden=None if hidden is None else hidden[rows:],
        number=max(1, segment.number),
    )
    return first, rest


def _piece(rows: int, room: int, wanted: int) -> int:
    """How many of `rows` to run now: in `room`, no piece a single row, the wanted ones all in the last; 0: not now."""
    if rows <= room:
        return rows
    piece = min(room, rows - max(LEAST_ROWS, wanted))
    return piece if piece >= LEAST_ROWS else 0


def _average(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
