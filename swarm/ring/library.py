"""The models a node knows, and the ways it comes to know one: left from an earlier start, from peers, from outside."""

from __future__ import annotations

from typing import Protocol

import anyio
import anyio.to_thread

from swarm.model.sources import pin
from swarm.model.store import Store
from swarm.protocol.errors import StoreError, SwarmError
from swarm.protocol.ids import BlobId
from swarm.protocol.messages import Phase
from swarm.protocol.plan import Plan
from swarm.ring.blob_client import BlobSource
from swarm.ring.gathering import Gatherer
from swarm.ring.stage import Report, StageHost
from swarm.ring.supply import (
    Model,
    acquire_model,
    acquire_source,
    load_model,
    model_source,
    peers_source,
    recall,
    stored,
)

TURN_S = 2.0
"""Between the moments at which nodes that miss the same layers look whether another is getting them: some round trips,
in which the progress of the first reaches the others."""


class LibraryOwner(Protocol):
    """What a library needs of its node; called from the event loop."""

    @property
    def plan(self) -> Plan:
        """The plan in force."""

    def model_known(self, model: Model) -> None:
        """A model's manifest and tokenizer are here."""

    def acquiring(self, name: str) -> None:
        """A model is being acquired from outside."""

    def acquire_failed(self, reason: str) -> None:
        """It is not any more: another node may try."""

    def notice(self, text: str) -> None: ...

    def outside(self) -> str:
        """The name of another node that is getting a model from outside now; empty: none is."""

    def manifest_bytes(self, manifest: BlobId) -> int:
        """The size of a manifest that a member hands out; 0 where nobody does."""

    def sources(self) -> list[BlobSource]:
        """Where blobs can be fetched now."""


class Library:
    def __init__(self, store: Store, stage: StageHost, gatherer: Gatherer, report: Report, owner: LibraryOwner) -> None:
        self._store = store
        self._stage = stage
        self._gatherer = gatherer
        self._report = report
        self._owner = owner
        self._models: dict[BlobId, Model] = {}
        self._learning: set[BlobId] = set()

    def known(self, manifest: BlobId | None) -> Model | None:
        return self._models.get(manifest) if manifest is not None else None

    async def recall(self, wanted: str) -> None:
        """Know at once what an earlier start left here: a swarm that was switched off needs nothing from outside."""
        try:
            found = await anyio.to_thread.run_sync(recall, wanted, self._store)
            if found is not None and not self._models:
                await self._read(found)
        except SwarmError as error:
            self._owner.notice(str(error))

    async def acquire(self, wanted: str, named_here: bool) -> None:
        """Get the swarm's model from outside, for everybody; a checkpoint with everybody's help."""
        try:
            source = await anyio.to_thread.run_sync(model_source if named_here else peers_source, wanted)
            self._owner.acquiring(source.name)
            found = await anyio.to_thread.run_sync(stored, self._store, source)
            if found is None:
                source = await anyio.to_thread.run_sync(pin, source, abandon_on_cancel=True)
                if source.is_checkpoint:
                    found = await self._gatherer.gather(source)
                else:
                    found = await acquire_source(source, self._store, self._report)
            await self._read(found)
        except SwarmError as error:
            self._owner.acquire_failed(str(error))
        finally:
            self._report(Phase.IDLE, "", 0, 0, 0.0)

    async def learn(self, manifest: BlobId) -> None:
        """Get the manifest, graph and tokenizer of a model that a peer has."""
        if manifest in self._learning or manifest in self._models:
            return
        self._learning.add(manifest)
        try:
            await self._model(manifest)
        except SwarmError as error:
            self._owner.notice(str(error))
        finally:
            self._learning.discard(manifest)
            self._report(Phase.IDLE, "", 0, 0, 0.0)

    async def prepare(self, plan: Plan) -> None:
        """Everything our stage of `plan` needs. Where no peer has a blob, the model's own source is asked once more,
        by one node at a time: what it gets the others may have from it.

        Raises `SwarmError` where the stage cannot be made ready.
        """
        assert plan.model is not None
        try:
            model = await self._model(plan.model)
            try:
                await self._stage.prepare(plan, model.manifest, self._owner.sources())
            except StoreError as error:
                await self._prepare_from_outside(plan, model, error)
            await anyio.to_thread.run_sync(self._store.pin, "gathering")  # the stage has its own
        finally:
            self._report(Phase.IDLE, "", 0, 0, 0.0)

    async def _model(self, manifest: BlobId) -> Model:
        """The model of a manifest, from peers where it is not here. Raises `StoreError`, `ModelError`."""
        known = self._models.get(manifest)
        if known is not None:
            return known
        await self._stage.manifest(manifest, self._owner.manifest_bytes(manifest), self._owner.sources())
        return await self._read(manifest)

    async def _prepare_from_outside(self, plan: Plan, model: Model, error: StoreError) -> None:
        """A PC left and took layers with it. Of several nodes that miss some the one with the lowest id begins."""
        rank = sorted(stage.node for stage in plan.stages).index(self._stage.node)
        while True:
            await anyio.sleep(rank * TURN_S)
            busy = self._owner.outside()
            if not busy:
                break
            while busy:
                self._report(Phase.FETCH, f"waits for {busy}, which gets it from outside", 0, 0, 0.0)
                await anyio.sleep(TURN_S)
                busy = self._owner.outside()
            try:
                await self._stage.prepare(plan, model.manifest, self._owner.sources())
                return
            except StoreError as still:
                error = still
        await self._acquire_again(plan, model, error)
        await self._stage.prepare(plan, model.manifest, self._owner.sources())

    async def _acquire_again(self, plan: Plan, model: Model, error: StoreError) -> None:
        """Raises `error` where the source cannot give the same model here."""
        stage = plan.stage_of(self._stage.node)
        assert stage is not None
        try:
            if await self._gatherer.mend(model.manifest, stage.start, stage.end):
                return
            found = await acquire_model(model.manifest.source, self._store, self._report)
        except SwarmError:
            raise error from None
        if found != model.id:
            if not self._owner.plan.stages:  # nobody runs the old one, so the new one it will be
                await self._read(found)
            raise error

    async def _read(self, manifest: BlobId) -> Model:
        model = await anyio.to_thread.run_sync(load_model, self._store, manifest)
        self._models[model.id] = model
        self._owner.model_known(model)
        return model
