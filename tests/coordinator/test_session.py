"""Single decisions of a session; `test_session_machine` looks for what was not thought of."""

from __future__ import annotations

import pytest

from swarm.coordinator.events import (
    Begin,
    CloseEverywhere,
    Effect,
    Emit,
    End,
    Fail,
    Finish,
    LinkLost,
    PlanChanged,
    SendSegment,
    Tick,
)
from swarm.coordinator.requests import FinishReason
from swarm.coordinator.session import Counters, Session, SessionLimits, State
from swarm.protocol.errors import CapacityError, SessionError
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Drawn, Refused, RowKind, Segment
from swarm.protocol.plan import NO_PLAN, Plan
from tests.coordinator.fake_stages import MODEL, NODE, PLAIN, make_plan

LIMITS = SessionLimits(chunk_rows=4, wait_s=100.0, answer_s=10.0, answer_row_s=1.0, backoff_s=1.0, backoff_max_s=4.0)
PROMPT = tuple(range(10))


def make_session(plan: Plan) -> Session:
    return Session(SessionId("aaaaaaaa-1-00000000"), NODE, plan, LIMITS, Counters(), PLAIN)


def begin(prompt: tuple[int, ...] = PROMPT, **options: object) -> Begin:
    return Begin(prompt, MODEL, 100, **options)  # type: ignore[arg-type]


def segments(effects: list[Effect]) -> list[Segment]:
    return [effect.segment for effect in effects if isinstance(effect, SendSegment)]


def answer(segment: Segment, token: int = 99) -> Drawn:
    end = segment.start + len(segment.tokens)
    return Drawn(segment.session, segment.epoch, segment.attempt, end, (token,))


def failure(effects: list[Effect]) -> Fail:
    assert isinstance(effects[0], CloseEverywhere)
    assert isinstance(effects[1], Fail)
    return effects[1]


def started(plan: Plan | None = None, **options: object) -> tuple[Session, Segment]:
    """A session that has drawn its first token, and the segment in flight."""
    session = make_session(plan or make_plan(1, 4))
    sent = segments(session.handle(begin(**options), 0.0))
    effects = session.handle(answer(sent[-1]), 1.0)
    assert session.state is State.DECODING
    return session, segments(effects)[0]


def test_a_prompt_goes_in_chunks_with_a_window_of_one_more_than_stages() -> None:
    session = make_session(make_plan(1, 1))
    first, second = segments(session.handle(begin(), 0.0))
    assert [first.start, second.start] == [0, 4]
    assert {s.kind for s in (first, second)} == {RowKind.PREFILL}
    (third,) = segments(session.handle(answer(first), 1.0))
    assert (third.start, third.tokens) == (8, (8, 9))
    assert session.state is State.PREFILLING
    assert session.log.fed == 4


def test_an_answer_to_a_later_chunk_answers_the_earlier_ones() -> None:
    session = make_session(make_plan(1, 4))
    *_, last = segments(session.handle(begin(), 0.0))
    (row,) = segments(session.handle(answer(last, 50), 1.0))
    assert (row.start, row.kind, row.tokens, row.wanted) == (10, RowKind.DECODE, (50,), 1)
    session.validate_state()


def test_stop_tokens_are_not_emitted() -> None:
    session, row = started(stop_tokens=frozenset({7}))
    assert session.handle(answer(row, 7), 2.0) == [Finish(FinishReason.STOP)]
    assert session.log.fed == len(session.log) == 11


def test_max_tokens_and_context_end_with_length() -> None:
    session, row = started(max_tokens=2)
    assert session.handle(answer(row, 5), 2.0) == [Emit((5,)), Finish(FinishReason.LENGTH)]
    session, row = started(make_plan(1, 4, kv_tokens=12))
    assert session.handle(answer(row, 5), 2.0) == [Emit((5,)), Finish(FinishReason.LENGTH)]


def test_a_prompt_that_never_fits_is_refused_with_the_numbers() -> None:
    session = make_session(make_plan(1, 1, kv_tokens=10))
    error = failure(session.handle(begin(), 0.0)).error
    assert isinstance(error, CapacityError)
    assert "at most 9 tokens" in str(error)
    assert "10 tokens" in str(error)


def test_a_ring_that_shrinks_below_the_answer_ends_it_with_length() -> None:
    session, _ = started()
    effects = session.handle(PlanChanged(make_plan(2, 1, kv_tokens=11)), 2.0)
    assert effects[-1] == Finish(FinishReason.LENGTH)


def test_a_new_epoch_replays_the_log_and_goes_on() -> None:
    session, row = started()
    session.handle(answer(row, 50), 2.0)
    plan = make_plan(2, 4)
    sent = segments(session.handle(PlanChanged(plan), 3.0))
    assert session.state is State.REPLAYING
    assert [(s.start, s.kind, len(s.tokens)) for s in sent] == [
        (0, RowKind.PREFILL, 4),
        (4, RowKind.PREFILL, 4),
        (8, RowKind.PREFILL, 2),
        (10, RowKind.DECODE, 2),
    ]
    assert {s.attempt for s in sent} == {session.attempt}
    assert session.handle(answer(row, 51), 3.5) == [], "an answer of the old attempt"
    assert session.counters.stale == 1
    assert session.handle(answer(sent[2], 99), 4.0) == [], "the ring draws again what it drew"
    assert session.counters.mismatches == 0
    assert Emit((51,)) in session.handle(answer(sent[3], 51), 5.0)


def test_a_replayed_token_that_differs_is_counted_and_the_text_stays() -> None:
    session, _ = started()
    sent = segments(session.handle(PlanChanged(make_plan(2, 4)), 3.0))
    session.handle(answer(sent[2], 98), 4.0)
    assert session.counters.mismatches == 1
    assert session.log.ids(10, 11) == (99,)


def test_no_ring_is_waited_for_and_then_given_up_with_the_reason() -> None:
    session = make_session(NO_PLAN)
    assert session.handle(begin(), 0.0) == []
    assert session.state is State.WAITING
    lacking = Plan(make_plan(2, 0).epoch, MODEL, missing_bytes=3_000_000_000)
    session.handle(PlanChanged(lacking), 60.0)
    assert session.handle(Tick(), 99.0) == []
    error = failure(session.handle(Tick(), 100.0)).error
    assert isinstance(error, SessionError)
    assert "lacks 3.0 GB" in str(error)


def test_a_ring_that_comes_in_time_is_used() -> None:
    session = make_session(NO_PLAN)
    session.handle(begin(), 0.0)
    assert segments(session.handle(PlanChanged(make_plan(1, 2)), 99.0))
    assert session.state is State.PREFILLING


def test_another_model_ends_the_session() -> None:
    session, _ = started()
    plan = make_plan(2, 1)
    other = Plan(plan.epoch, None, plan.stages)
    assert "another model" in str(failure(session.handle(PlanChanged(other), 2.0)).error)


def test_silence_is_tried_once_more_and_then_ends_the_session() -> None:
    session, row = started()
    assert session.deadline == 1.0 + 10.0 + 1.0
    assert session.handle(Tick(), 11.9) == []
    again = segments(session.handle(Tick(), 12.0))
    assert again[0].attempt == row.attempt + 1
    assert again[0].start == 0
    assert "does not answer" in str(failure(session.handle(Tick(), 40.0)).error)


def test_progress_after_silence_forgives_it() -> None:
    session, _ = started()
    first = segments(session.handle(Tick(), 12.0))[0]
    session.handle(answer(first), 13.0)
    assert segments(session.handle(Tick(), 60.0))
    assert session.state is State.REPLAYING


def test_refusals_back_off_and_are_given_up_after_the_wait() -> None:
    session, row = started()
    now, pauses = 2.0, []
    segment = row
    while session.state is not State.DONE:
        session.handle(Refused(session.id, segment.epoch, segment.attempt, "the KV cache is full", fatal=False), now)
        assert session.state is State.WAITING
        assert session.deadline is not None
        pauses.append(session.deadline - now)
        now = session.deadline
        effects = session.handle(Tick(), now)
        if session.state is not State.DONE:
            segment = segments(effects)[0]
    assert pauses[:4] == [1.0, 2.0, 4.0, 4.0]
    assert now == 102.0
    assert "the KV cache is full" in str(failure(effects).error)


def test_a_fatal_refusal_ends_the_session_with_its_reason() -> None:
    session, row = started()
    effects = session.handle(Refused(session.id, row.epoch, row.attempt, "too long", fatal=True), 2.0)
    assert "too long" in str(failure(effects).error)
    assert session.state is State.DONE


def test_a_new_epoch_comes_before_the_next_try() -> None:
    session, row = started()
    session.handle(LinkLost(row.attempt, "closed"), 2.0)
    assert session.state is State.WAITING
    assert segments(session.handle(PlanChanged(make_plan(2, 1)), 2.1))


def test_the_end_keeps_what_was_fed_for_the_next_turn() -> None:
    session, row = started()
    assert session.handle(End(FinishReason.CANCELLED), 2.0) == [Finish(FinishReason.CANCELLED)]
    assert session.state is State.IDLE
    (piece,) = segments(session.handle(begin((*PROMPT, 99, 77)), 3.0))
    assert session.reused == 10
    assert (piece.start, piece.kind, piece.tokens) == (10, RowKind.PREFILL, (99, 77))
    assert piece.attempt > row.attempt


def test_a_cancelled_session_that_nobody_holds_is_closed() -> None:
    plan = make_plan(1, 2)
    session = make_session(plan)
    session.handle(begin(), 0.0)
    effects = session.handle(End(FinishReason.CANCELLED), 1.0)
    assert effects == [CloseEverywhere(tuple(s.node for s in plan.stages)), Finish(FinishReason.CANCELLED)]
    assert session.state is State.DONE


def test_segments_over_old_rows_are_numbered_and_need_not_wait_for_each_other() -> None:
    session, _ = started()
    session.handle(End(FinishReason.CANCELLED), 2.0)
    sent = segments(session.handle(begin((*PROMPT, *range(50, 70))), 3.0))
    assert [segment.start for segment in sent] == [10, 14, 18, 22, 26]
    assert [segment.number for segment in sent] == [0, 1, 2, 3, 4]
    assert len({segment.attempt for segment in sent}) == 1


def test_a_new_epoch_ends_an_idle_session() -> None:
    session, _ = started()
    session.handle(End(FinishReason.CANCELLED), 2.0)
    session.handle(PlanChanged(make_plan(2, 1)), 3.0)
    assert session.state is State.DONE


def test_a_second_turn_at_once_is_a_bug() -> None:
    session, _ = started()
    with pytest.raises(ValueError, match="decoding"):
        session.handle(begin(), 2.0)
