"""Several rings under one coordinator."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from swarm.coordinator.coordinator import CoordinatorLimits
from swarm.coordinator.idle import IdleLimits
from swarm.protocol.ids import Epoch
from swarm.ring.port import RingLoad
from tests.coordinator.fake_stages import NODE, make_plan
from tests.coordinator.house import House, ask, collect, expected, house, until, until_blocked

pytestmark = pytest.mark.anyio


def served(h: House) -> list[int]:
    """Sessions that each ring holds something of."""
    return [len(stages.caches) for stages in h.ring.by_first.values()]


async def test_sessions_are_spread_over_the_rings_and_answer_alike() -> None:
    async with house(make_plan(1, 2, rings=2)) as h:
        requests = [ask(f"question {number}") for number in range(6)]
        answers: dict[int, str] = {}

        async def answer(number: int) -> None:
            answers[number] = (await collect(h.coordinator, requests[number]))[0]

        h.ring.hold()
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(answer, number)
            await until(lambda: h.coordinator.stats().running == 6)
            assert h.coordinator.stats().ring_sessions == (3, 3)
            h.ring.go_on()
        assert [answers[number] for number in range(6)] == [expected(request) for request in requests]
        assert served(h) == [3, 3]


async def test_what_others_run_counts_too() -> None:
    async with house(make_plan(1, 2, rings=2)) as h:
        h.ring.elsewhere = (RingLoad(sessions=4), RingLoad())
        for number in range(3):
            await collect(h.coordinator, ask(f"question {number}"))
        assert served(h) == [0, 3]


async def test_a_session_knows_how_many_share_its_ring() -> None:
    async with house(make_plan(1, 2, rings=2)) as h:
        h.ring.elsewhere = (RingLoad(sessions=2), RingLoad())
        h.ring.hold()
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(collect, h.coordinator, ask(f"question {number}"))
            await until(lambda: h.coordinator.stats().running == 4)
            assert h.coordinator.stats().ring_sessions == (1, 3)
            shared = sorted(h.coordinator.company(turn).others for turn in h.coordinator._turns.values())
            assert shared == [2, 2, 2, 2]
            h.ring.go_on()


async def test_the_next_turn_returns_to_its_ring() -> None:
    async with house(make_plan(1, 1, rings=2)) as h:
        h.ring.elsewhere = (RingLoad(sessions=2), RingLoad())
        text, _, _ = await collect(h.coordinator, ask("a first question"))
        h.ring.elsewhere = (RingLoad(), RingLoad(sessions=9))
        again = ask("a first question", text, "and a second")
        text, _, usage = await collect(h.coordinator, again)
        assert usage.reused_tokens
        assert served(h) == [0, 1]


async def test_a_new_plan_places_running_sessions_anew() -> None:
    async with house(make_plan(1, 2)) as h:
        requests = [ask(f"question {number}", max_tokens=30) for number in range(4)]
        answers: dict[int, str] = {}

        async def answer(number: int) -> None:
            answers[number] = (await collect(h.coordinator, requests[number]))[0]

        h.ring.hold()
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(answer, number)
            await until(lambda: h.coordinator.stats().running == 4)
            h.ring.change_plan(make_plan(2, 1, rings=2))
            h.ring.go_on()
            assert h.coordinator.stats().ring_sessions == (2, 2)
        assert [answers[number] for number in range(4)] == [expected(request, 30) for request in requests]
        assert served(h) == [2, 2]


@pytest.mark.parametrize("lost", [0, 1])
async def test_the_sessions_of_a_ring_that_stays_notice_nothing(lost: int) -> None:
    """Those of the ring that goes are replayed on it, though both had one epoch."""
    before = make_plan(1, 2, rings=2)
    stays = before.rings[1 - lost]
    after = replace(make_plan(2, 2), stages=stays, ring_epochs=(before.epoch,))
    async with house(before) as h:
        requests = [ask(f"question {number}", max_tokens=30) for number in range(4)]
        answers: dict[int, str] = {}

        async def answer(number: int) -> None:
            answers[number] = (await collect(h.coordinator, requests[number]))[0]

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(answer, number)
            await until(lambda: len(h.ring.sent) > 20)
            h.ring.hold()
            await until_blocked()
            assert h.coordinator.stats().ring_sessions == (2, 2)
            h.ring.change_plan(after)
            h.ring.go_on()
            assert h.coordinator.stats().ring_sessions == (4,)
        assert [answers[number] for number in range(4)] == [expected(request, 30) for request in requests]
        assert (h.coordinator.stats().replays, h.coordinator.stats().mismatches) == (2, 0)
        assert h.coordinator.stats().idle == 4
        h.ring.change_plan(replace(after, epoch=Epoch(3, NODE)))
        assert h.coordinator.stats().idle == 4
        h.ring.change_plan(make_plan(4, 1))
        assert h.coordinator.stats().idle == 0


async def test_a_session_that_ends_is_closed_on_its_ring_alone() -> None:
    plan = make_plan(1, 2, rings=2)
    async with house(plan, CoordinatorLimits(idle=IdleLimits(sessions=0))) as h:
        h.ring.elsewhere = (RingLoad(sessions=2), RingLoad())
        await collect(h.coordinator, ask("a question"))
        await until(lambda: bool(h.ring.closed))
        await until_blocked()
        assert {node for node, _ in h.ring.closed} == {stage.node for stage in plan.rings[1]}
