"""A draft model: a small model of the target's tokenizer that proposes tokens; the shell over its engine.

It draws with the target's own noise, a function of seed and position, so it agrees as often as it can at any
temperature. What it drafts need not be exact: the target verifies every token (Leviathan et al. 2023).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import anyio
from anyio.abc import TaskStatus

from swarm.coordinator.draft_book import DraftBook, Job
from swarm.coordinator.drafter import Draft
from swarm.coordinator.events import AskDraft
from swarm.engine.base import Engine, Output
from swarm.protocol.errors import CapacityError, DeviceError, SessionError, SwarmError
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Segment

ASK_S = 1.0
"""An ask is answered within this with what there is: a late draft holds the answer up. What the cache lacks of the
prompt is fed on afterwards, for the next ask."""


PATIENT_S = 60.0
"""The same where nobody waits: the model reads a prompt beside the ring, on a device that it may share."""


class DraftModel:
    """Implements `drafter.Drafter` over an engine that holds a whole model. `run` owns the thread; the engine, which
    nobody else may use meanwhile, is its owner's to close."""

    def __init__(self, engine: Engine, ask_s: float = ASK_S) -> None:
        self._engine = engine
        self._ask_s = ask_s
        self._book = DraftBook()
        self._done: dict[Job, anyio.Event] = {}
        self._closing: set[SessionId] = set()
        self._woken = anyio.Event()
        self._running: asyncio.Future[list[Output]] | None = None
        self.available = False
        self.broken = ""
        """Why the device drafts no more."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Draft until cancelled, or until the device fails; waits for the step that runs, which is short."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="draft")
        try:
            self.available = True
            task_status.started()
            while True:
                await self._woken.wait()
                self._woken = anyio.Event()
                self._free_closed()
                while self._book:
                    await self._step(executor)
        except SwarmError as error:
            self.broken = str(error)
        finally:
            self.available = False
            for job in list(self._done):
                self._finish(job)
            if self._running is not None:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([self._running])
            executor.shutdown(wait=False)

    async def draft(self, session: SessionId, ask: AskDraft) -> Draft:
        """See `drafter.Drafter`."""
        if not self.available or not ask.tokens or ask.count < 1:
            return Draft()
        job, older = self._book.put(session, ask)
        if older is not None:
            self._finish(older)
        done = self._done[job] = anyio.Event()
        self._woken.set()
        try:
            with anyio.move_on_after(PATIENT_S if ask.patient else self._ask_s) as waiting:
                await done.wait()
            if waiting.cancelled_caught:
                job.count = 0
        except BaseException:
            self._book.drop(job)
            raise
        finally:
            self._done.pop(job, None)
        return Draft(tuple(job.drafted), tuple(job.sources))

    def close_session(self, session: SessionId) -> None:
        """See `drafter.Drafter`."""
        if self.available:
            self._closing.add(session)
            self._woken.set()

    async def _step(self, executor: ThreadPoolExecutor) -> None:
        """One forward of everything that is asked for."""
        self._free_closed()
        self._free(self._book.surplus())
        batch = [segment for segment in self._book.step(self._engine.max_rows) if self._takes(segment)]
        if not batch:
            return
        try:
            outputs = await self._forward(executor, batch)
        except CapacityError:
            # Nothing was run. What is only kept goes first, then the ask that came last.
            self._free(self._book.unused()[:1] or [batch[-1].session])
            return
        for job in self._book.ran(batch, outputs):
            self._finish(job)

    async def _forward(self, executor: ThreadPoolExecutor, batch: Sequence[Segment]) -> list[Output]:
        self._running = asyncio.get_running_loop().run_in_executor(executor, self._engine.run, batch)
        try:
            return await asyncio.shield(self._running)
        except SwarmError:
            raise
        except Exception as error:  # a fault of ours in what is optional: it ends the drafting, not the node
            raise DeviceError("the draft model failed", found=f"{type(error).__name__}: {error}") from error

    def _takes(self, segment: Segment) -> bool:
        """Whether the engine can ever run it; otherwise its session is given up."""
        try:
            self._engine.check(segment)
        except (CapacityError, SessionError):
            self._free([segment.session])
            return False
        return True

    def _free_closed(self) -> None:
        closing, self._closing = self._closing, set()
        self._free(closing)

    def _free(self, sessions: Iterable[SessionId]) -> None:
        """Forget sessions while no forward runs. A job of theirs ends with what it has."""
        for session in sessions:
            job = self._book.close(session)
            if job is not None:
                self._finish(job)
            self._engine.close_session(session)

    def _finish(self, job: Job) -> None:
        done = self._done.pop(job, None)
        if done is not None:
            done.set()
