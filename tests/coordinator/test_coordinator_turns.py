"""Caches between turns, and what the ring holds of a prompt already."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import anyio
import pytest

from swarm.coordinator import adoption
from swarm.coordinator.coordinator import CoordinatorLimits
from swarm.coordinator.idle import IdleLimits
from swarm.protocol.messages import Refused, RowKind
from tests.coordinator.fake_stages import decode_behind, make_plan, prompt_rows
from tests.coordinator.house import LIMITS, Letters, ask, collect, expected, house, until, until_blocked

pytestmark = pytest.mark.anyio


async def test_a_second_turn_feeds_only_what_is_new() -> None:
    async with house() as h:
        text, *_ = await collect(h.coordinator, ask("tell me a story"))
        first_session = h.ring.sent[0].session
        assert h.coordinator.stats().idle == 1
        fed = len(h.ring.stages.caches[first_session])
        before = len(h.ring.sent)
        text, _, usage = await collect(h.coordinator, ask("tell me a story", text, "and then?"))
        new = h.ring.sent[before:]
        assert {segment.session for segment in new} == {first_session}
        assert new[0].start == usage.reused_tokens == fed
        assert new[0].kind is RowKind.PREFILL
        assert len(text) == 20


async def test_two_requests_never_share_a_session() -> None:
    async with house() as h:
        await collect(h.coordinator, ask("the same question"))
        before = len(h.ring.sent)
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(collect, h.coordinator, ask("the same question"))
            h.ring.hold()
            await until(lambda: h.coordinator.stats().running == 2)
            h.ring.go_on()
        assert len({segment.session for segment in h.ring.sent[before:]}) == 2


@pytest.mark.parametrize("between", ["nothing", "not kept", "a new ring", "taken by another"])
async def test_a_second_answer_does_not_say_what_became_of_the_cache(between: str) -> None:
    """The rows of the first answer were decoded, and are decoded again where their cache is lost."""
    beginning = "You are an assistant that answers in one short sentence, and never with more. Who?"
    limits = replace(LIMITS, idle=IdleLimits(sessions=0)) if between == "not kept" else LIMITS
    async with house(limits=limits) as h:
        text, *_ = await collect(h.coordinator, ask(beginning))
        if between == "a new ring":
            h.ring.change_plan(make_plan(2, 3))
        elif between == "taken by another":
            await collect(h.coordinator, ask(beginning + "!"))
        again, _, usage = await collect(h.coordinator, ask(beginning, text, "and then?"))
        rows = prompt_rows(Letters().encode(f"user:{beginning}\nassistant:"))
        rows += [(ord(letter), RowKind.DECODE) for letter in text[:-1]]
        rows += prompt_rows(Letters().encode(f"{text[-1]}\nuser:and then?\nassistant:"))
        assert again == "".join(map(chr, decode_behind(rows, 20)))
        prompt, shared = len(f"user:{beginning}\nassistant:"), len(f"user:{beginning}")
        held = {"nothing": prompt + 19, "not kept": prompt - 2, "a new ring": 0, "taken by another": shared}
        assert usage.reused_tokens == held[between]


async def test_an_equal_beginning_is_not_run_again() -> None:
    same = "You are an assistant that answers in one short sentence, and never with more. "
    async with house() as h, aclosing(h.coordinator.generate(ask(same + "Who?", max_tokens=None))) as first:
        await anext(first)
        request = ask(same + "How?")
        text, _, usage = await collect(h.coordinator, request)
        assert text == expected(request)
        sent = next(segment for segment in h.ring.sent if segment.session != h.ring.sent[0].session)
        assert sent.start == usage.reused_tokens == 80


async def test_a_ring_that_does_not_say_what_it_holds_runs_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "ANSWER_S", 0.01)
    async with house() as h:
        h.ring.answers_adoptions = False
        request = ask("a prompt that is long enough to be asked about, which takes some more words")
        text, _, usage = await collect(h.coordinator, request)
        assert (text, usage.reused_tokens) == (expected(request), 0)


async def test_a_question_that_is_cancelled_while_it_is_asked_leaves_nothing_behind() -> None:
    async with house() as h:
        h.ring.answers_adoptions = False
        request = ask("a prompt that is long enough to be asked about, which takes some more words")
        with anyio.move_on_after(0.05):
            await collect(h.coordinator, request)
        await until(lambda: len(h.ring.closed) == 2)
        assert (h.coordinator.stats().running, h.coordinator.stats().idle) == (0, 0)


async def test_a_question_ends_with_the_plan_it_was_asked_in() -> None:
    async with house() as h, anyio.create_task_group() as tasks:
        h.ring.answers_adoptions = False
        request = ask("a prompt that is long enough to be asked about, which takes some more words")
        found: list[str] = []

        async def read() -> None:
            found.append((await collect(h.coordinator, request))[0])

        tasks.start_soon(read)
        await until(lambda: h.coordinator.stats().running == 1)
        await until_blocked()
        h.ring.change_plan(make_plan(2, 1))
        with anyio.fail_after(adoption.ANSWER_S / 2):
            await until(lambda: bool(found))
        assert found == [expected(request)]


@pytest.mark.parametrize("positions", [-1, 10_000])
async def test_a_stage_that_claims_nonsense_is_not_believed(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house() as h:
        monkeypatch.setattr(h.ring.stages, "adopt", lambda *_: positions)
        request = ask("a prompt that is long enough to be asked about, which takes some more words")
        text, _, usage = await collect(h.coordinator, request)
        assert (text, usage.reused_tokens) == (expected(request), 0)


async def test_a_refusal_makes_kept_sessions_give_way() -> None:
    async with house() as h:
        await collect(h.coordinator, ask("the first question"))
        kept = h.ring.sent[0].session
        h.ring.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, h.coordinator, ask("something else entirely"))
            await until(lambda: h.ring.sent[-1].session != kept)
            segment = h.ring.sent[-1]
            h.coordinator.refused(Refused(segment.session, segment.epoch, segment.attempt, "full", fatal=False))
            assert h.coordinator.stats().idle == 0
            h.ring.go_on()
        assert (h.ring.plan.stages[1].node, kept) in h.ring.closed


async def test_kept_sessions_are_few_and_not_for_ever() -> None:
    limits = CoordinatorLimits(session=LIMITS.session, idle=IdleLimits(sessions=2, seconds=0.2))
    async with house(limits=limits) as h:
        for question in ("one", "another", "a third and different"):
            await collect(h.coordinator, ask(question))
        assert h.coordinator.stats().idle <= 2
        await until(lambda: h.coordinator.stats().idle == 0)
        await until_blocked()
        sessions = {segment.session for segment in h.ring.sent}
        assert h.ring.closed == {(stage.node, session) for stage in h.ring.plan.stages for session in sessions}


async def test_kept_sessions_give_way_where_the_ring_is_small() -> None:
    async with house(make_plan(1, 1, kv_tokens=120)) as h:
        await collect(h.coordinator, ask("first", max_tokens=10))
        assert h.coordinator.stats().idle == 1
        await collect(h.coordinator, ask("?" * 60, max_tokens=10))
        await until_blocked()
        assert (h.ring.plan.stages[0].node, h.ring.sent[0].session) in h.ring.closed
        assert h.coordinator.stats().idle == 0, "half of the cache at most is kept"


async def test_a_plan_change_forgets_kept_caches() -> None:
    async with house() as h:
        await collect(h.coordinator, ask("hello there, ring"))
        h.ring.change_plan(make_plan(2, 1))
        assert h.coordinator.stats().idle == 0
        _, _, usage = await collect(h.coordinator, ask("hello there, ring"))
        assert usage.reused_tokens == 0
