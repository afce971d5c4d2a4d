"""The host of a draft model: loads what the ring found, replaces it, does without what cannot be loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from swarm.coordinator.draft_host import DraftHost
from swarm.coordinator.drafter import Drafter
from swarm.engine.base import Engine
from swarm.protocol.errors import DeviceError
from tests.coordinator.test_draft_book import ask, following, session
from tests.coordinator.test_draft_model import PROMPT, WAIT_S, Gated

pytestmark = pytest.mark.anyio


class Closing(Gated):
    closed = False

    def close(self) -> None:
        self.closed = True


def model(name: str) -> Any:
    """As much of a `supply.Model` as the host looks at."""
    return SimpleNamespace(manifest=SimpleNamespace(name=name))


@dataclass
class Node:
    """Whom the host tells."""

    engines: dict[str, Closing] = field(default_factory=dict)
    drafters: list[Drafter | None] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    told: anyio.Event = field(default_factory=anyio.Event)

    def build(self, draft: Any) -> Engine:
        if draft.manifest.name == "broken":
            raise DeviceError("the device refuses")
        engine = self.engines[draft.manifest.name] = Closing(open_=True)
        return engine

    def install(self, drafter: Drafter | None) -> None:
        self.drafters.append(drafter)
        self.tell()

    def notice(self, text: str) -> None:
        self.notices.append(text)
        self.tell()

    def tell(self) -> None:
        self.told.set()
        self.told = anyio.Event()

    async def drafter(self) -> Drafter:
        with anyio.fail_after(WAIT_S):
            while not self.drafters or self.drafters[-1] is None:
                await self.told.wait()
        found = self.drafters[-1]
        assert found is not None
        return found

    async def until_told(self, count: int) -> None:
        with anyio.fail_after(WAIT_S):
            while len(self.notices) < count:
                await self.told.wait()


@asynccontextmanager
async def hosted() -> AsyncIterator[tuple[DraftHost, Node]]:
    node = Node()
    host = DraftHost(node.build, node.install, node.notice)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host.run)
        yield host, node
        tasks.cancel_scope.cancel()
    assert host.name == ""
    assert node.drafters[-1:] in ([None], [])
    assert all(engine.closed for engine in node.engines.values())


async def test_what_is_offered_drafts() -> None:
    async with hosted() as (host, node):
        host.offer(model("one"))
        drafter = await node.drafter()
        assert host.name == "one"
        assert (await drafter.draft(session(1), ask(PROMPT, 3))).tokens == following(PROMPT, 3)


async def test_another_takes_its_place_and_none_ends_it() -> None:
    async with hosted() as (host, node):
        host.offer(model("one"))
        first = await node.drafter()
        host.offer(model("two"))
        with anyio.fail_after(WAIT_S):
            while host.name != "two":
                await node.told.wait()
        assert not first.available
        assert node.engines["one"].closed
        second = await node.drafter()
        assert (await second.draft(session(1), ask(PROMPT, 2))).tokens == following(PROMPT, 2)
        host.offer(None)
        with anyio.fail_after(WAIT_S):
            while node.drafters[-1] is not None:
                await node.told.wait()
        assert not second.available
    assert node.notices == []


async def test_what_cannot_be_loaded_is_said_and_the_next_one_is_tried() -> None:
    async with hosted() as (host, node):
        host.offer(model("broken"))
        await node.until_told(1)
        assert "broken cannot be loaded: the device refuses" in node.notices[0]
        host.offer(model("one"))
        await node.drafter()


async def test_a_device_that_fails_is_said() -> None:
    async with hosted() as (host, node):
        host.offer(model("one"))
        drafter = await node.drafter()
        node.engines["one"].failure = DeviceError("the device is gone")
        assert (await drafter.draft(session(1), ask(PROMPT, 3))).tokens == ()
        await node.until_told(1)
        assert "the device is gone" in node.notices[0]
        assert node.drafters[-1] is None
