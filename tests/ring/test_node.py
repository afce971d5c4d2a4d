"""Whole nodes in one process, over loopback, TLS and the real engine with a tiny model: form, serve, leave, crash."""

from __future__ import annotations

import functools
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from swarm.cli.main import first_error
from swarm.coordinator.coordinator import Coordinator
from swarm.coordinator.language import LanguageModel
from swarm.coordinator.requests import ChatMessage, GenerateRequest
from swarm.engine.paged import PagedEngine
from swarm.model import sources
from swarm.model.store import Store
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.errors import UsageError
from swarm.protocol.messages import MemberState
from swarm.protocol.plan import Plan
from swarm.ring import forming, library, stage, supply
from swarm.ring.config import RingConfig
from swarm.ring.handshake import Credentials
from swarm.ring.identity import load_or_create, next_incarnation
from swarm.ring.node import RingNode
from swarm.ring.pairing import OPEN_SECRET
from swarm.ring.port import RingLoad
from swarm.ring.supply import Model
from tests.loopwatch import loopwatch
from tests.model import gguf_files

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

pytestmark = pytest.mark.anyio

LAYERS = 6
WAIT_S = 240.0
"""For what never comes; a machine that others use takes its time."""
BLOCKED_S = 1.0
"""Far above what two busy cores add, and below what a compilation or a long prompt takes."""


@pytest.fixture(scope="module")
def ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "LAYERS", LAYERS)
        (folder / "tiny.gguf").write_bytes(gguf_files.tiny_llama())
    return sources.acquire(sources.resolve(str(folder / "tiny.gguf")), folder, lambda *_: None)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in case more PCs are switched on: here they come when the test says."""
    monkeypatch.setattr(forming, "LOOK_AROUND_S", 0.3)
    monkeypatch.setattr(forming, "SETTLE_S", 0.1)


@pytest.fixture(autouse=True)
def _turning_loop() -> Iterator[None]:
    with loopwatch(BLOCKED_S):
        yield


@dataclass
class Pc:
    """A node with its coordinator, running in a task."""

    ring: RingNode
    coordinator: Coordinator
    store: Store
    drafts: list[Model | None] = field(default_factory=list)
    """What the ring gave to draft with, one after the other."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    error: BaseException | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            with self.scope:
                async with anyio.create_task_group() as tasks:
                    await tasks.start(self.coordinator.run)
                    await self.ring.run(lambda: (0.0, 0, ()), task_status=task_status)
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            self.error = first_error(group)
            if not isinstance(self.error, UsageError):
                raise
        finally:
            self.ended.set()

    async def until(self, wanted: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(WAIT_S):
            # What a screen shows has no event to wait for.
            while not wanted():  # noqa: ASYNC110
                await anyio.sleep(0.02)
            return
        raise AssertionError(f"no {what}: {self.ring.view()}")

    async def until_spread_over(self, *pcs: Pc) -> Plan:
        nodes = {pc.ring.node for pc in pcs}

        def formed() -> bool:
            view = self.ring.view()
            return view.loaded and view.model_known and {stage.node for stage in view.plan.stages} == nodes

        await self.until(formed, f"ring of {len(pcs)}")
        return self.ring.plan

    def states(self) -> dict[str, MemberState]:
        return {member.name: member.state for member in self.ring.view().members}

    async def answer(self, tokens: int = 24, prompt: str = "the the the") -> list[int]:
        request = GenerateRequest((ChatMessage("user", prompt),), max_tokens=tokens, ignore_stop_tokens=True)
        found: list[int] = []
        async for delta in self.coordinator.generate(request):
            found += delta.tokens
        assert len(found) == tokens
        return found

    async def crash(self) -> None:
        """Its links break; nothing is announced."""
        self.scope.cancel()
        await self.ended.wait()


@dataclass
class Office:
    """Starts nodes of one swarm; each dials the first."""

    tasks: TaskGroup
    folder: Path
    ir: Path
    pcs: list[Pc] = field(default_factory=list)
    swarm: str = field(default_factory=lambda: f"test-{secrets.token_hex(4)}")
    """Of this test alone: another run on this machine, with folders of the same name, hears us by mDNS."""

    async def start(self, name: str, model: Path | None = None, **changes: object) -> Pc:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        store = Store(home / "store")
        store.open()
        first = next((pc for pc in self.pcs if not pc.ended.is_set()), None)
        known = () if first is None else (("127.0.0.1", first.ring._server.port),)
        config = RingConfig(
            home=home,
            credentials=Credentials(load_or_create(home), name, self.swarm, OPEN_SECRET),
            incarnation=next_incarnation(home),
            memory_bytes=10**9,
            device="CPU",
            speed=1e5,  # so slow that sharing pays even for a model as small as this
            wanted=str(model or ""),
            peers=known,
            interfaces=("lo",),
        )

        def on_model(model: Model) -> None:
            coordinator.set_model(LanguageModel(model.id, model.tokenizer, model.manifest.context_tokens))

        drafts: list[Model | None] = []
        ring = RingNode(replace(config, **changes), store, on_model, drafts.append)
        coordinator = Coordinator(ring)
        pc = Pc(ring, coordinator, store, drafts)
        self.pcs.append(pc)
        await self.tasks.start(pc.run)
        return pc


@asynccontextmanager
async def open_office(folder: Path, ir: Path) -> AsyncIterator[Office]:
    async with anyio.create_task_group() as tasks:
        yield Office(tasks, folder, ir)
        tasks.cancel_scope.cancel()


async def test_three_form_serve_leave_and_crash(tmp_path: Path, ir: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        await one.until_spread_over(one)
        answer = await one.answer()

        with anyio.move_on_after(0.01) as alone:
            await one.ring.joined()
        assert alone.cancelled_caught
        two = await office.start("two")
        await one.ring.joined()
        plan = await one.until_spread_over(one, two)
        assert await two.until_spread_over(one, two) == plan
        assert plan.stages[0].start == 0
        assert plan.stages[0].end == plan.stages[1].start
        assert plan.stages[1].end == LAYERS
        assert set(two.ring.view().fetched) == {one.ring.node}
        assert await one.answer() == await two.answer() == answer

        three = await office.start("three")
        pcs = (one, two, three)
        for pc in pcs:
            await pc.until_spread_over(*pcs)
        assert [await pc.answer() for pc in pcs] == [answer] * 3

        await two.ring.leave()
        await two.ended.wait()
        for pc in (one, three):
            await pc.until_spread_over(one, three)
            assert pc.states()["two"] is MemberState.LEFT
        assert await three.answer() == answer

        written: list[int] = []

        async def long_answer() -> None:
            written.extend(await one.answer(200))

        undisturbed = await one.answer(200)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long_answer)
            await one.until(lambda: one.coordinator.stats().running == 1, "an answer under way")
            await three.crash()
        assert written == undisturbed
        await one.until_spread_over(one)
        assert one.states()["three"] is MemberState.DEAD


async def test_two_rings_answer_alike(tmp_path: Path, ir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third PC of half the speed would have to take whole layers and hold the two up: it is a ring of its own."""
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        await one.until_spread_over(one)
        answer = await one.answer()
        one.coordinator._idle.clear()
        two, three = await office.start("two"), await office.start("three", speed=0.55e5)
        pcs = (one, two, three)
        for pc in pcs:
            plan = await pc.until_spread_over(*pcs)
        assert [{stage.name for stage in stages} for stages in plan.rings] == [{"one", "two"}, {"three"}]
        for pc in pcs:
            for ring in range(2):
                loads = [RingLoad(sessions=9), RingLoad(sessions=9)]
                loads[ring] = RingLoad()
                monkeypatch.setattr(pc.ring, "loads", lambda loads=loads: tuple(loads))
                assert await pc.answer() == answer
                (kept,) = pc.coordinator._idle.clear()
                assert kept.plan == plan.ring(ring)
        await two.crash()
        await one.until_spread_over(one, three)
        assert await one.answer() == await three.answer() == answer


async def test_a_loss_in_one_ring_is_not_noticed_in_another(tmp_path: Path, ir: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        await one.until_spread_over(one)
        two, three = await office.start("two"), await office.start("three", speed=0.55e5)
        for pc in (one, two, three):
            before = await pc.until_spread_over(one, two, three)
        assert [{stage.name for stage in stages} for stages in before.rings] == [{"one", "two"}, {"three"}]
        undisturbed = await one.answer(300)
        one.coordinator._idle.clear()
        written: list[list[int]] = []
        over = anyio.Event()

        async def answers() -> None:
            """One behind the other, so that one is being written whenever the plan changes."""
            while not over.is_set():
                written.append(await one.answer(300))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answers)
            await one.until(lambda: one.coordinator.stats().ring_sessions == (1, 0), "an answer on the first ring")
            await three.crash()
            after = await one.until_spread_over(one, two)
            over.set()
        assert after.has_ring(before.ring(0))
        assert all(answer == undisturbed for answer in written)
        assert one.coordinator.stats().replays == 0


async def test_a_node_that_comes_back_is_the_same(tmp_path: Path, ir: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        two = await office.start("two")
        await one.until_spread_over(one, two)
        await two.crash()
        await one.until_spread_over(one)
        again = await office.start("two")
        await one.until_spread_over(one, again)
        assert again.ring.node == two.ring.node
        assert [member.name for member in one.ring.view().members] in (["one", "two"], ["two", "one"])


async def test_a_long_prompt_holds_nobody_up(tmp_path: Path, ir: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        two = await office.start("two")
        for pc in (one, two):
            await pc.until_spread_over(one, two)
        short: list[list[int]] = []

        async def ask_meanwhile() -> None:
            short.append(await two.answer(8))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_meanwhile)
            await one.answer(4, "the " * 220)
        assert short == [await two.answer(8)]


async def test_a_swarm_too_small_for_the_model_says_so(tmp_path: Path, ir: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, memory_bytes=10**6)
        await one.until(lambda: one.ring.plan.missing_bytes > 0, "word of what is missing")
        assert "lacks" in one.ring.plan.note
        two = await office.start("two")
        await two.until_spread_over(two)
        await one.until_spread_over(two)  # a spare takes prompts too
        assert await one.answer() == await two.answer()


async def test_a_wrong_code_given_ends_the_node(tmp_path: Path, ir: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        home = tmp_path / "stranger"
        home.mkdir()
        secret = Credentials(load_or_create(home), "stranger", office.swarm, b"x" * 32)
        stranger = await office.start("stranger", credentials=secret, code_given=True)
        with anyio.fail_after(WAIT_S):
            await stranger.ended.wait()
        assert isinstance(stranger.error, UsageError)
        await one.until_spread_over(one)
        assert set(one.states()) == {"one"}


async def test_after_a_night_off_nothing_is_needed_from_outside(tmp_path: Path, ir: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        two = await office.start("two")
        await one.until_spread_over(one, two)
        answer = await one.answer()
        for pc in (one, two):
            await pc.crash()
        one = await office.start("one", ir)
        two = await office.start("two")
        await one.until_spread_over(one, two)
        await two.until_spread_over(one, two)
        assert await two.answer() == answer


def slowly(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """The same, whose first calls take longer than the loop may be held."""
    left = iter(range(calls))

    @functools.wraps(function)
    def slow(*args: Any, **options: Any) -> Any:
        if next(left, None) is not None:
            time.sleep(1.2 * BLOCKED_S)
        return function(*args, **options)

    return slow


async def test_nothing_slow_holds_the_event_loop(tmp_path: Path, ir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, calls in (
        (supply, "acquire", 1),
        (supply, "publish", 1),
        (library, "load_model", 1),
        (stage, "load_shard", 1),
        (PagedEngine, "run", 3),  # twice to warm up
        (Tokenizer, "encode", 1),
        (Tokenizer, "render_chat", 1),
    ):
        monkeypatch.setattr(owner, name, slowly(getattr(owner, name), calls))
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        await one.until_spread_over(one)
        await one.answer(2)
