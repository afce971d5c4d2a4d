"""What a stage that is asked for equal beginnings holds, whom it asks on, and who waits for whose prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.protocol.messages import Adopted, Segment
from swarm.ring import beginnings
from swarm.ring import worker as worker_module
from tests.ring.stage_harness import (
    ALONE,
    ASKER,
    EPOCH,
    LAST,
    STRANGER,
    HeldEngine,
    PostBox,
    adopt,
    segment,
    serving,
    until,
)

pytestmark = pytest.mark.anyio


async def test_a_stage_begins_a_session_with_what_it_holds_and_asks_the_next() -> None:
    box, engine = PostBox(), HeldEngine(last=False)
    async with serving(engine, box) as worker:
        await worker.deliver(segment(1, rows=100))
        await box.wait(1)
        worker.adopt(adopt(2, 120))
        await box.wait(2)
        assert box.sent[-1] == (LAST, adopt(2, 100)), "no more than it holds"
        await worker.deliver(segment(2, 100, 10))
        await box.wait(3)
        assert isinstance(box.sent[-1][1], Segment), "it goes on behind them"


async def test_the_last_stage_says_what_all_hold() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1, rows=40))
        worker.adopt(adopt(2, 80))
        await box.wait(2)
        assert box.sent[-1] == (ASKER, Adopted(segment(2).session, EPOCH, 40))


async def test_a_stage_that_holds_nothing_ends_the_asking() -> None:
    box = PostBox()
    async with serving(HeldEngine(last=False), box) as worker:
        worker.adopt(adopt(2, 80))
        await box.wait(1)
        assert box.sent == [(ASKER, Adopted(segment(2).session, EPOCH, 0))]


async def test_who_asks_at_the_same_moment_waits_for_the_first_and_shares_its_rows() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        for session in (1, 2, 3):
            worker.adopt(adopt(session, 80))
        assert await box.wait(1) == [(ASKER, Adopted(segment(1).session, EPOCH, 0))]
        engine.gate.clear()
        await worker.deliver(segment(1, rows=90))
        await engine.entered()
        assert len(box.sent) == 1, "the rows are not there yet"
        engine.gate.set()
        await box.wait(4)
        assert box.sent[2:] == [(ASKER, Adopted(segment(session).session, EPOCH, 80)) for session in (2, 3)]


async def test_a_later_stage_waits_for_rows_that_arrived_before_the_question() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, LAST) as worker:
        engine.gate.clear()
        await worker.deliver(segment(9))
        await engine.entered()
        for start, rows in ((0, 60), (60, 60)):
            await worker.deliver(segment(1, start, rows))
        worker.adopt(adopt(2, 100))
        engine.gate.set()
        await box.wait(4)
        (answer,) = (message for _, message in box.sent if isinstance(message, Adopted))
        assert answer.positions == 100


async def test_whoever_waits_for_a_prompt_that_is_cancelled_becomes_the_first() -> None:
    box = PostBox()
    async with serving(HeldEngine(), box, plan=ALONE) as worker:
        for session in (1, 2, 3, 4):
            worker.adopt(adopt(session, 80))
        await box.wait(1)
        worker.close_session(segment(3).session, ASKER)
        worker.close_session(segment(1).session, ASKER)
        await box.wait(2)
        await worker.deliver(segment(2, rows=80))
        await box.wait(4)
        answers = [message for _, message in box.sent if isinstance(message, Adopted)]
        assert answers == [Adopted(segment(session).session, EPOCH, 0) for session in (1, 2)] + [
            Adopted(segment(4).session, EPOCH, 80)
        ], "the third was closed while it waited"


async def test_a_prompt_that_does_not_come_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginnings, "STALLED_S", 0.02)
    box = PostBox()
    async with serving(HeldEngine(), box, plan=ALONE) as worker:
        for session in (1, 2):
            worker.adopt(adopt(session, 80))
        await box.wait(2)
        assert box.sent[-1] == (ASKER, Adopted(segment(2).session, EPOCH, 0))


async def test_who_waits_for_a_prompt_is_not_given_up_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RESTED_S", -1.0)
    box = PostBox()
    async with serving(HeldEngine(kv_tokens=128), box, plan=ALONE) as worker:
        await worker.deliver(segment(9, rows=40))
        await box.wait(1)
        for session in (1, 2):
            worker.adopt(replace(adopt(session, 80), tokens=tuple(range(200, 280))))
        await box.wait(2)
        await worker.deliver(segment(3, rows=96))
        await box.wait(4)
        answers = [message for _, message in box.sent if isinstance(message, Adopted)]
        assert [one.session for one in answers] == [segment(1).session, segment(2).session]


async def test_an_engine_that_cannot_share_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldEngine, "shares", False)
    monkeypatch.setattr(HeldEngine, "adopt", lambda *_: 0)
    box = PostBox()
    async with serving(HeldEngine(), box, plan=ALONE) as worker:
        for session in (1, 2):
            worker.adopt(adopt(session, 80))
        await box.wait(2)
        assert all(message.positions == 0 for _, message in box.sent if isinstance(message, Adopted))


async def test_a_session_that_is_closed_before_its_turn_takes_nothing() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1, rows=100))
        await box.wait(1)
        worker.close_session(segment(1).session, ASKER)
        worker.adopt(adopt(2, 80))
        worker.close_session(segment(2).session, ASKER)
        worker.adopt(adopt(3, 80))
        await box.wait(2)
        assert box.sent[-1] == (ASKER, Adopted(segment(3).session, EPOCH, 80))
        worker.close_session(segment(3).session, ASKER)
        await until(lambda: segment(3).session in engine.closed)
        worker.validate_state()
        assert not worker.sessions
    assert engine.free_tokens == 4096


async def test_nobody_begins_the_session_of_another_anew() -> None:
    box = PostBox()
    async with serving(HeldEngine(), box, plan=ALONE) as worker:
        await worker.deliver(segment(1, rows=100))
        await box.wait(1)
        worker.adopt(adopt(1, 80, STRANGER))
        await box.wait(2)
        assert box.sent[-1] == (STRANGER, Adopted(segment(1).session, EPOCH, 0))
