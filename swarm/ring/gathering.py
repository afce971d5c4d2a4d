"""How a swarm brings a checkpoint from outside into its stores: each PC its own layers, and each layer once.

One node, the *acquirer*, leads. It makes the outline of the manifest, plans with the sizes in it as the ring will be
planned, and asks every node to export the layers that will be its own (`TakeLayers`). A node that cannot, for it does
not reach the source or lacks the exporter, gets them from the acquirer slice by slice. What members have already, of
an earlier start or of an acquirer that is gone, is asked first and not exported again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread

from swarm.model.exporting import Exporter, held, remember, slices
from swarm.model.manifest import ABSENT, BlobRef, Manifest, join, merge
from swarm.model.sources import Source
from swarm.model.store import Store
from swarm.protocol import limits
from swarm.protocol.errors import LinkClosedError, ModelError, SwarmError, UsageError
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.messages import LayersTaken, Member, Message, Phase, TakeLayers
from swarm.protocol.plan import Stage
from swarm.ring.basis import Basis
from swarm.ring.blob_client import BlobSource
from swarm.ring.plan import make_plan
from swarm.ring.stage import Report, StageHost
from swarm.ring.supply import Meter, open_exporter, pinned_source, shape_of

SILENCE_S = limits.PREPARE_TIMEOUT_S
"""Without progress from a node that was asked for layers, after which it is given up."""

MAX_REASON_CHARS = 200


class GatherOwner(Protocol):
    """What gathering needs of its node; called from the event loop."""

    @property
    def node(self) -> NodeId: ...

    def members(self) -> Sequence[Member]:
        """Those that can be reached now, and ourselves."""

    def sources(self) -> list[BlobSource]: ...

    async def send(self, to: NodeId, message: Message) -> None:
        """Raises `LinkClosedError`."""

    def notice(self, text: str) -> None: ...


@dataclass(slots=True)
class _Errand:
    """A question under way to one node."""

    asked: BlobId
    scope: anyio.CancelScope
    answer: LayersTaken | None = None


@dataclass(slots=True)
class _Gathering:
    """What the acquirer knows of the model that it gathers."""

    exporter: Exporter
    known: Manifest
    own: range
    only_here: set[BlobId] = field(default_factory=set)
    """Exported here for another node, which has not fetched them yet."""

    @property
    def keep(self) -> set[BlobId]:
        """What must not make room for more."""
        mine = self.known.part(self.own.start, self.own.stop) if self.own else []
        return self.only_here | {blob.id for blob in mine}


class Gatherer:
    """Both sides: `gather` and `mend` act for this node, `run` for others, which `received` tells of."""

    def __init__(self, store: Store, stage: StageHost, report: Report, owner: GatherOwner) -> None:
        self._store = store
        self._stage = stage
        self._report = report
        self._owner = owner
        self._exporting = anyio.Lock()
        """One exporter at a time: two would share this PC's memory and its line to the outside."""
        self._errands: dict[NodeId, _Errand] = {}
        self._asked: tuple[NodeId, TakeLayers] | None = None
        """The newest that a member asked of us, and who; `_taking` is what is being done about it."""
        self._taking = anyio.CancelScope()
        self._woken = anyio.Event()

    async def run(self) -> None:
        """Do what members ask, one thing at a time; until cancelled."""
        while True:
            await self._woken.wait()
            self._woken = anyio.Event()
            if self._asked is not None:
                with anyio.CancelScope() as self._taking:
                    await self._take(*self._asked)

    # --- the acquirer -----------------------------------------------------------------------------------------------

    async def gather(self, source: Source) -> BlobId:
        """The id of the manifest of a pinned checkpoint, every layer of it in the store of the node that will run it.

        Raises `ModelError` where the members lack the memory for it, and `SwarmError` where its layers cannot be had.
        """
        exporter = await self._exporter(source)
        async with self._exporting:
            outline = await anyio.to_thread.run_sync(exporter.outline)
        known = await anyio.to_thread.run_sync(held, self._store, outline)
        stages = share_out(known, self._owner.members())
        mine = next((stage.layers for stage in stages if stage.node == self._owner.node), range(0))
        work = _Gathering(exporter, known, mine)
        await _all([partial(self._inquire, work, member.node) for member in self._others()])
        await _all([partial(self._provide, work, stage) for stage in stages])
        return await anyio.to_thread.run_sync(remember, self._store, join([work.known]))

    async def _inquire(self, work: _Gathering, node: NodeId) -> None:
        await self._ask(work, node, 0, 0)  # who does not answer has nothing

    async def _provide(self, work: _Gathering, stage: Stage) -> None:
        """A stage's layers into its node's store: by its own export where it can, by ours otherwise."""
        helps = stage.node != self._owner.node
        for start, end in work.known.unknown(stage.start, stage.end):
            if helps:
                reason = await self._ask(work, stage.node, start, end)
                if not reason:
                    continue
                helps = False
                self._owner.notice(f"{stage.name} does not export its layers, this PC does: {reason}")
            for first, last in slices(work.known, start, end):
                await self._export(work, first, last, stage.node)

    async def _export(self, work: _Gathering, start: int, end: int, node: NodeId) -> None:
        """A slice, here; and then on to its node, while the next one is exported."""
        async with self._exporting:
            await anyio.to_thread.run_sync(_keep, self._store, work.known, work.keep)
            made = await anyio.to_thread.run_sync(work.exporter.export, work.known, start, end)
            work.known = merge([work.known, made])
        blobs = {blob.id for blob in work.known.part(start, end)}
        if node != self._owner.node:
            work.only_here |= blobs
            if not await self._ask(work, node, start, end):
                work.only_here -= blobs

    async def _ask(self, work: _Gathering, node: NodeId, start: int, end: int) -> str:
        """Lets `node` take layers, and learns what it has; why it does not, or nothing."""
        data = work.known.encode()
        asked = await anyio.to_thread.run_sync(self._store.put_bytes, data)
        try:
            answer = await self._errand(node, TakeLayers(asked, len(data), start, end))
            if answer.part is None:
                return answer.reason[:MAX_REASON_CHARS] or "it does not say why"
            part = await self._manifest(answer.part, answer.part_bytes)
            work.known = merge([work.known, part])  # as it is now: others were asked meanwhile
        except SwarmError as error:
            return str(error)
        return ""

    async def _errand(self, node: NodeId, message: TakeLayers) -> LayersTaken:
        """Raises `ModelError` where the node goes, or shows no progress for `SILENCE_S`."""
        with anyio.CancelScope() as scope:
            errand = self._errands[node] = _Errand(message.part, scope)
            scope.deadline = anyio.current_time() + SILENCE_S
            try:
                await self._owner.send(node, message)
                await anyio.sleep_forever()
            finally:
                del self._errands[node]
        if errand.answer is None:
            raise ModelError("no answer from a node that was asked for layers", found="it went away, or fell silent")
        return errand.answer

    def received(self, sender: NodeId, message: TakeLayers | LayersTaken) -> None:
        """A question takes the place of the one before: nobody waits for that any more."""
        if isinstance(message, TakeLayers):
            self._asked = (sender, message)
            self._taking.cancel()
            self._woken.set()
            return
        errand = self._errands.get(sender)
        if errand is not None and errand.asked == message.asked:
            errand.answer = message
            errand.scope.cancel()

    def heard(self, node: NodeId) -> None:
        """It shows progress."""
        if node in self._errands:
            self._errands[node].scope.deadline = anyio.current_time() + SILENCE_S

    def gone(self, node: NodeId) -> None:
        """Its link is down: it will not answer, and nobody waits for what it asked for."""
        if node in self._errands:
            self._errands[node].scope.cancel()
        if self._asked is not None and self._asked[0] == node:
            self._asked = None
            self._taking.cancel()

    # --- a member that is asked -------------------------------------------------------------------------------------

    async def _take(self, sender: NodeId, message: TakeLayers) -> None:
        """Do what `sender` asks, and answer it."""
        try:
            part = await self._bring_asked(message)
            data = part.encode()
            identity = await anyio.to_thread.run_sync(self._store.put_bytes, data)
            answer = LayersTaken(message.part, identity, len(data), "")
        except SwarmError as error:
            answer = LayersTaken(message.part, None, 0, str(error)[:MAX_REASON_CHARS])
        finally:
            self._report(Phase.IDLE, "", 0, 0, 0.0)
        with contextlib.suppress(LinkClosedError):  # the next acquirer asks again
            await self._owner.send(sender, answer)

    async def _bring_asked(self, message: TakeLayers) -> Manifest:
        asked = await self._manifest(message.part, message.part_bytes)
        start, end = message.start, message.end
        if not 0 <= start <= end <= len(asked.layers):
            raise ModelError("no such layers", expected=f"a range within 0:{len(asked.layers)}", found=f"{start}:{end}")
        if start < end:
            await self._bring(asked, start, end)
        return await anyio.to_thread.run_sync(held, self._store, asked)

    async def _bring(self, known: Manifest, start: int, end: int) -> None:
        """The layers ``[start, end)`` into the store: from peers what is known, from the source what is not."""
        here = await anyio.to_thread.run_sync(held, self._store, known)
        known = merge([known, here])
        keep = {blob.id for blob in (*here.part(0, len(here.layers)), *known.part(start, end))}
        await anyio.to_thread.run_sync(_keep, self._store, known, keep)
        blobs = [known.graph, known.tokenizer, *known.part(start, end)]
        await self._stage.fetch([blob for blob in blobs if blob.id != ABSENT], self._sources(), known.name)
        unknown = known.unknown(start, end)
        if unknown:
            exporter = await self._exporter(await anyio.to_thread.run_sync(_source_of_peer, known))
            for first, last in (piece for run in unknown for piece in slices(known, *run)):
                async with self._exporting:
                    known = await anyio.to_thread.run_sync(exporter.export, known, first, last)
                keep |= {blob.id for blob in known.part(first, last)}
                await anyio.to_thread.run_sync(_keep, self._store, known, keep)

    # --- both -------------------------------------------------------------------------------------------------------

    async def mend(self, model: Manifest, start: int, end: int) -> bool:
        """Exports again the layers of ``[start, end)`` that a PC took with it; false where `model` is no checkpoint's.

        Raises `SwarmError` where the source cannot give them.
        """
        source = await anyio.to_thread.run_sync(pinned_source, model)
        if not source.is_checkpoint:
            return False
        lost: set[BlobId] = set()
        for blob in model.weights(start, end):
            try:
                await self._stage.fetch([blob], self._sources(), model.name)
            except SwarmError:
                lost.add(blob.id)
        known = model.without(lost)
        exporter = await self._exporter(source)
        async with self._exporting:
            for run in known.unknown(0, len(known.layers)):
                for first, last in slices(known, *run):
                    made = await anyio.to_thread.run_sync(exporter.export, known, first, last)
                    known = merge([known, made])
        merge([known, model])  # raises where the source gives something else by now
        await anyio.to_thread.run_sync(remember, self._store, model)
        return True

    async def _exporter(self, source: Source) -> Exporter:
        return await anyio.to_thread.run_sync(open_exporter, source, self._store, Meter(self._report).progress)

    async def _manifest(self, blob: BlobId, size: int) -> Manifest:
        """A peer's manifest. Raises `StoreError`, `ModelError`."""
        if not 0 < size <= limits.MAX_MANIFEST_BYTES:
            raise ModelError("bad size of a manifest", expected=f"1 to {limits.MAX_MANIFEST_BYTES}", found=str(size))
        await self._stage.fetch([BlobRef(blob, size)], self._sources(), "manifest")
        return Manifest.decode(await anyio.to_thread.run_sync(self._store.read, blob))

    def _others(self) -> list[Member]:
        return [member for member in self._owner.members() if member.node != self._owner.node]

    def _sources(self) -> list[BlobSource]:
        return self._owner.sources()


def share_out(outline: Manifest, members: Sequence[Member]) -> tuple[Stage, ...]:
    """Who exports which layers: the plan that the ring will have, of several rings the first. Pure.

    Raises `ModelError` where the members cannot hold the model: then nothing is fetched.
    """
    plan = make_plan(shape_of(ABSENT, outline), Basis.of(members, ()).offers, Epoch(0, members[0].node))
    if not plan.stages:
        raise ModelError(
            f"{outline.name} is too large for this swarm",
            expected=f"{outline.total_bytes / 1e9:.1f} GB of weights, and room to compute",
            found=plan.note,
            action="Start more PCs, or give more --memory. Nothing was fetched.",
        )
    return plan.rings[0]


async def _all(tasks: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Runs all together. Raises the first `SwarmError` of one, and ends the others."""
    errors: list[SwarmError] = []

    async def run(task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except SwarmError as error:
            errors.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(run, task)
    if errors:
        raise errors[0]


def _keep(store: Store, known: Manifest, blobs: set[BlobId]) -> None:
    """Remembers what is known, and that of it these blobs must not make room for more."""
    store.pin("gathering", [remember(store, known)], {known.graph.id, known.tokenizer.id, *blobs} - {ABSENT})


def _source_of_peer(known: Manifest) -> Source:
    """The checkpoint that another node named. Raises `UsageError`, `ModelError`."""
    source = pinned_source(known)
    if not source.is_checkpoint:
        raise UsageError("no checkpoint here", expected=f"{known.source} as on the other PC", found=source.kind)
    return source
