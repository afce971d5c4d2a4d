"""Readers of answers: slow ones, and those who go."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import pytest

from swarm.coordinator.turn import READER_BUFFER
from tests.coordinator.fake_stages import make_plan
from tests.coordinator.house import ask, collect, expected, house, until, until_blocked

pytestmark = pytest.mark.anyio


async def test_a_reader_who_has_not_read_the_end_does_not_hold_the_session() -> None:
    async with house() as h, aclosing(h.coordinator.generate(ask("quick", max_tokens=READER_BUFFER + 1))) as deltas:
        await anext(deltas)
        await until_blocked()
        assert (h.coordinator.stats().running, h.coordinator.stats().idle) == (0, 1)


async def test_a_paused_turn_that_is_cancelled_after_a_plan_change_keeps_nothing() -> None:
    async with house() as h:
        async with aclosing(h.coordinator.generate(ask("go on for ever", max_tokens=None))) as deltas:
            await anext(deltas)
            await until_blocked()
            h.ring.change_plan(make_plan(2, 1))
        await until(lambda: h.coordinator.stats().running == 0)
        assert h.coordinator.stats().idle == 0


async def test_closing_the_generator_stops_sending_and_keeps_the_cache() -> None:
    async with house() as h:
        request = ask("go on for ever", max_tokens=None)
        async with aclosing(h.coordinator.generate(request)) as deltas:
            await anext(deltas)
            await anext(deltas)
        await until_blocked()
        assert h.coordinator.stats().running == 0
        assert h.coordinator.stats().idle == 1
        sent = len(h.ring.sent)
        await until_blocked()
        assert len(h.ring.sent) == sent
        text, _, usage = await collect(h.coordinator, ask("go on for ever"))
        assert usage.reused_tokens >= 28
        assert len(text) == 20


async def test_a_cancelled_reader_stops_sending() -> None:
    async with house() as h:
        h.ring.hold()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(collect, h.coordinator, ask("x" * 100))
                await until_blocked()
                await until(lambda: len(h.ring.sent) == 3)
                scope.cancel()
        sent = len(h.ring.sent)
        h.ring.go_on()
        await until_blocked()
        assert len(h.ring.sent) == sent == 3
        assert h.coordinator.stats().running == 0


async def test_a_slow_reader_pauses_the_session() -> None:
    async with house() as h:
        async with aclosing(h.coordinator.generate(ask("quick", max_tokens=500))) as deltas:
            first = await anext(deltas)
            await until_blocked()
            drawn = len(h.ring.sent)
            assert drawn < READER_BUFFER + 10
            await until_blocked()
            assert len(h.ring.sent) == drawn
            text = first.text + "".join([delta.text async for delta in deltas])
        assert text == expected(ask("quick"), 500)


async def test_a_slow_reader_holds_up_nobody() -> None:
    async with house() as h, aclosing(h.coordinator.generate(ask("quick", max_tokens=500))) as deltas:
        text = (await anext(deltas)).text
        for number in range(8):
            assert (await collect(h.coordinator, ask(f"question {number}")))[0] == expected(ask(f"question {number}"))
            (turn,) = h.coordinator._turns.values()
            assert turn.results.statistics().current_buffer_used <= READER_BUFFER
            assert len(turn._inbox) <= 1, "nothing is drawn that nobody takes"
        text += "".join([delta.text async for delta in deltas])
        assert text == expected(ask("quick"), 500)


async def test_a_plan_change_while_the_reader_is_slow() -> None:
    async with house() as h:
        async with aclosing(h.coordinator.generate(ask("quick", max_tokens=150))) as deltas:
            text = (await anext(deltas)).text
            await until_blocked()
            h.ring.change_plan(make_plan(2, 1))
            h.ring.change_plan(make_plan(3, 3))
            text += "".join([delta.text async for delta in deltas])
        assert text == expected(ask("quick"), 150)


async def test_a_session_closed_with_a_segment_under_way_is_closed_again() -> None:
    async with house() as h:
        h.ring.hold()
        with anyio.move_on_after(10) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(collect, h.coordinator, ask("hello"))
                await until(lambda: bool(h.ring.sent))
                scope.cancel()
        await until(lambda: len(h.ring.closed) == 2)
        h.ring.closed.clear()
        h.ring.go_on()
        await until(lambda: h.coordinator.stats().stale > 0)
        await until(lambda: len(h.ring.closed) == 2)
        assert {session for _, session in h.ring.closed} == {h.ring.sent[0].session}
