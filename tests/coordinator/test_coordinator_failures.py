"""What goes wrong while answers are written: plans, links, stages, the model."""

from __future__ import annotations

import anyio
import pytest

from swarm.coordinator.coordinator import CoordinatorLimits
from swarm.coordinator.requests import FinishReason, GenerateRequest
from swarm.coordinator.session import SessionLimits
from swarm.coordinator.turn import INBOX
from swarm.protocol.errors import LinkClosedError, SessionError
from swarm.protocol.messages import Drawn, Refused
from swarm.protocol.plan import NO_PLAN, Plan
from tests.coordinator.fake_stages import make_plan
from tests.coordinator.house import ask, collect, expected, house, until, until_blocked

pytestmark = pytest.mark.anyio


async def test_a_plan_change_in_the_middle_of_answers_changes_no_text() -> None:
    async with house() as h:
        requests = [ask("first " * 5, max_tokens=40), ask("second", max_tokens=40)]
        texts: list[str] = []

        async def one(request: GenerateRequest) -> None:
            text, *_ = await collect(h.coordinator, request)
            texts.append(text)

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(one, request)
            for number in (2, 3, 4):
                await until(lambda number=number: len(h.ring.sent) >= 20 * (number - 1))
                h.ring.change_plan(make_plan(number, number))
        assert sorted(texts) == sorted(expected(request, 40) for request in requests)
        stats = h.coordinator.stats()
        assert stats.replays >= 2
        assert stats.mismatches == 0


async def test_a_question_before_the_first_ring_waits_for_it() -> None:
    async with house(NO_PLAN) as h:
        async with anyio.create_task_group() as tasks:
            texts: list[str] = []

            async def one() -> None:
                text, *_ = await collect(h.coordinator, ask("anybody there?"))
                texts.append(text)

            tasks.start_soon(one)
            await until(lambda: h.coordinator.stats().waiting > 0)
            h.ring.change_plan(make_plan(1, 2))
        assert texts == [expected(ask("anybody there?"))]


async def test_no_ring_ends_with_the_reason() -> None:
    limits = CoordinatorLimits(session=SessionLimits(wait_s=0.05))
    async with house(Plan(NO_PLAN.epoch, None, missing_bytes=2_000_000_000), limits) as h:
        with pytest.raises(SessionError, match=r"lacks 2\.0 GB"):
            await collect(h.coordinator, ask("hello"))
        assert h.coordinator.stats().running == 0


async def test_no_model_ends_with_the_reason() -> None:
    async with house(limits=CoordinatorLimits(session=SessionLimits(wait_s=0.05))) as h:
        h.coordinator.set_model(None)
        with pytest.raises(SessionError, match="model is not known"):
            await collect(h.coordinator, ask("hello"))


async def test_a_lost_link_is_tried_again() -> None:
    async with house() as h:
        h.ring.link_error = LinkClosedError("the link is closed")
        async with anyio.create_task_group() as tasks:
            texts: list[str] = []

            async def one() -> None:
                text, *_ = await collect(h.coordinator, ask("hello"))
                texts.append(text)

            tasks.start_soon(one)
            await until(lambda: h.coordinator.stats().replays > 0)
            h.ring.link_error = None
        assert texts == [expected(ask("hello"))]


async def test_a_fatal_refusal_ends_one_answer_and_closes_its_session() -> None:
    async with house() as h:
        h.ring.hold()

        async def refuse() -> None:
            await until(lambda: bool(h.ring.sent))
            segment = h.ring.sent[0]
            h.coordinator.refused(Refused(segment.session, segment.epoch, segment.attempt, "out of memory", fatal=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refuse)
            with pytest.raises(SessionError, match="out of memory"):
                await collect(h.coordinator, ask("hello"))
        await until_blocked()
        assert h.ring.closed == {(stage.node, h.ring.sent[0].session) for stage in h.ring.plan.stages}


async def test_a_flood_of_answers_is_bounded_and_ignored() -> None:
    async with house() as h:
        h.ring.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, h.coordinator, ask("hello"))
            await until(lambda: bool(h.ring.sent))
            segment = h.ring.sent[0]
            for position in range(10 * INBOX):
                h.coordinator.drawn(Drawn(segment.session, segment.epoch, segment.attempt, 10_000 + position, (1,)))
            (turn,) = h.coordinator._turns.values()
            assert len(turn._inbox) <= INBOX
            h.ring.go_on()
        assert h.coordinator.stats().stale >= INBOX


async def test_a_tokenizer_that_fails_ends_one_answer() -> None:
    async with house() as h:

        def fail(token: int, /) -> str:
            raise RuntimeError("a bug")

        whole = h.letters.push
        h.letters.push = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a bug"):
            await collect(h.coordinator, ask("hello"))
        h.letters.push = whole  # type: ignore[method-assign]
        assert (await collect(h.coordinator, ask("hello")))[1] is FinishReason.LENGTH
