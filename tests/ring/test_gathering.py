"""A checkpoint brought in by a whole swarm, over loopback, from a stand-in hub that counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from swarm.model import exporting, sources
from swarm.model.exporting import Exporter
from swarm.model.manifest import ABSENT, BlobRef, Manifest
from swarm.model.publish import publish
from swarm.model.sources import Source
from swarm.model.store import Store
from swarm.protocol.errors import ModelError, StoreError
from swarm.protocol.ids import BlobId, NodeId
from swarm.protocol.messages import LayersTaken, Message, TakeLayers
from swarm.ring import forming, gathering, library
from swarm.ring.blob_client import BlobSource
from swarm.ring.fit import Load, fitting_order
from swarm.ring.gathering import Gatherer, GatherOwner, share_out
from swarm.ring.stage import StageHost
from swarm.ring.supply import shape_of
from tests.model import gguf_files, stand_in_exporter
from tests.model.fake_hub import FakeHub, Repository, serving_to_us
from tests.ring.test_forming import member
from tests.ring.test_node import LAYERS, Office, Pc, open_office

pytestmark = pytest.mark.anyio

NAME = "org/tiny"


@pytest.fixture(scope="module")
def mold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Manifest]:
    """A layer store with the whole model."""
    folder = tmp_path_factory.mktemp("mold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "LAYERS", LAYERS)
        (folder / "tiny.gguf").write_bytes(gguf_files.tiny_llama())
    ir = sources.acquire(sources.resolve(str(folder / "tiny.gguf")), folder, lambda *_: None)
    store = Store(folder / "store")
    store.open()
    identity = publish(ir, store, "tiny", "", lambda *_: None)
    return store, Manifest.decode(store.read(identity))


@pytest.fixture
def hub(mold: tuple[Store, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    stand_in_exporter.take_its_place(monkeypatch)
    monkeypatch.setattr(forming, "LOOK_AROUND_S", 0.3)
    monkeypatch.setattr(forming, "SETTLE_S", 0.1)
    monkeypatch.setattr(forming, "ACQUIRE_AGAIN_S", 0.5)
    monkeypatch.setattr(library, "TURN_S", 0.3)
    checkpoint = stand_in_exporter.write_checkpoint(tmp_path / "checkpoint", *mold)
    with serving_to_us(monkeypatch, tmp_path / "hf") as served:
        served.repositories[NAME] = Repository({path.name: path.read_bytes() for path in checkpoint.iterdir()})
        yield served


def memory_for(nodes: int, manifest: Manifest) -> int:
    """With which so many nodes hold the model, and one fewer do not."""
    load = Load.of(shape_of(ABSENT, manifest), min(manifest.context_tokens, 2048))
    least = next(size for size in range(0, 10**9, 20_000) if fitting_order(load, [size] * nodes) is not None)
    assert nodes == 1 or fitting_order(load, [least] * (nodes - 1)) is None
    return least


def cut_off(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These PCs have no way out: neither to look up a name nor to fetch."""
    opened = gathering.open_exporter

    def open_exporter(source: Source, store: Store, *more: Any) -> Exporter:
        if store.root.parent.name in names:
            raise ModelError("the hub cannot be reached", found="no way out")
        return opened(source, store, *more)

    monkeypatch.setattr(gathering, "open_exporter", open_exporter)


def layers_in(pc: Pc, manifest: Manifest) -> set[int]:
    return {number for number, layer in enumerate(manifest.layers) if pc.store.has(layer.id)}


async def start(office: Office, *names: str, memory: int) -> list[Pc]:
    """The first of them names the model."""
    return [
        await office.start(name, wanted=NAME if number == 0 else "", memory_bytes=memory)
        for number, name in enumerate(names)
    ]


async def test_each_exports_its_own_layers_and_none_twice(
    hub: FakeHub, mold: tuple[Store, Manifest], tmp_path: Path
) -> None:
    _, manifest = mold
    async with open_office(tmp_path, tmp_path) as office:
        pcs = await start(office, "one", "two", "three", memory=memory_for(3, manifest))
        plan = await pcs[0].until_spread_over(*pcs)
        for pc in pcs[1:]:
            await pc.until_spread_over(*pcs)
        for pc in pcs:
            stage = plan.stage_of(pc.ring.node)
            assert stage is not None
            assert layers_in(pc, manifest) == set(stage.layers), "more than its own"
        assert await pcs[0].answer(4) == await pcs[2].answer(4)
    assert hub.weights_sent_once()


async def test_one_that_reaches_the_outside_hands_on_to_the_others_and_keeps_within_its_disk(
    hub: FakeHub, mold: tuple[Store, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, manifest = mold
    monkeypatch.setattr(exporting, "SLICE_BYTES", 1)
    cut_off(monkeypatch, "two", "three")
    async with open_office(tmp_path, tmp_path) as office:
        pcs = await start(office, "one", "two", "three", memory=memory_for(3, manifest))
        one, two, three = pcs
        limit = one.store.limit_bytes = manifest.total_bytes * 3 // 4 + 10**6
        await one.until_spread_over(*pcs)
        assert len(layers_in(one, manifest)) < LAYERS
        assert one.store.usage_bytes() <= limit
        assert set(two.ring.view().fetched) <= {one.ring.node, three.ring.node}
        assert any("this PC does" in notice for notice in one.ring.view().notices)
        assert await one.answer(4) == await three.answer(4)
    assert hub.weights_sent_once()


async def test_another_tries_where_the_one_that_named_it_cannot(
    hub: FakeHub, mold: tuple[Store, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(monkeypatch, "one")
    async with open_office(tmp_path, tmp_path) as office:
        one, two = await start(office, "one", "two", memory=memory_for(2, mold[1]))
        await one.until_spread_over(one, two)
        assert any("could not be had" in notice for notice in one.ring.view().notices)
    assert hub.weights_sent_once()


async def test_what_a_dead_acquirer_handed_on_is_not_fetched_again(
    hub: FakeHub, mold: tuple[Store, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, manifest = mold
    monkeypatch.setattr(exporting, "SLICE_BYTES", 1)
    cut_off(monkeypatch, "three")
    async with open_office(tmp_path, tmp_path) as office:
        pcs = await start(office, "one", "two", "three", memory=memory_for(2, manifest))
        one, two, three = pcs
        await one.until(lambda: bool(layers_in(three, manifest) or layers_in(two, manifest)), "a layer handed on")
        handed_on = layers_in(two, manifest) | layers_in(three, manifest)
        before = len(hub.requests)
        await one.crash()
        await two.until_spread_over(two, three)
        assert await two.answer(4) == await three.answer(4)
    asked = hub.layers_sent(before)
    assert not asked & handed_on, "asked for what a peer had"


async def test_layers_that_a_pc_took_with_it_are_exported_again_and_only_they(
    hub: FakeHub, mold: tuple[Store, Manifest], tmp_path: Path
) -> None:
    _, manifest = mold
    async with open_office(tmp_path, tmp_path) as office:
        pcs = await start(office, "one", "two", "three", memory=memory_for(2, manifest))
        one, two, three = pcs
        await one.until_spread_over(*pcs)
        lost = layers_in(two, manifest) - layers_in(one, manifest) - layers_in(three, manifest)
        before = len(hub.requests)
        await two.crash()
        await one.until_spread_over(one, three)
        assert hub.layers_sent(before) == lost


async def test_a_swarm_too_small_fetches_nothing(hub: FakeHub, mold: tuple[Store, Manifest], tmp_path: Path) -> None:
    async with open_office(tmp_path, tmp_path) as office:
        (one,) = await start(office, "one", memory=memory_for(2, mold[1]))
        await one.until(lambda: any("too large" in notice for notice in one.ring.view().notices), "the reason")
        assert "Start more PCs" in one.ring.view().notices[-1]
    assert not hub.layers_sent(0)


class Asked:
    """An owner and a stage host that fetches nothing and remembers what it was to fetch; `gathering` asks both."""

    node = NodeId("0" * 32)

    def __init__(self) -> None:
        self.fetching: list[BlobId] = []
        self.most = 0
        self.answers: list[tuple[NodeId, Message]] = []
        self.absent = anyio.Event()

    async def fetch(self, blobs: Sequence[BlobRef], *_: object) -> None:
        self.fetching.append(blobs[0].id)
        self.most = max(self.most, len(self.fetching))
        try:
            await self.absent.wait()
            raise StoreError("nobody has it")
        finally:
            self.fetching.remove(blobs[0].id)

    def sources(self) -> list[BlobSource]:
        return []

    async def send(self, to: NodeId, message: Message) -> None:
        self.answers.append((to, message))


async def test_however_much_is_asked_one_thing_is_done_and_the_newest(tmp_path: Path) -> None:
    owner = Asked()
    gatherer = Gatherer(Store(tmp_path), cast(StageHost, owner), lambda *_: None, cast(GatherOwner, owner))
    peers = [NodeId(f"{number:032x}") for number in (1, 2)]
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gatherer.run)
            for number in range(200):
                gatherer.received(peers[number % 2], TakeLayers(BlobId(f"{number:064x}"), 10, 0, 0))
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert owner.fetching == [f"{199:064x}"]
            assert owner.most == 1
            gatherer.gone(peers[0])
            owner.absent.set()
            await anyio.wait_all_tasks_blocked()
            ((to, answer),) = owner.answers
            assert to == peers[1]
            assert answer == LayersTaken(BlobId(f"{199:064x}"), None, 0, "nobody has it")
            owner.absent = anyio.Event()
            gatherer.received(peers[0], TakeLayers(BlobId("f" * 64), 10, 0, 0))
            await anyio.wait_all_tasks_blocked()
            gatherer.gone(peers[0])
            await anyio.wait_all_tasks_blocked()
            assert not owner.fetching, "nobody waits for it"
            tasks.cancel_scope.cancel()


def test_shares_are_the_plan_that_the_ring_will_have(mold: tuple[Store, Manifest]) -> None:
    _, manifest = mold
    outline = manifest.without({blob.id for blob in manifest.weights(0, LAYERS)})
    members = [member(number, memory_bytes=memory_for(2, manifest), model=None) for number in (1, 2, 3)]
    stages = share_out(outline, members)
    assert [stage.start for stage in stages] == [0, *(stage.end for stage in stages[:-1])]
    assert stages[-1].end == LAYERS
    with pytest.raises(ModelError, match="too large for this swarm"):
        share_out(outline, [replace(members[0], memory_bytes=10**6)])
