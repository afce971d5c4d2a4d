"""``ask`` and ``status`` through a real HTTP API, with a made-up coordinator behind it."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from swarm.api.server import ApiServer
from swarm.cli import client, running
from swarm.cli.args import Ask
from swarm.protocol.config import Settings
from swarm.protocol.errors import DeadlineError, LinkClosedError, SessionError, UsageError
from swarm.protocol.sampling import SamplingParams
from swarm.protocol.snapshot import Snapshot
from tests.api.generators import FakeGenerator
from tests.ui.snapshots import member, nothing_fits, ring, snapshot

pytestmark = pytest.mark.anyio

READY = snapshot(plan=ring(1, 4), members=(member(1),), model="org/qwen")
ASK = Ask("Hello", None, SamplingParams(), seeded=False, json=False)
DEADLINE_S = 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@asynccontextmanager
async def node(
    home: Path, generator: FakeGenerator, look: Callable[[], Snapshot] = lambda: READY
) -> AsyncIterator[Settings]:
    """A node's API, announced in `home`."""
    server = ApiServer(look, generator)
    port = await server.start("127.0.0.1", 0, fixed=True)
    running.announce(home, f"http://127.0.0.1:{port}")
    try:
        with anyio.fail_after(DEADLINE_S):
            yield Settings(home)
    finally:
        running.withdraw(home)
        await server.close()


async def asked(settings: Settings, request: Ask = ASK) -> str:
    out = io.StringIO()
    await client.ask(settings, request, out, io.StringIO())
    return out.getvalue()


async def test_the_answer_alone(tmp_path: Path) -> None:
    async with node(tmp_path, FakeGenerator()) as settings:
        assert await asked(settings) == "Hello you\n"


async def test_it_comes_as_it_is_written(tmp_path: Path) -> None:
    generator, out = FakeGenerator(("one ", "two"), held=True), io.StringIO()
    async with node(tmp_path, generator) as settings, anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask, settings, ASK, out, io.StringIO())
        await generator.started.wait()
        assert out.getvalue() == ""
        generator.go.set()
    assert out.getvalue() == "one two\n"


async def test_what_is_asked_for(tmp_path: Path) -> None:
    generator = FakeGenerator()
    request = Ask("Why?", 12, SamplingParams(temperature=0.5, seed=9), seeded=True, json=False)
    async with node(tmp_path, generator) as settings:
        await asked(settings, request)
        await asked(settings)
    given, plain = generator.requests
    assert [(message.role, message.content) for message in given.messages] == [("user", "Why?")]
    assert (given.max_tokens, given.sampling.temperature, given.sampling.seed) == (12, 0.5, 9)
    assert (plain.max_tokens, plain.sampling.temperature) == (None, 0.0)


async def test_as_json(tmp_path: Path) -> None:
    async with node(tmp_path, FakeGenerator()) as settings:
        found: dict[str, Any] = json.loads(await asked(settings, replace(ASK, json=True)))
    assert found["text"] == "Hello you"
    assert found["model"] == "org/qwen"
    assert found["finish_reason"] == "stop"
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (7, 3)
    told = found["usage"]["speculation"]
    assert (told["drafted"], told["accepted"], told["rejected"], told["wasted_rows"]) == (12, 9, 2, 5)
    assert (told["k"], told["depth"], told["gain"]) == (3.0, 1.5, 1.5)


async def test_it_waits_for_the_ring_and_says_what_for(tmp_path: Path) -> None:
    now = [snapshot(ready=False, reason="compile on PC-2")]
    screen, out = Terminal(), io.StringIO()
    async with node(tmp_path, FakeGenerator(), lambda: now[0]) as settings, anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask, settings, ASK, out, screen)
        while "compile on PC-2" not in screen.getvalue():
            await anyio.lowlevel.checkpoint()
        assert not out.getvalue()
        now[0] = READY
    assert out.getvalue() == "Hello you\n"


async def test_a_swarm_too_small_for_its_model(tmp_path: Path) -> None:
    small = snapshot(ready=False, reason="the swarm lacks 2.0 GB", plan=nothing_fits(2 * 10**9))
    async with node(tmp_path, FakeGenerator(), lambda: small) as settings:
        with pytest.raises(SessionError, match=r"lacks 2\.0 GB"):
            await asked(settings)


async def test_a_ring_that_never_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "READY_TIMEOUT_S", 0.2)
    async with node(tmp_path, FakeGenerator(), lambda: snapshot(ready=False, reason="a plan")) as settings:
        with pytest.raises(DeadlineError, match="not ready"):
            await asked(settings)


async def test_an_answer_that_fails_in_the_middle(tmp_path: Path) -> None:
    generator = FakeGenerator(error=SessionError("the ring is gone"), error_at=2)
    async with node(tmp_path, generator) as settings:
        with pytest.raises(SessionError, match="the ring is gone"):
            await asked(settings)


async def test_a_refused_question(tmp_path: Path) -> None:
    async with node(tmp_path, FakeGenerator(error=UsageError("an empty prompt"))) as settings:
        with pytest.raises(SessionError, match="an empty prompt"):
            await asked(settings)


async def test_status(tmp_path: Path) -> None:
    async with node(tmp_path, FakeGenerator()) as settings:
        found = await client.status(settings)
    assert found["ready"]
    assert found["stages"][0]["name"] == "PC-1"


async def test_a_node_that_does_not_answer(tmp_path: Path) -> None:
    async with node(tmp_path, FakeGenerator()) as settings:
        api = running.find(tmp_path).api
    running.announce(tmp_path, api)  # as after a crash, with its number taken by another process
    with pytest.raises(LinkClosedError, match="does not answer"):
        await client.status(settings)
