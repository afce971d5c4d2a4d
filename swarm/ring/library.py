"""The models a node knows, and the ways it comes to know one: left from an earlier start, from peers, from outside."""

from __future__ import annotations

from typing import Protocol

import anyio.to_thread

from swarm.model.store import Store
from swarm.protocol.errors import StoreError, SwarmError
from swarm.protocol.ids import BlobId
from swarm.protocol.messages import Phase
from swarm.protocol.plan import Plan
from swarm.ring.blob_client import BlobSource
from swarm.ring.stage import Report, StageHost
from swarm.ring.supply import Model, acquire_model, load_model, model_source, recall


class LibraryOwner(Protocol):
    """What a library needs of its node; called from the event loop."""

    @property
    def plan(self) -> Plan:
        """The plan in force."""

    def model_known(self, model: Model) -> None:
        """A model's manifest and tokenizer are here."""

    def acquiring(self, name: str) -> None:
        """A model is being acquired from outside; empty: it is not any more."""

    def acquire_failed(self, reason: str) -> None: ...

    def notice(self, text: str) -> None: ...

    def manifest_bytes(self, manifest: BlobId) -> int:
        """The size of a manifest that a member hands out; 0 where nobody does."""

    def sources(self) -> list[BlobSource]:
        """Where blobs can be fetched now."""


class Library:
    def __init__(self, store: Store, stage: StageHost, report: Report, owner: LibraryOwner) -> None:
        self._store = store
        self._stage = stage
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

    async def acquire(self, wanted: str) -> None:
        """Get the swarm's model from outside, for everybody."""
        try:
            source = await anyio.to_thread.run_sync(model_source, wanted)
            self._owner.acquiring(source.name)
            await self._read(await acquire_model(wanted, self._store, self._report))
        except SwarmError as error:
            self._owner.acquiring("")
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
        """Everything our stage of `plan` needs. Where no peer has a blob, the model's own source is asked once more.

        Raises `SwarmError` where the stage cannot be made ready.
        """
        assert plan.model is not None
        try:
            model = await self._model(plan.model)
            try:
                await self._stage.prepare(plan, model.manifest, self._owner.sources())
            except StoreError as error:
                await self._acquire_again(model, error)
                await self._stage.prepare(plan, model.manifest, self._owner.sources())
        finally:
            self._report(Phase.IDLE, "", 0, 0, 0.0)

    async def _model(self, manifest: BlobId) -> Model:
        """The model of a manifest, from peers where it is not here. Raises `StoreError`, `ModelError`."""
        known = self._models.get(manifest)
        if known is not None:
            return known
        await self._stage.manifest(manifest, self._owner.manifest_bytes(manifest), self._owner.sources())
        return await self._read(manifest)

    async def _acquire_again(self, model: Model, error: StoreError) -> None:
        """A PC left and took layers with it. Raises `error` where the source cannot give the same model here."""
        try:
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
