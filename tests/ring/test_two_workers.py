"""Two stage workers in a row under many users: everybody gets the tokens they get alone, whoever comes and goes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import anyio
import pytest

from swarm.engine.timed import StageTimes, TimedEngine
from swarm.protocol.ids import NodeId, SessionId
from swarm.protocol.messages import CloseSession, Drawn, Message, Refused, RowKind, Segment
from swarm.ring.worker import StageWorker
from tests.ring.stage_harness import ASKER, FIRST, LAST, PLAN, segment

pytestmark = pytest.mark.anyio

KV_TOKENS = 32_768
TOKENS = 12


class Ring:
    """Both stages and, for every session, where its drawn tokens arrive."""

    def __init__(self) -> None:
        times = StageTimes(1.0, 0.02)
        self.engines = {
            FIRST: TimedEngine(True, False, KV_TOKENS, times),
            LAST: TimedEngine(False, True, KV_TOKENS, times),
        }
        self.workers = {node: StageWorker(node, PLAN, engine, self.send) for node, engine in self.engines.items()}
        self.drawn: dict[SessionId, asyncio.Queue[Drawn]] = {}

    async def send(self, to: NodeId, message: Message) -> None:
        if isinstance(message, Segment):
            await self.workers[to].deliver(message)
        elif isinstance(message, CloseSession):
            self.workers[to].close_session(message.session, FIRST)
        elif isinstance(message, (Drawn, Refused)) and message.session in self.drawn:
            assert isinstance(message, Drawn), message
            self.drawn[message.session].put_nowait(message)

    def close(self, session: SessionId) -> None:
        self.drawn.pop(session, None)
        for worker in self.workers.values():
            worker.close_session(session, ASKER)

    async def answer(self, user: int, prompt: int, tokens: int = TOKENS) -> list[int]:
        session = segment(user).session
        answers = self.drawn[session] = asyncio.Queue()
        found: list[int] = []
        try:
            for start in range(0, prompt, 256):
                rows = min(256, prompt - start)
                one = segment(user, start, rows, kind=RowKind.PREFILL)
                one = replace(one, tokens=tuple((user * 31 + token) % 997 for token in one.tokens))
                await self.send(FIRST, one)
            while True:
                drawn = await answers.get()
                if drawn.position < prompt:
                    continue
                found += drawn.tokens
                if len(found) >= tokens:
                    return found
                one = replace(one, start=drawn.position, tokens=drawn.tokens, kind=RowKind.DECODE)
                await self.send(FIRST, one)
        finally:
            self.close(session)


async def alone(user: int, prompt: int) -> list[int]:
    ring = Ring()
    async with anyio.create_task_group() as workers:
        for worker in ring.workers.values():
            workers.start_soon(worker.run)
        found = await ring.answer(user, prompt)
        workers.cancel_scope.cancel()
    return found


@pytest.mark.parametrize("seed", range(3))
async def test_everybody_gets_what_they_get_alone(seed: int) -> None:
    random = Random(seed)
    prompts = {user: random.choice([2, 3, 9, 40, 300, 700]) for user in range(12)}
    expected = {user: await alone(user, prompt) for user, prompt in prompts.items()}
    found: dict[int, list[int]] = {}
    ring = Ring()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as workers:
            for worker in ring.workers.values():
                workers.start_soon(worker.run)

            async def user(number: int) -> None:
                await anyio.sleep(random.uniform(0, 0.1))
                found[number] = await ring.answer(number, prompts[number])

            async def cancelled(number: int) -> None:
                with anyio.move_on_after(random.uniform(0, 0.15)):
                    await ring.answer(number, 400, 1000)

            async with anyio.create_task_group() as users:
                for number in prompts:
                    users.start_soon(user, number)
                for number in range(100, 110):
                    users.start_soon(cancelled, number)
            # A stage frees a closed session when it is between two forwards.
            while any(engine.free_tokens < KV_TOKENS for engine in ring.engines.values()):  # noqa: ASYNC110
                await anyio.sleep(0.001)
            workers.cancel_scope.cancel()
    assert found == expected
