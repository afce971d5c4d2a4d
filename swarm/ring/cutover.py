"""What a plan asks of this node, one thing after the other: prepare, drop, cut over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from swarm.protocol.errors import SwarmError
from swarm.protocol.ids import NO_EPOCH, Epoch
from swarm.protocol.plan import NO_PLAN, Plan
from swarm.ring.stage import StageHost

Prepare = Callable[[Plan], Awaitable[None]]
"""Brings everything that a plan's stage needs here and makes the stage ready. Raises `SwarmError`."""


class Cutover:
    """Carries out `forming`'s StartPrepare, CancelPrepare and Activate. Its tasks run in `group`."""

    def __init__(
        self,
        group: TaskGroup,
        stage: StageHost,
        prepare: Prepare,
        on_prepared: Callable[[Epoch, str | None], None],
        on_active: Callable[[Plan], None],
        on_broken: Callable[[Epoch, str], None],
    ) -> None:
        """`on_prepared(epoch, reason)`: reason is None where it worked. `on_active(plan)`: it is in force here.
        `on_broken(epoch, reason)`: it is, but our part of it does not run."""
        self._group = group
        self._stage = stage
        self._prepare = prepare
        self._on_prepared = on_prepared
        self._on_active = on_active
        self._on_broken = on_broken
        self._preparing = NO_EPOCH
        self._scope = anyio.CancelScope()
        self._lock = anyio.Lock()
        self.plan = NO_PLAN
        """In force here."""

    def start_prepare(self, plan: Plan) -> None:
        self._scope.cancel()
        self._preparing, self._scope = plan.epoch, anyio.CancelScope()
        self._group.start_soon(self._run_prepare, plan, self._scope)

    async def _run_prepare(self, plan: Plan, scope: anyio.CancelScope) -> None:
        with scope:
            async with self._lock:
                try:
                    await self._prepare(plan)
                except SwarmError as error:
                    self._on_prepared(plan.epoch, str(error))
                else:
                    self._on_prepared(plan.epoch, None)

    def cancel_prepare(self, epoch: Epoch) -> None:
        """Stop preparing for `epoch`; a step that compiles ends first. What is prepared goes with the next step."""
        if epoch == self._preparing:
            self._scope.cancel()

    def activate(self, plan: Plan, loaded: bool) -> None:
        self._group.start_soon(self._run_activate, plan, loaded)

    async def _run_activate(self, plan: Plan, loaded: bool) -> None:
        if plan.epoch < self.plan.epoch:
            return
        broken = ""
        if plan.stage_of(self._stage.node) is None or not loaded:
            # Nothing to start: this must not wait behind a stage of a newer plan that is being prepared.
            await self._stage.stop_serving()
        else:
            async with self._lock:
                broken = await self._start(plan)
        if plan.epoch < self.plan.epoch:
            return
        self.plan = plan
        self._on_active(plan)
        if broken:
            self._on_broken(plan.epoch, broken)

    async def _start(self, plan: Plan) -> str:
        """Cut over to our stage of `plan`; why it does not run, or nothing. A newer plan may be in force by now."""
        if plan.epoch < self.plan.epoch:
            return ""
        try:
            await self._stage.activate(plan, self._group)
        except SwarmError as error:
            return str(error)
        if plan.epoch < self.plan.epoch:
            await self._stage.stop_serving()
        return ""
