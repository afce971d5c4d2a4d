"""Questions and answers: what comes of a request, stops, bounds, the end of a node."""

from __future__ import annotations

import threading
from contextlib import aclosing

import anyio
import pytest

from swarm.coordinator.coordinator import Coordinator, CoordinatorLimits
from swarm.coordinator.requests import Delta, FinishReason, GenerateRequest
from swarm.protocol.errors import CapacityError, SessionError, UsageError
from tests.coordinator.house import ask, collect, expected, house, until

pytestmark = pytest.mark.anyio


async def test_an_answer_is_that_of_plain_decoding() -> None:
    async with house() as h:
        request = ask("how are you?")
        text, finish, usage = await collect(h.coordinator, request)
        assert text == expected(request)
        assert finish is FinishReason.LENGTH
        assert (usage.prompt_tokens, usage.completion_tokens, usage.reused_tokens) == (28, 20, 0)
        assert usage.first_token_ms > 0
        assert usage.token_ms > 0
        assert threading.get_ident() not in h.letters.threads, "encoding does not block the event loop"
        assert h.coordinator.stats().tokens_per_second > 0


async def test_many_at_once() -> None:
    async with house() as h:
        requests = [ask(f"question {i}" * (i + 1)) for i in range(8)]
        texts: dict[int, str] = {}

        async def one(i: int) -> None:
            texts[i], *_ = await collect(h.coordinator, requests[i])

        async with anyio.create_task_group() as tasks:
            for i in range(8):
                tasks.start_soon(one, i)
        assert texts == {i: expected(request) for i, request in enumerate(requests)}


async def test_stop_strings_cut_the_text_and_end_the_session() -> None:
    async with house() as h:
        whole = expected(ask("abc"), 200)
        request = ask("abc", max_tokens=None, stop=("never there", whole[6:9]))
        text, finish, usage = await collect(h.coordinator, request)
        assert text == whole[: whole.find(whole[6:9])]
        assert finish is FinishReason.STOP
        assert usage.completion_tokens <= 10


async def test_a_stop_string_at_the_very_end_counts_as_stop() -> None:
    async with house() as h:
        whole = expected(ask("abc"))
        text, finish, _ = await collect(h.coordinator, ask("abc", stop=(whole[-1] + "?", whole[-2:])))
        assert text == whole[: whole.find(whole[-2:])]
        assert finish is FinishReason.STOP


async def test_stop_tokens_end_the_answer_unless_they_are_ignored() -> None:
    async with house() as h:
        whole = expected(ask("abc"))
        h.letters.stop_tokens = frozenset({ord(whole[5])})
        text, finish, _ = await collect(h.coordinator, ask("abc"))
        assert text == whole[: whole.find(whole[5])]
        assert finish is FinishReason.STOP
        request = GenerateRequest(ask("abc").messages, max_tokens=20, ignore_stop_tokens=True)
        text, finish, usage = await collect(h.coordinator, request)
        assert finish is FinishReason.LENGTH
        assert usage.completion_tokens == 20


async def test_closing_tells_stages_and_readers() -> None:
    async with house() as h:
        await collect(h.coordinator, ask("kept between turns"))
        h.ring.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close_when_running, h.coordinator)
            with pytest.raises(SessionError, match="leaving"):
                await collect(h.coordinator, ask("never finished"))
        assert {session for _, session in h.ring.closed} >= {h.ring.sent[0].session}
        with pytest.raises(SessionError, match="no questions now"):
            await collect(h.coordinator, ask("too late"))


async def close_when_running(coordinator: Coordinator) -> None:
    await until(lambda: coordinator.stats().running > 0)
    await coordinator.close()


async def test_closing_lets_a_running_answer_end() -> None:
    async with house() as h:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, h.coordinator, ask("nearly done", max_tokens=100))
            await until(lambda: h.coordinator.stats().running > 0)
            await h.coordinator.close(drain_s=30)
        assert h.coordinator.stats().running == 0


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (GenerateRequest(()), "no messages"),
        (ask("x", max_tokens=0), "max_tokens"),
        (ask("x", stop=("",)), "bad stop string"),
        (ask("x", stop=("s",) * 100), "too many stop strings"),
        (ask("x" * 1_000_001), "prompt is too long"),
    ],
)
async def test_requests_that_make_no_sense(request_: GenerateRequest, problem: str) -> None:
    async with house() as h:
        with pytest.raises(UsageError, match=problem):
            await collect(h.coordinator, request_)


async def test_requests_that_cannot_fit() -> None:
    async with house() as h:
        with pytest.raises(CapacityError, match="at most 999 tokens"):
            await collect(h.coordinator, ask("x" * 2000))


async def test_answers_at_once_are_bounded() -> None:
    async with house(limits=CoordinatorLimits(answers=1)) as h:
        async with aclosing(h.coordinator.generate(ask("one", max_tokens=None))) as deltas:
            assert isinstance(await anext(deltas), Delta)
            with pytest.raises(CapacityError, match="too many answers"):
                await collect(h.coordinator, ask("two"))
        await collect(h.coordinator, ask("three"))
