"""A pool that is full: who waits in line, and until when."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import pytest

from swarm.coordinator.coordinator import CoordinatorLimits
from swarm.protocol.errors import SessionError
from tests.coordinator.fake_stages import make_plan
from tests.coordinator.house import LIMITS, ask, collect, expected, house, until, until_blocked

pytestmark = pytest.mark.anyio


async def test_who_does_not_fit_waits_in_line_and_is_told_its_place() -> None:
    async with house(make_plan(1, 2, kv_tokens=60)) as h:
        h.ring.hold()
        places: dict[int, list[int]] = {0: [], 1: [], 2: []}
        answers: dict[int, str] = {}

        async def user(number: int) -> None:
            text = ""
            async for delta in h.coordinator.generate(ask(f"question {number}")):
                places[number].append(delta.place)
                text += delta.text
            answers[number] = text

        async with anyio.create_task_group() as users:
            for number in range(3):
                users.start_soon(user, number)
                await until(lambda: h.coordinator.stats().running + h.coordinator.stats().queued == number + 1)  # noqa: B023
            assert (h.coordinator.stats().running, h.coordinator.stats().queued) == (1, 2)
            await until(lambda: places[2] == [2])
            assert places[1] == [1]
            h.ring.go_on()
        assert answers == {number: expected(ask(f"question {number}")) for number in range(3)}
        assert places[2][:3] == [2, 1, 0]
        assert h.coordinator.stats().queued == 0


async def test_who_gives_up_in_line_makes_room() -> None:
    async with house(make_plan(1, 2, kv_tokens=60)) as h:
        h.ring.hold()
        async with anyio.create_task_group() as users:
            first, second = anyio.CancelScope(), anyio.CancelScope()

            async def user(scope: anyio.CancelScope) -> None:
                with scope:
                    await collect(h.coordinator, ask("question"))

            for scope in (first, second):
                users.start_soon(user, scope)
                await until_blocked()
            await until(lambda: h.coordinator.stats().queued == 1)
            second.cancel()
            await until(lambda: h.coordinator.stats().queued == 0)
            first.cancel()
        h.ring.go_on()
        assert (await collect(h.coordinator, ask("question")))[0] == expected(ask("question"))


async def test_a_place_in_line_is_not_kept_for_ever() -> None:
    limits = CoordinatorLimits(session=LIMITS.session, line_s=0.05)
    async with house(make_plan(1, 2, kv_tokens=60), limits) as h:
        h.ring.hold()
        async with aclosing(h.coordinator.generate(ask("one"))) as first, anyio.create_task_group() as users:
            users.start_soon(anext, first)
            await until(lambda: h.coordinator.stats().running == 1)
            with pytest.raises(SessionError, match="no room"):
                await collect(h.coordinator, ask("two"))
            users.cancel_scope.cancel()
