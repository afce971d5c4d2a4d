"""Where a node gets the draft model from: its store, its peers, and only then from outside; quietly, after the ring.

Every node that may draft says in its member record what it would draft with. Who has it hands it out like a model;
where nobody has it, one node gets it from outside (`choice.choose_draft`). A node that is short of memory, and a draft
whose tokenizer is not the target's, token for token, mean: no draft model here.
"""

from __future__ import annotations

from typing import Protocol

import anyio
import anyio.to_thread

from swarm.model.drafts import draft_for, same_tokenizer
from swarm.model.manifest import Manifest
from swarm.model.store import Store
from swarm.protocol.config import DRAFT_AUTO, DRAFT_NONE
from swarm.protocol.errors import ModelError, SwarmError
from swarm.protocol.ids import BlobId, NodeId
from swarm.protocol.messages import DraftOffer, Member, Phase
from swarm.protocol.plan import Plan
from swarm.ring.blob_client import BlobSource
from swarm.ring.choice import DraftChoice, choose_draft
from swarm.ring.config import RingConfig
from swarm.ring.fit import draft_memory
from swarm.ring.library import Library
from swarm.ring.stage import Report, StageHost
from swarm.ring.supply import Model, acquire_model, load_model, recall, recall_whole, shape_of

CALM_S = 5.0
"""The ring has served for this long before anything is done for the draft: first answers come first, and the peers
have said what they have."""

RETRY_S = 600.0
"""After a draft could not be had."""


class DraftOwner(Protocol):
    """What is needed of the node; called from the event loop."""

    @property
    def node(self) -> NodeId: ...

    @property
    def plan(self) -> Plan:
        """The plan in force."""

    def settled(self) -> bool:
        """The ring serves, and no other is being prepared."""

    def sources(self) -> list[BlobSource]:
        """Where blobs can be fetched now."""

    def offer_draft(self, offer: DraftOffer | None) -> None:
        """Publish it in our member record."""

    def draft_ready(self, draft: Model | None) -> None:
        """This is whole in the store and fits; None: none any more."""

    def notice(self, text: str) -> None: ...


class DraftSupply:
    """`run` owns the work; `stir` tells it that something it depends on may have changed."""

    def __init__(
        self, config: RingConfig, store: Store, stage: StageHost, library: Library, report: Report, owner: DraftOwner
    ) -> None:
        self._wanted = config.draft
        self._named = self._wanted not in (DRAFT_AUTO, DRAFT_NONE)
        self._memory_bytes = config.memory_bytes
        self._store = Store(store.root, store.limit_bytes)  # its pin is beside the one of the model
        self._stage = stage
        self._library = library
        self._members: tuple[Member, ...] = ()
        self._report = report
        self._owner = owner
        self._offer: DraftOffer | None = None
        self._draft: Model | None = None
        self._served: tuple[str, BlobId] | None = None
        """What the draft at hand is for: its source and the target."""
        self._refused: set[tuple[str, BlobId]] = set()
        """(source, target) that will never go together."""
        self._takes: dict[tuple[str, BlobId], int] = {}
        """Those that do, and the memory the draft takes."""
        self._retry_at = float("-inf")
        self._stirred = anyio.Event()
        self._work = anyio.CancelScope()
        self.note = ""
        """Why there is no draft model; empty where there is one, or it is on its way."""

    def stir(self) -> None:
        """Look again. Work for the draft stops at once where the ring has no use for it, or something better to do."""
        if self._target() is None:
            self._work.cancel()
        self._stirred.set()

    def members_changed(self, members: tuple[Member, ...]) -> None:
        self._members = members
        self.stir()

    async def run(self) -> None:
        """Until cancelled."""
        if self._wanted == DRAFT_NONE:
            self.note = "off"
            return
        while True:
            with anyio.move_on_after(RETRY_S):
                await self._stirred.wait()
            self._stirred = anyio.Event()
            with anyio.CancelScope() as self._work:
                try:
                    await self._look()
                except SwarmError as error:
                    self._fail(error)

    async def _look(self) -> None:
        target = self._target()
        if target is None:
            return
        choice = self._choose(target)
        wanted = (choice.source, target.id)
        if self._draft is not None and (wanted != self._served or not self._fits(self._draft)):
            self._drop()
        if self._draft is not None or wanted in self._refused or anyio.current_time() < self._retry_at:
            return
        if self._stage_bytes() + self._takes.get(wanted, 0) > self._memory_bytes:
            return
        if not choice.source:
            self.note = f"no draft model is known for {target.manifest.name}"
            self._publish(None)
            return
        if self._offer is None or self._offer.source != choice.source:
            self._publish(await self._would_take(choice.source))
        await anyio.sleep(CALM_S)
        choice = self._choose(target)
        if wanted != (choice.source, target.id):
            return
        try:
            draft = await self._obtain(choice)
            if draft is not None:
                await self._take(draft, target, choice.source)
        finally:
            self._report(Phase.IDLE, "", 0, 0, 0.0)

    def _target(self) -> Model | None:
        """What drafts would be for."""
        return self._library.known(self._owner.plan.model) if self._owner.settled() else None

    def _choose(self, target: Model) -> DraftChoice:
        pair = draft_for(target.manifest.name)
        table = pair.draft if pair is not None else ""
        return choose_draft(self._members, table if self._wanted == DRAFT_AUTO else self._wanted)

    async def _would_take(self, source: str) -> DraftOffer:
        """What we would draft with, and its memory where an earlier start left it here."""

        def known() -> int:
            found = recall(source, self._store)
            return draft_memory(shape_of(found, Manifest.decode(self._store.read(found)))) if found else 0

        return DraftOffer(source, self._named, memory_bytes=await anyio.to_thread.run_sync(known))

    async def _obtain(self, choice: DraftChoice) -> Model | None:
        """The draft, its weights aside where a peer has them; None while another node gets it."""
        found = await anyio.to_thread.run_sync(recall_whole, choice.source, self._store)
        if found is None and choice.manifest is not None:
            await self._stage.manifest(choice.manifest, choice.manifest_bytes, self._owner.sources())
            found = choice.manifest
        elif found is None and choice.acquirer == self._owner.node:
            found = await acquire_model(choice.source, self._store, self._report)
        return None if found is None else await anyio.to_thread.run_sync(load_model, self._store, found)

    async def _take(self, draft: Model, target: Model, source: str) -> None:
        manifest = draft.manifest
        if (source, target.id) not in self._takes:
            await self._compare(draft, target, source)
        fits = self._fits(draft)
        if fits:
            weights = manifest.weights(0, len(manifest.layers))
            await self._stage.fetch(weights, self._owner.sources(), f"draft {manifest.name}")
        if await anyio.to_thread.run_sync(_is_whole, self._store, manifest):
            # Handed out even where there is no memory to run it.
            self._publish(DraftOffer(source, self._named, draft.id, draft.bytes, draft_memory(draft.shape)))
        if not fits:
            needed, free = draft_memory(draft.shape), max(0, self._memory_bytes - self._stage_bytes())
            self._say(f"no memory for {manifest.name}, {_mb(needed)} needed and {_mb(free)} free")
            return
        pins = {blob.id for blob in manifest.blobs()}
        await anyio.to_thread.run_sync(self._store.pin, "draft", [draft.id], pins)
        self._draft, self._served, self.note = draft, (source, target.id), ""
        self._owner.draft_ready(draft)

    async def _compare(self, draft: Model, target: Model, source: str) -> None:
        """Raise `ModelError` where the two have not the same tokenizer."""
        difference = await anyio.to_thread.run_sync(same_tokenizer, target.tokenizer, draft.tokenizer)
        if difference is not None:
            self._refused.add((source, target.id))
            raise ModelError(
                f"{draft.manifest.name} cannot draft for {target.manifest.name}",
                expected="the same tokenizer",
                found=difference,
                action="Name another with --draft.",
            )
        self._takes[source, target.id] = draft_memory(draft.shape)

    def _fits(self, draft: Model) -> bool:
        return self._stage_bytes() + draft_memory(draft.shape) <= self._memory_bytes

    def _stage_bytes(self) -> int:
        stage = self._owner.plan.stage_of(self._owner.node)
        return stage.bytes if stage is not None else 0

    def _drop(self) -> None:
        self._draft, self._served = None, None
        self._owner.draft_ready(None)

    def _publish(self, offer: DraftOffer | None) -> None:
        if offer != self._offer:
            self._offer = offer
            self._owner.offer_draft(offer)

    def _fail(self, error: SwarmError) -> None:
        """Somebody else may have more luck; the ring goes on without."""
        self._retry_at = anyio.current_time() + RETRY_S
        self._publish(None)
        self._say(f"no draft model: {error}")

    def _say(self, note: str) -> None:
        if note != self.note:
            self.note = note
            self._owner.notice(f"Drafting goes on without a model: {note}")


def _is_whole(store: Store, manifest: Manifest) -> bool:
    return all(store.has(blob.id) for blob in manifest.blobs())


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
