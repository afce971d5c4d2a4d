"""A session against a ring that delays, drops, repeats, reorders across attempts, refuses and changes its epoch."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.coordinator.events import (
    Begin,
    CloseEverywhere,
    Effect,
    Emit,
    End,
    Event,
    Fail,
    Finish,
    LinkLost,
    PlanChanged,
    SendSegment,
    Tick,
)
from swarm.coordinator.requests import FinishReason
from swarm.coordinator.session import RUNNING, Counters, Session, SessionLimits, State
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Drawn, Refused, RowKind, Segment
from tests.coordinator.fake_stages import MODEL, NODE, PLAIN, FakeStages, Row, make_plan, next_token, prompt_rows

LIMITS = SessionLimits(chunk_rows=4, sibling_rows=3, window=3, wait_s=50.0, answer_s=10.0, answer_row_s=0.5)
TOKENS = st.integers(97, 100)
STOP = 122


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = 1
        self.counters = Counters()
        self.plan = make_plan(1, stages=2)
        self.stages = FakeStages(self.plan.epoch)
        self.count = 0
        self.to_stages: deque[Segment] = deque()
        self.to_us: list[Drawn | Refused] = []
        self.new_session()

    def new_session(self) -> None:
        self.count += 1
        self.to_us.clear()  # a coordinator hands a session its own messages only
        self.to_stages.clear()
        self.session = Session(
            SessionId(f"aaaaaaaa-{self.count:x}-00000000"), NODE, self.plan, LIMITS, self.counters, PLAIN
        )
        self.truth: list[Row] = []
        self.turn: Begin | None = None
        self.drawn = 0
        self.next_start: dict[int, int] = {}

    # --- what the world does ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.turn is None)
    @rule(data=st.data(), new=st.lists(TOKENS, max_size=30), most=st.integers(1, 12), stop=st.booleans())
    def begin(self, data: st.DataObject, new: list[int], most: int, stop: bool) -> None:
        if self.session.state is State.DONE:
            self.new_session()
        kept = data.draw(st.integers(0, len(self.truth)))
        prompt = (*(token for token, _ in self.truth[:kept]), *new) or (97,)
        self.turn = Begin(prompt, MODEL, 1000, max_tokens=most, stop_tokens=frozenset({STOP} if stop else ()))
        self.drawn = 0
        fed = self.session.log.fed
        effects = self.session.handle(self.turn, self.now)
        reused = self.session.reused
        assert reused <= max(0, min(fed, len(prompt) - 2))
        assert [token for token, _ in self.truth[:reused]] == list(prompt[:reused])
        assert reused >= min(fed, kept, len(prompt) - 2) - 1, "a rewind costs one token more at most"
        self.truth = self.truth[:reused] + prompt_rows(prompt[reused:])
        self.carry_out(effects)

    @precondition(lambda self: self.turn is not None and self.plan.stages)
    @rule(steps=st.integers(1, 40))
    def run_undisturbed(self, steps: int) -> None:
        for _ in range(steps):
            if self.to_us:
                self.handle(self.to_us.pop(0))
            elif self.to_stages:
                self.run_segment()
        self.valid()

    @precondition(lambda self: self.turn is not None and self.plan.stages)
    @rule()
    def run_to_the_end(self) -> None:
        self.run_undisturbed(200)

    @precondition(lambda self: self.to_stages)
    @rule()
    def run_segment(self) -> None:
        answer = self.stages.run(self.to_stages.popleft())
        if answer is not None:
            self.to_us.append(answer)

    @precondition(lambda self: self.to_us)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        attempt = data.draw(st.sampled_from(sorted({message.attempt for message in self.to_us})))
        message = next(m for m in self.to_us if m.attempt == attempt)
        if not again:
            self.to_us.remove(message)
        self.handle(message)

    @precondition(lambda self: self.to_stages)
    @rule()
    def drop_segment(self) -> None:
        self.to_stages.popleft()

    @precondition(lambda self: self.to_us)
    @rule(data=st.data())
    def drop_answer(self, data: st.DataObject) -> None:
        del self.to_us[data.draw(st.integers(0, len(self.to_us) - 1))]

    @rule(stages=st.integers(0, 3))
    def change_plan(self, stages: int) -> None:
        self.epoch += 1
        self.plan = make_plan(self.epoch, stages)
        self.stages = FakeStages(self.plan.epoch)
        self.handle(PlanChanged(self.plan))

    @rule()
    def repeat_plan(self) -> None:
        before = self.session.attempt
        self.handle(PlanChanged(self.plan))
        assert self.session.attempt == before

    @precondition(lambda self: self.session.state in RUNNING)
    @rule(fatal=st.sampled_from([False, False, False, True]), old=st.booleans())
    def refuse(self, fatal: bool, old: bool) -> None:
        attempt = self.session.attempt - old
        self.handle(Refused(self.session.id, self.plan.epoch, attempt, "refused", fatal))
        assert old or (self.session.state is State.DONE) == fatal

    @precondition(lambda self: self.session.state in RUNNING)
    @rule()
    def lose_link(self) -> None:
        self.handle(LinkLost(self.session.attempt, "closed"))

    @precondition(lambda self: self.turn is not None)
    @rule(reason=st.sampled_from([FinishReason.STOP, FinishReason.CANCELLED]))
    def end(self, reason: FinishReason) -> None:
        effects = self.session.handle(End(reason), self.now)
        assert Finish(reason) in effects
        assert not any(isinstance(effect, SendSegment) for effect in effects)
        self.turn = None

    @precondition(lambda self: self.session.deadline is not None)
    @rule(share=st.sampled_from([0.5, 1.0, 1.0, 1.0]))
    def wait(self, share: float) -> None:
        assert self.session.deadline is not None
        self.now = max(self.now, self.now + share * (self.session.deadline - self.now))
        self.handle(Tick())

    # --- what the session does --------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        self.carry_out(self.session.handle(event, self.now))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self.check_emitted(effect.tokens)
        for effect in effects:
            if isinstance(effect, SendSegment):
                assert effect.to == self.plan.stages[0].node
                self.check_segment(effect.segment)
                self.to_stages.append(effect.segment)
            elif isinstance(effect, Finish):
                self.check_finish(effect.reason)
            elif isinstance(effect, Fail):
                assert self.session.state is State.DONE
                assert any(isinstance(other, CloseEverywhere) for other in effects)
                self.turn = None

    def check_emitted(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            assert token == next_token(self.truth), "not the token of plain decoding"
            self.truth.append((token, RowKind.DECODE))
            self.drawn += 1

    def check_segment(self, segment: Segment) -> None:
        assert self.turn is not None
        start, end = segment.start, segment.start + len(segment.tokens)
        assert [(token, segment.kind) for token in segment.tokens] == self.truth[start:end], "ids and kinds of the log"
        assert (segment.epoch, segment.attempt) == (self.plan.epoch, self.session.attempt)
        assert start == self.next_start.get(segment.attempt, start), "a gap between two segments"
        assert segment.attempt in self.next_start or start in (0, self.session.reused)
        self.next_start[segment.attempt] = end
        limit = LIMITS.chunk_rows if segment.kind is RowKind.PREFILL else LIMITS.sibling_rows
        assert (1 if segment.kind is RowKind.DECODE else 2) <= len(segment.tokens) <= limit

    def check_finish(self, reason: FinishReason) -> None:
        assert self.turn is not None
        if reason is FinishReason.STOP:
            assert next_token(self.truth) in self.turn.stop_tokens
        else:
            assert reason is FinishReason.LENGTH
            assert self.drawn == self.turn.max_tokens
        self.turn = None

    @invariant()
    def valid(self) -> None:
        self.session.validate_state()
        fed = self.session.log.fed
        assert self.counters.mismatches == 0
        if self.session.state in (*RUNNING, State.IDLE) and self.session.plan.stages:
            assert self.stages.caches.get(self.session.id, [])[:fed] == self.truth[:fed], "fed means held by all"

    def teardown(self) -> None:
        """Left alone with a ring, an answer ends."""
        if self.turn is None:
            return
        if not self.plan.stages:
            self.change_plan(2)
        for _ in range(1000):
            if self.turn is None:
                return
            if self.to_us:
                self.handle(self.to_us.pop(0))
            elif self.to_stages:
                self.run_segment()
            else:
                self.wait(1.0)
        raise AssertionError(f"no end: {self.session.state}")


SessionMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
TestSessionMachine = SessionMachine.TestCase
