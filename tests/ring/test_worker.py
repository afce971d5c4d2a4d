"""The stage worker: what waits runs in a good order, off the event loop, and nobody's trouble is another's."""

from __future__ import annotations

from dataclasses import replace

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from swarm.protocol import limits
from swarm.protocol.errors import CapacityError, DeadlineError, DeviceError, LinkClosedError, SwarmError
from swarm.protocol.ids import Epoch
from swarm.protocol.messages import Drawn, Refused, Segment
from swarm.ring import worker as worker_module
from swarm.ring.worker import StageWorker
from tests.loopwatch import loopwatch
from tests.ring.stage_harness import (
    ALONE,
    ASKER,
    EPOCH,
    FIRST,
    LAST,
    STRANGER,
    WAIT_S,
    HeldEngine,
    PostBox,
    adopt,
    segment,
    serving,
    until,
    with_hidden,
)

pytestmark = pytest.mark.anyio

# --- results --------------------------------------------------------------------------------------------------------


async def test_a_stage_hands_its_rows_to_the_next() -> None:
    box, asked = PostBox(), segment(1, 0, 5, wanted=2)
    async with serving(HeldEngine(last=False), box) as worker:
        await worker.deliver(asked)
        ((to, message),) = await box.wait(1)
    assert to == LAST
    assert isinstance(message, Segment)
    assert message.hidden is not None
    assert message.hidden.shape == (5, 2)
    assert replace(message, hidden=None) == asked


async def test_the_last_stage_sends_tokens_straight_to_the_coordinator() -> None:
    box = PostBox()
    async with serving(HeldEngine(first=False), box, LAST) as worker:
        await worker.deliver(with_hidden(segment(1, 0, 5, wanted=2)))
        ((to, message),) = await box.wait(1)
    assert to == ASKER
    assert isinstance(message, Drawn)
    assert (message.session, message.epoch, message.attempt) == (segment(1).session, EPOCH, 0)
    assert message.position == 4, "the row at 3 is the first that is wanted; its token is that at 4"
    assert len(message.tokens) == 2


async def test_a_chunk_that_wants_no_token_brings_none() -> None:
    box = PostBox()
    async with serving(HeldEngine(), box, plan=ALONE) as worker:
        await worker.deliver(segment(1, 0, 4, wanted=0))
        await worker.deliver(segment(1, 4, 2))
        ((_, message),) = await box.wait(1)
    assert isinstance(message, Drawn)
    assert message.position == 6


async def test_what_waits_runs_in_one_forward() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        engine.gate.clear()
        await worker.deliver(segment(1))
        await engine.entered()
        for session in (2, 3, 4):
            await worker.deliver(segment(session))
        assert worker.stats().waiting == 3
        engine.gate.set()
        await box.wait(4)
        assert [len(batch) for batch in engine.batches] == [1, 3]
        await worker.deliver(segment(1, 2, 1))
        await box.wait(5)
        assert worker.stats().step_ms > 0
        assert worker.stats().waiting == 0


async def test_a_lost_segment_is_not_replaced_by_rows_of_an_older_attempt() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1, 0, 6))
        await box.wait(1)
        second = replace(segment(1, 2, 1, attempt=1), number=1)
        await worker.deliver(second)
        assert "gap in the attempt" in (await refusal(box, 2)).reason
        await worker.deliver(replace(segment(1, 1, 1, attempt=1), number=0))
        await worker.deliver(second)
        await box.wait(4)
        assert all(isinstance(message, Drawn) for _, message in box.sent[2:])
        await worker.deliver(replace(segment(1, 3, 1, attempt=1), number=3))
        assert "gap in the attempt" in (await refusal(box, 5)).reason
    assert len(engine.batches) == 3


# --- refusals -------------------------------------------------------------------------------------------------------


async def refusal(box: PostBox, count: int = 1) -> Refused:
    to, message = (await box.wait(count))[-1]
    assert to == ASKER
    assert isinstance(message, Refused)
    return message


async def test_a_segment_of_another_epoch_is_refused() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box) as worker:
        for number, epoch in enumerate((Epoch(2, FIRST), Epoch(4, FIRST), Epoch(3, LAST)), 1):
            await worker.deliver(replace(segment(1), epoch=epoch))
            message = await refusal(box, number)
            assert (message.epoch, message.fatal) == (epoch, False)
    assert engine.batches == []


async def test_nobody_touches_the_session_of_another() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1))
        await box.wait(1)
        await worker.deliver(replace(segment(1, attempt=9), coordinator=STRANGER))
        to, message = (await box.wait(2))[-1]
        assert to == STRANGER
        assert isinstance(message, Refused)
        assert message.fatal
        worker.close_session(segment(1).session, STRANGER)
        await worker.deliver(segment(1, 2, 1))
        await box.wait(3)
    assert engine.closed == []
    assert isinstance(box.sent[-1][1], Drawn)


async def test_a_full_stage_gives_up_the_session_that_was_unused_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SESSIONS_PER_STAGE", 2)
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        for number, session in enumerate((1, 2, 3), 1):
            await worker.deliver(segment(session))
            await box.wait(number)
        assert engine.closed == [segment(1).session]
        await worker.deliver(segment(1, 2, 1))
        message = await refusal(box, 4)
    assert "gap" in message.reason
    assert not message.fatal, "its coordinator replays it"


async def test_a_full_stage_gives_up_no_session_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SESSIONS_PER_STAGE", 2)
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        engine.gate.clear()
        await worker.deliver(segment(1))
        await engine.entered()
        await worker.deliver(segment(1, 2))
        await worker.deliver(segment(2))
        await worker.deliver(segment(3))
        message = await refusal(box)
        assert message.session == segment(3).session
        assert not message.fatal
        engine.gate.set()
        sent = [message for _, message in await box.wait(4)]
    assert [type(message) for message in sent[1:]] == [Drawn] * 3


async def test_what_is_refused_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sends nonsense under ever new names holds nothing here, and nobody up."""
    monkeypatch.setattr(limits, "MAX_SESSIONS_PER_STAGE", 2)
    box = PostBox()
    async with serving(HeldEngine(), box, plan=ALONE) as worker:
        for session in range(1, 9):
            await worker.deliver(segment(session, start=-1))
        await box.wait(8)
        await worker.deliver(segment(9))
        assert isinstance((await box.wait(9))[-1][1], Drawn)


async def test_asking_for_many_sessions_takes_no_more_places_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SESSIONS_PER_STAGE", 3)
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        for number, session in enumerate(range(1, 9), 1):
            worker.adopt(adopt(session, 40))
            await box.wait(number)
        await until(lambda: len(engine.closed) == 5)
        assert engine.closed == [segment(session).session for session in range(1, 6)]


async def test_caches_that_rest_give_way_to_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RESTED_S", -1.0)
    box, engine = PostBox(), HeldEngine(kv_tokens=128)
    async with serving(engine, box, plan=ALONE) as worker:
        for number, session in enumerate((1, 2), 1):
            await worker.deliver(segment(session, 0, 40))
            await box.wait(number)
        await worker.deliver(segment(3, 0, 40))
        sent = [message for _, message in await box.wait(3)]
    assert engine.closed == [segment(1).session, segment(2).session][: len(engine.closed)]
    assert engine.closed
    assert isinstance(sent[-1], Drawn)


async def test_caches_in_use_do_not_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RESTED_S", 1e9)
    box, engine = PostBox(), HeldEngine(kv_tokens=64)
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1, 0, 40))
        await box.wait(1)
        await worker.deliver(segment(2, 0, 40))
        message = await refusal(box, 2)
    assert "full" in message.reason
    assert not message.fatal
    assert segment(1).session not in engine.closed


@pytest.mark.parametrize(
    ("bad", "reason", "fatal"),
    [
        (replace(segment(1), tokens=()), "without sense", False),
        (replace(segment(1), wanted=3), "without sense", False),
        (replace(segment(1), wanted=-1), "without sense", False),
        (replace(segment(1), start=-1), "without sense", False),
        (replace(segment(1), start=limits.MAX_CONTEXT_TOKENS - 1), "without sense", False),
        (segment(1, 7), "gap", False),
        (replace(segment(1), tokens=(1, 32_000)), "vocabulary", False),
        (replace(segment(1), tokens=(-1, 2)), "vocabulary", False),
        (replace(segment(1), hidden=np.zeros((2, 2), np.float32)), "another stage", False),
        (segment(1, 0, 5000), "longer than the KV cache", True),
    ],
)
async def test_a_segment_that_cannot_run_is_refused_alone(bad: Segment, reason: str, fatal: bool) -> None:
    box, engine = PostBox(), HeldEngine()
    engine.gate.clear()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(9))
        await engine.entered()
        await worker.deliver(segment(2))
        await worker.deliver(bad)
        engine.gate.set()
        sent = [message for _, message in await box.wait(3)]
    (refused,) = [message for message in sent if isinstance(message, Refused)]
    assert reason in refused.reason
    assert refused.fatal is fatal
    assert {one.session for one in sent if isinstance(one, Drawn)} == {segment(2).session, segment(9).session}


async def test_a_session_that_does_not_fit_takes_no_other_with_it() -> None:
    box, engine = PostBox(), HeldEngine(kv_tokens=96)
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1, 0, 30))
        await box.wait(1)
        engine.gate.clear()
        await worker.deliver(segment(2, 0, 2))
        engine.began.clear()
        await engine.entered()
        await worker.deliver(segment(1, 30, 1))
        await worker.deliver(segment(3, 0, 60))
        engine.gate.set()
        sent = [message for _, message in await box.wait(4)]
    (refused,) = [message for message in sent if isinstance(message, Refused)]
    assert refused.session == segment(3).session
    assert not refused.fatal
    assert "full" in refused.reason
    drawn = [message for message in sent if isinstance(message, Drawn)]
    assert [one.session for one in drawn] == [segment(s).session for s in (1, 2, 1)]


async def test_when_the_cache_is_full_the_session_that_began_last_gives_way_and_the_oldest_ends() -> None:
    box, engine = PostBox(), HeldEngine(kv_tokens=128)
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1, 0, 60))
        await box.wait(1)
        await worker.deliver(replace(segment(2, 0, 60), coordinator=STRANGER))
        await box.wait(2)
        await worker.deliver(segment(1, 60, 20))
        sent = await box.wait(4)
        refused = [(to, message) for to, message in sent if isinstance(message, Refused)]
        assert [(to, message.session, message.fatal) for to, message in refused] == [
            (STRANGER, segment(2).session, False)
        ]
        assert isinstance(sent[-1][1], Drawn)
        assert sent[-1][1].session == segment(1).session
        await worker.deliver(replace(segment(2, 0, 60, attempt=1), coordinator=STRANGER))
        _, message = (await box.wait(5))[-1]
        assert isinstance(message, Refused), "it began last again, and does not push the other out"
        assert message.session == segment(2).session


@pytest.mark.parametrize("error", [DeviceError("gone"), CapacityError("full")])
async def test_an_engine_that_fails_refuses_the_whole_batch(error: SwarmError) -> None:
    box, engine = PostBox(), HeldEngine()
    engine.error = error
    engine.gate.clear()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1))
        await engine.entered()
        await worker.deliver(segment(2))
        await worker.deliver(segment(3))
        engine.gate.set()
        sent = [message for _, message in await box.wait(3)]
        engine.error = None
        await worker.deliver(segment(4))
        await box.wait(4)
    assert [(type(one), getattr(one, "fatal", None)) for one in sent] == [(Refused, False)] * 3
    assert isinstance(box.sent[-1][1], Drawn), "the stage goes on"


async def test_a_refused_segment_does_not_leave_the_next_waiting() -> None:
    """All heads of the queue are refused, and what is behind them runs."""
    box, engine = PostBox(), HeldEngine()
    engine.gate.clear()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(9))
        await engine.entered()
        await worker.deliver(segment(1, 7))
        await worker.deliver(segment(1, 0))
        engine.gate.set()
        sent = [message for _, message in await box.wait(3)]
    assert sorted(type(message).__name__ for message in sent) == ["Drawn", "Drawn", "Refused"]


async def test_what_arrives_while_a_refusal_is_sent_runs() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        box.open = anyio.Event()
        await worker.deliver(segment(1, 7))
        await until(lambda: worker.stats().waiting == 0)
        await worker.deliver(segment(2))
        worker.close_session(segment(1).session, ASKER)
        box.open.set()
        sent = [message for _, message in await box.wait(2)]
        await until(lambda: segment(1).session in engine.closed)
    assert [type(message) for message in sent] == [Refused, Drawn]


@pytest.mark.parametrize("error", [LinkClosedError("cut"), DeadlineError("slow")])
async def test_a_lost_next_stage_is_told_to_the_coordinator(error: SwarmError) -> None:
    box = PostBox()
    box.gone[LAST] = error
    async with serving(HeldEngine(last=False), box) as worker:
        await worker.deliver(segment(1))
        message = await refusal(box)
        assert not message.fatal
        assert str(error) in message.reason


@pytest.mark.parametrize("error", [LinkClosedError("cut"), DeadlineError("slow")])
async def test_a_lost_coordinator_stops_nobody(error: SwarmError) -> None:
    box = PostBox()
    box.gone[STRANGER] = error
    async with serving(HeldEngine(), box, plan=ALONE) as worker:
        await worker.deliver(replace(segment(1), coordinator=STRANGER))
        await worker.deliver(replace(segment(2, 9), coordinator=STRANGER))
        await worker.deliver(segment(3))
        ((to, message),) = await box.wait(1)
    assert to == ASKER
    assert isinstance(message, Drawn)


# --- readers ----------------------------------------------------------------------------------------------------------


async def test_a_coordinator_that_does_not_read_holds_up_nobody() -> None:
    box = PostBox()
    box.held[STRANGER] = anyio.Event()
    async with serving(HeldEngine(), box, plan=ALONE) as worker:
        await worker.deliver(replace(segment(1), coordinator=STRANGER))
        await worker.deliver(replace(segment(2, 9), coordinator=STRANGER))
        for number in (1, 2, 3):
            await worker.deliver(segment(3, number * 2 - 2))
            await box.wait(number)
    assert [to for to, _ in box.sent] == [ASKER] * 3


async def test_a_coordinator_that_reads_nothing_at_all_loses_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.ring.outbox.Outbox.__init__.__defaults__", (2,))
    box, engine = PostBox(), HeldEngine()
    box.held[ASKER] = anyio.Event()
    async with serving(engine, box, plan=ALONE) as worker:
        for start in range(0, 10, 2):
            await worker.deliver(segment(1, start))
        await until(lambda: engine.closed == [segment(1).session])


# --- closing --------------------------------------------------------------------------------------------------------


async def test_a_session_is_closed_when_no_forward_runs() -> None:
    box, engine = PostBox(), HeldEngine()
    engine.gate.clear()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1))
        await engine.entered()
        await worker.deliver(segment(1, 2, 1))
        worker.close_session(segment(1).session, ASKER)
        assert engine.closed == []
        assert worker.stats().waiting == 0
        engine.gate.set()
        await until(lambda: engine.closed == [segment(1).session])
    assert engine.free_tokens == 4096


async def test_sessions_of_a_coordinator_that_is_gone_are_closed() -> None:
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker:
        await worker.deliver(segment(1))
        await worker.deliver(segment(2))
        await worker.deliver(replace(segment(3), coordinator=STRANGER))
        await box.wait(3)
        worker.close_coordinator(ASKER)
        await until(lambda: len(engine.closed) == 2)
    assert set(engine.closed) == {segment(1).session, segment(2).session}


async def test_a_new_worker_begins_with_an_empty_cache() -> None:
    engine = HeldEngine()
    engine.run([segment(1, 0, 40)])
    async with serving(engine, PostBox(), plan=ALONE):
        await until(lambda: engine.free_tokens == 4096)


async def test_cancelling_waits_for_the_forward_that_runs() -> None:
    box, engine = PostBox(), HeldEngine()
    worker = StageWorker(FIRST, ALONE, engine, box.send)
    ended = anyio.Event()
    forwards_at_the_end: list[int] = []

    async def run() -> None:
        try:
            await worker.run()
        finally:
            forwards_at_the_end.append(engine.ended)
            ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        engine.gate.clear()
        await worker.deliver(segment(1))
        await engine.entered()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            for _ in range(100):
                # The cancellation arrives within a few turns of the loop.
                await anyio.lowlevel.checkpoint()
            assert not ended.is_set()
            engine.gate.set()
            with anyio.fail_after(WAIT_S):
                await ended.wait()
    assert forwards_at_the_end == [1]
    assert box.sent == []


def test_the_loop_turns_while_a_forward_runs() -> None:
    async def main() -> None:
        box, engine = PostBox(), HeldEngine()
        async with serving(engine, box, plan=ALONE) as worker:
            for start in range(0, 6, 2):
                engine.gate.clear()
                await worker.deliver(segment(1, start))
                await engine.entered()
                await anyio.sleep(0.4)
                engine.gate.set()
                await box.wait(start // 2 + 1)

    with loopwatch(0.3):
        anyio.run(main)


# --- back-pressure --------------------------------------------------------------------------------------------------


async def test_a_full_queue_makes_the_sender_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_SEGMENTS", 3)
    box, engine = PostBox(), HeldEngine()
    delivered = []

    async with serving(engine, box, plan=ALONE) as worker, anyio.create_task_group() as senders:

        async def send_all() -> None:
            for session in range(2, 12):
                await worker.deliver(segment(session))
                delivered.append(session)

        engine.gate.clear()
        await worker.deliver(segment(1))
        await engine.entered()
        senders.start_soon(send_all)
        await until(lambda: len(delivered) == 3)
        await anyio.wait_all_tasks_blocked()
        assert len(delivered) == 3
        assert worker.stats().waiting == 3
        engine.gate.set()
        await box.wait(11)
    assert len(delivered) == 10


async def test_a_session_closed_while_it_waits_for_room_can_be_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator does so when it gets an answer that nobody asked for."""
    monkeypatch.setattr(limits, "MAX_QUEUED_SEGMENTS", 1)
    box, engine = PostBox(), HeldEngine()
    async with serving(engine, box, plan=ALONE) as worker, anyio.create_task_group() as senders:
        engine.gate.clear()
        await worker.deliver(segment(1))
        await engine.entered()
        await worker.deliver(segment(2))
        senders.start_soon(worker.deliver, segment(3))
        await anyio.wait_all_tasks_blocked()
        worker.close_session(segment(3).session, ASKER)
        engine.gate.set()
        await box.wait(3)
        worker.validate_state()
        for session in (1, 2, 3):
            worker.close_session(segment(session).session, ASKER)
        await until(lambda: engine.free_tokens == 4096)


async def test_who_waits_for_room_is_let_go_when_the_stage_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that waited on would never read its link again."""
    monkeypatch.setattr(limits, "MAX_QUEUED_SEGMENTS", 1)
    box, engine = PostBox(), HeldEngine()
    async with anyio.create_task_group() as senders:
        async with serving(engine, box, plan=ALONE) as worker:
            engine.gate.clear()
            await worker.deliver(segment(1))
            await engine.entered()
            await worker.deliver(segment(2))
            senders.start_soon(worker.deliver, segment(3))
            await anyio.wait_all_tasks_blocked()
            assert box.sent == []
        message = await refusal(box)
    assert message.session == segment(3).session
    assert not message.fatal
