"""Loads the draft model that the ring found, lets it draft, and puts another in its place."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread

from swarm.coordinator.draft_model import DraftModel
from swarm.coordinator.drafter import Drafter
from swarm.engine.base import Engine
from swarm.engine.paged import PagedEngine
from swarm.engine.shortlist import most_needed
from swarm.model.shard import load_shard
from swarm.model.store import Store
from swarm.protocol.errors import SwarmError
from swarm.ring.fit import DRAFT_KV_TOKENS
from swarm.ring.stage import warm_up
from swarm.ring.supply import Model

BuildDraft = Callable[[Model], Engine]
"""Builds the engine of a whole model; blocking, seconds. Raises `SwarmError`."""


def paged_draft(store: Store, device: str) -> BuildDraft:
    """The paged engine with the device's fastest settings. It shares the cores with a stage of the same PC."""

    def build(draft: Model) -> Engine:
        manifest, tokenizer = draft.manifest, draft.tokenizer
        shard = load_shard(manifest, store, 0, len(manifest.layers))
        shortlist = None
        if device == "CPU":  # whether other plugins take a head of no rows has not been tried
            shortlist = most_needed(tokenizer.tokens(), tokenizer.stop_tokens, manifest.vocabulary)
        engine = PagedEngine(shard, device, DRAFT_KV_TOKENS, manifest.vocabulary, shortlist=shortlist, margins=True)
        warm_up(engine)
        return engine

    return build


class DraftHost:
    """`run` owns the draft model; `offer` says which."""

    def __init__(
        self, build: BuildDraft, install: Callable[[Drafter | None], None], notice: Callable[[str], None]
    ) -> None:
        """`install` is told of the drafter to use, and of None while there is none."""
        self._build = build
        self._install = install
        self._notice = notice
        self._offered: Model | None = None
        self._changed = anyio.Event()
        self._serving = anyio.CancelScope()
        self.name = ""
        """Of the model that drafts now; empty where none does."""

    def offer(self, draft: Model | None) -> None:
        """Draft with this from now on; None: with none."""
        self._offered = draft
        self._changed.set()
        self._serving.cancel()

    async def run(self) -> None:
        """Until cancelled; then waits for the step that runs."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            draft = self._offered
            if draft is not None:
                with anyio.CancelScope() as self._serving:
                    await self._serve(draft)

    async def _serve(self, draft: Model) -> None:
        """Draft with `draft` until cancelled, or until its device fails."""
        try:
            engine = await anyio.to_thread.run_sync(self._build, draft)
        except SwarmError as error:
            self._notice(f"Drafting goes on without a model: {draft.manifest.name} cannot be loaded: {error}")
            return
        model = DraftModel(engine)
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(model.run)
                self.name = draft.manifest.name
                self._install(model)
        finally:
            self.name = ""
            self._install(None)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(engine.close)
        self._notice(f"Drafting goes on without a model: {model.broken}")
