"""Layers that no peer has: one node at a time asks outside, and the others ask it first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from swarm.model.manifest import BlobRef, Manifest
from swarm.model.store import Store
from swarm.protocol.errors import ModelError, StoreError
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.plan import NO_PLAN, Plan, Stage
from swarm.ring import library
from swarm.ring.library import Library
from swarm.ring.supply import Model

pytestmark = pytest.mark.anyio

ME, OTHER = NodeId("2" * 32), NodeId("1" * 32)
MODEL = BlobId("a" * 64)
BLOB = BlobRef(BlobId("b" * 64), 10)
MANIFEST = Manifest("tiny", "/models/tiny", 4, 8, 16, (2, 2), BLOB, BLOB, BLOB, (BLOB, BLOB), BLOB, False)
PLAN = Plan(Epoch(2, OTHER), MODEL, (Stage(OTHER, "one", 0, 1, "CPU", 1), Stage(ME, "two", 1, 2, "CPU", 1)))


@dataclass
class World:
    """Everything around a library: what happened, in order, and what the others do."""

    busy: list[str] = field(default_factory=list)
    """Who is outside, at each look; then nobody."""
    here_after: int = 99
    """So many tries to prepare fail."""
    checkpoint: bool = False
    events: list[str] = field(default_factory=list)
    node: NodeId = ME
    plan: Plan = NO_PLAN

    def outside(self) -> str:
        self.events.append("look")
        return self.busy.pop(0) if self.busy else ""

    def sources(self) -> list[Any]:
        return []

    async def prepare(self, *_: object) -> None:
        self.events.append("prepare")
        if self.events.count("prepare") <= self.here_after:
            raise StoreError("a piece of the model cannot be fetched")

    async def mend(self, manifest: Manifest, start: int, end: int) -> bool:
        assert (manifest, start, end) == (MANIFEST, 1, 2)
        if self.checkpoint:
            self.events.append("mend")
        return self.checkpoint

    def model_known(self, _model: Model) -> None: ...

    def notice(self, _text: str) -> None: ...


async def prepare(world: World, monkeypatch: pytest.MonkeyPatch, store: Store, found: BlobId = MODEL) -> list[str]:
    async def acquire_model(*_: object) -> BlobId:
        world.events.append("outside")
        return found

    monkeypatch.setattr(library, "acquire_model", acquire_model)
    monkeypatch.setattr(library, "TURN_S", 0.01)
    shelf = Library(store, world, world, lambda *_: None, world)  # type: ignore[arg-type]
    shelf._models[MODEL] = Model(MODEL, 1, MANIFEST, None)  # type: ignore[arg-type]
    await shelf.prepare(PLAN)
    return world.events


@pytest.fixture
def store(tmp_path: Any) -> Store:
    opened = Store(tmp_path)
    opened.open()
    return opened


async def test_what_peers_have_is_not_asked_for_outside(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    assert await prepare(World(here_after=0), monkeypatch, store) == ["prepare"]


async def test_nobody_is_at_it(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    assert await prepare(World(here_after=1), monkeypatch, store) == ["prepare", "look", "outside", "prepare"]


async def test_another_is_and_hands_it_on(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    world = World(busy=["one", "one"], here_after=1)
    assert await prepare(world, monkeypatch, store) == ["prepare", "look", "look", "look", "prepare"]


async def test_another_is_but_it_has_not_got_ours(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    world = World(busy=["one"], here_after=2)
    expected = ["prepare", "look", "look", "prepare", "look", "outside", "prepare"]
    assert await prepare(world, monkeypatch, store) == expected


async def test_layers_of_a_checkpoint_are_exported_again(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    world = World(here_after=1, checkpoint=True)
    assert await prepare(world, monkeypatch, store) == ["prepare", "look", "mend", "prepare"]


async def test_a_source_that_gives_another_model_by_now(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    world = World(plan=PLAN)
    with pytest.raises(StoreError, match="a piece of the model"):
        await prepare(world, monkeypatch, store, BlobId("c" * 64))


async def test_one_that_cannot_reach_the_source_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    world = World()

    async def mend(*_: object) -> bool:
        raise ModelError("the hub cannot be reached")

    world.mend = mend  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="a piece of the model"):
        await prepare(world, monkeypatch, store)
