"""A node's stage: fetch its blobs, compile its shard, warm it up, cut over to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import anyio
import numpy as np
from anyio.abc import TaskGroup

from swarm.engine.base import Engine
from swarm.engine.kinds import make_engine
from swarm.engine.pages import drop_mapped_pages, use_huge_pages
from swarm.model.exporting import forget_parts
from swarm.model.inventory import make_room
from swarm.model.manifest import BlobRef, Manifest
from swarm.model.shard import load_shard
from swarm.model.store import Store
from swarm.protocol import limits
from swarm.protocol.errors import ModelError, StoreError
from swarm.protocol.ids import NO_EPOCH, BlobId, NodeId, SessionId
from swarm.protocol.messages import Phase, RowKind, Segment
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.sampling import GREEDY
from swarm.ring.blob_client import BlobSource
from swarm.ring.outbox import Send
from swarm.ring.transfer import FetchSummary, TransferProgress
from swarm.ring.worker import StageWorker

Report: TypeAlias = Callable[[Phase, str, int, int, float], None]
"""(phase, what, done, total, rate): progress for every screen."""

WARM_UP_ROWS = 8


class Fetcher(Protocol):
    """What a stage needs of `transfer.BlobFetcher`."""

    async def fetch_all(
        self,
        wanted: Sequence[tuple[BlobId, int]],
        sources: Sequence[BlobSource],
        on_progress: Callable[[TransferProgress], None],
    ) -> FetchSummary: ...


EngineFactory: TypeAlias = Callable[[Manifest, Store, Stage, Plan], Engine]
"""Builds the engine of a stage; blocking."""


def build_engine(manifest: Manifest, store: Store, stage: Stage, plan: Plan) -> Engine:
    """Cut the shard out of the stored model and compile it for the plan's engine."""
    assert plan.model is not None
    shard = load_shard(manifest, store, stage.start, stage.end)
    cache = store.compiled(plan.model)
    return make_engine(plan.engine, shard, stage.device, plan.kv_tokens, manifest.vocabulary, cache=cache)


@dataclass(slots=True)
class _Held:
    """An engine and what it was built for."""

    engine: Engine
    model: BlobId
    start: int
    end: int
    kv_tokens: int
    kind: str
    blobs: frozenset[BlobId]
    """Of the store, that it was built from."""

    def serves(self, plan: Plan, stage: Stage) -> bool:
        built_for = (self.model, self.start, self.end, self.kv_tokens, self.kind)
        return (plan.model, stage.start, stage.end, plan.kv_tokens, plan.engine) == built_for


class StageHost:
    """Holds the engine that serves and, while a new plan is prepared, the one that will."""

    def __init__(
        self,
        node: NodeId,
        store: Store,
        fetcher: Fetcher,
        send: Send,
        memory_bytes: int,
        report: Report,
        build: EngineFactory = build_engine,
    ) -> None:
        self.node = node
        self._store = store
        self._fetcher = fetcher
        self._send = send
        self._memory_bytes = memory_bytes
        self._report = report
        self._build = build
        self._serving: _Held | None = None
        self._prepared: _Held | None = None
        self._stop = anyio.CancelScope()
        self._stopped = anyio.Event()
        self._stopped.set()
        self.worker: StageWorker | None = None
        self.fetched: dict[NodeId, int] = {}
        """Bytes fetched from each peer since the start."""

    async def fetch(
        self, blobs: Sequence[BlobRef], sources: Sequence[BlobSource], what: str, elsewhere: Collection[BlobId] = ()
    ) -> None:
        """Bring `blobs` into the store. Raises `StoreError` where nobody can give one.

        Where room has to be made for them, what is known to be `elsewhere` goes first.
        """

        def progress(now: TransferProgress) -> None:
            self._report(Phase.FETCH, what, now.done, now.total, now.rate)

        await anyio.to_thread.run_sync(self._make_space, blobs, elsewhere)
        summary = await self._fetcher.fetch_all([(blob.id, blob.bytes) for blob in blobs], sources, progress)
        for node, count in summary.by_node.items():
            self.fetched[node] = self.fetched.get(node, 0) + count

    def _make_space(self, blobs: Sequence[BlobRef], elsewhere: Collection[BlobId]) -> None:
        """Keep the store under its limit. Raises `StoreError` where that is not possible."""
        absent = [blob for blob in blobs if not self._store.has(blob.id)]
        missing = sum(max(0, blob.bytes - self._store.begun_bytes(blob.id)) for blob in absent)
        if missing:
            make_room(self._store, missing, {blob.id for blob in blobs}, elsewhere)

    def _held_by_others(self, manifest: Manifest) -> set[BlobId]:
        """Weights that the other stages of the plan in force work with."""
        stages = self.worker.plan.stages if self.worker is not None else ()
        others = [stage for stage in stages if stage.node != self.node]
        return {blob.id for stage in others for blob in manifest.weights(stage.start, stage.end)}

    async def manifest(self, model: BlobId, size: int, sources: Sequence[BlobSource]) -> Manifest:
        """The manifest `model` with its graph and tokenizer, fetched where they are not here.

        Raises `StoreError` where nobody can give them and `ModelError` for a manifest that makes no sense.
        """
        if not await anyio.to_thread.run_sync(self._store.has, model):
            if size > limits.MAX_MANIFEST_BYTES:
                raise ModelError(
                    "a manifest too large", expected=f"at most {limits.MAX_MANIFEST_BYTES} bytes", found=str(size)
                )
            await self.fetch([BlobRef(model, size)], sources, "manifest")
        data = await anyio.to_thread.run_sync(self._store.read, model)
        manifest = Manifest.decode(data)
        needed = [model, manifest.graph.id, manifest.tokenizer.id]
        await anyio.to_thread.run_sync(self._store.pin, "manifest", [], needed)
        await self.fetch([manifest.graph, manifest.tokenizer], sources, manifest.name)
        await anyio.to_thread.run_sync(self._store.mark_manifest, model, manifest.name, manifest.source)
        await anyio.to_thread.run_sync(forget_parts, self._store, manifest, model)
        return manifest

    async def prepare(self, plan: Plan, manifest: Manifest, sources: Sequence[BlobSource]) -> None:
        """Make ready for our stage of `plan`; what serves goes on. A node without a stage is ready at once.

        May be cancelled between its steps. Raises `StoreError`, `ModelError`, `DeviceError`.
        """
        stage = plan.stage_of(self.node)
        if stage is None or plan.model is None:
            return
        if any(held is not None and held.serves(plan, stage) for held in (self._prepared, self._serving)):
            return
        what = f"layers {stage.start} to {stage.end - 1}"
        weights = manifest.weights(stage.start, stage.end)
        blobs = frozenset({manifest.graph.id, manifest.tokenizer.id, *(blob.id for blob in weights)})
        # What serves stays pinned for itself: another model's may be next.
        await anyio.to_thread.run_sync(self._store.pin, "next stage", [plan.model], blobs)
        same = self.worker is not None and self.worker.plan.model == plan.model
        elsewhere = self._held_by_others(manifest) if same else ()
        await self.fetch(weights, sources, what, elsewhere)
        await self._make_room(stage)
        self._report(Phase.COMPILE, what, 0, 0, 0.0)
        engine = await anyio.to_thread.run_sync(self._build, manifest, self._store, stage, plan)
        self._prepared = _Held(engine, plan.model, stage.start, stage.end, plan.kv_tokens, plan.engine, blobs)
        self._report(Phase.WARM_UP, what, 0, 0, 0.0)
        await anyio.to_thread.run_sync(warm_up, engine)
        await anyio.to_thread.run_sync(drop_mapped_pages, self._store.root / "blobs")

    async def _make_room(self, stage: Stage) -> None:
        """Two shards at once may be more than this node advertised; then the one that serves goes first.

        Its sessions wait for the new epoch and are replayed, which is what they would do anyway.
        """
        await self._close(self._prepared)
        self._prepared = None
        serving = self.worker.plan.stage_of(self.node) if self.worker else None
        if serving is not None and serving.bytes + stage.bytes > self._memory_bytes:
            await self.stop_serving()

    async def activate(self, plan: Plan, group: TaskGroup) -> None:
        """Cut over to our stage of `plan`; the worker runs in `group`, and goes on where its ring is the same.

        Raises `ModelError` where it is not prepared.
        """
        stage, ring = plan.stage_of(self.node), plan.ring_of(self.node)
        if self.worker is not None and not self.worker.broken and plan.has_ring(self.worker.plan):
            return
        await self._stop_worker()
        if stage is None or ring is None:
            raise ModelError("a plan without a stage for this node", found=f"epoch {plan.epoch}")
        if self._prepared is not None and self._prepared.serves(plan, stage):
            await self._close(self._serving)
            self._serving, self._prepared = self._prepared, None
            with contextlib.suppress(StoreError):  # the disk is full; for "next stage" the same was said before
                await anyio.to_thread.run_sync(self._store.pin, "stage", [self._serving.model], self._serving.blobs)
        if self._serving is None or not self._serving.serves(plan, stage):
            raise ModelError("a plan came into force that was not prepared here", found=f"epoch {plan.epoch}")
        self.worker = StageWorker(self.node, plan.ring(ring), self._serving.engine, self._send)
        self._stop, self._stopped = anyio.CancelScope(), anyio.Event()
        group.start_soon(self._run_worker, self.worker, self._stop, self._stopped)

    async def _run_worker(self, worker: StageWorker, scope: anyio.CancelScope, stopped: anyio.Event) -> None:
        try:
            with scope:
                await worker.run()
        finally:
            stopped.set()

    async def _stop_worker(self) -> None:
        """Stop serving; returns when no forward runs any more."""
        self._stop.cancel()
        await self._stopped.wait()
        self.worker = None

    async def _close(self, held: _Held | None) -> None:
        if held is not None:
            await anyio.to_thread.run_sync(held.engine.close)

    async def stop_serving(self) -> None:
        """Stop the worker and free its engine; one that is prepared stays."""
        await self._stop_worker()
        serving, self._serving = self._serving, None
        await self._close(serving)

    async def release(self) -> None:
        """Stop serving and free both engines."""
        await self.stop_serving()
        prepared, self._prepared = self._prepared, None
        await self._close(prepared)


def warm_up(engine: Engine) -> None:
    """A prefill and a decode step: kernels are made, weights are packed, memory is touched before the first prompt."""
    session = SessionId("00000000-0-00000000")
    for kind, start, rows in ((RowKind.PREFILL, 0, WARM_UP_ROWS), (RowKind.DECODE, WARM_UP_ROWS, 1)):
        hidden = np.zeros((rows, engine.hidden_size), np.float32) if engine.hidden_size else None
        tokens = tuple(range(rows))
        engine.run([Segment(session, NodeId("0" * 32), NO_EPOCH, 0, start, kind, tokens, 1, GREEDY, hidden)])
    engine.close_session(session)
    use_huge_pages()
