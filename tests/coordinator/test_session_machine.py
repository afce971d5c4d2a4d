"""A session against a ring and a draft model that do whatever they may do.

Stages run in any order, links lose and reorder across attempts, stages refuse and forget, or hold a beginning already,
answers are repeated, epochs change, drafts are right, wrong, short or late. Whatever happens, the text is that of plain
decoding.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.coordinator.chunks import MIN_PREFILL_ROWS
from swarm.coordinator.events import (
    AskDraft,
    Begin,
    CloseEverywhere,
    Drafted,
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
from swarm.coordinator.pace import MAX_K, Speculation
from swarm.coordinator.requests import FinishReason
from swarm.coordinator.session import RUNNING, Counters, Session, SessionLimits, State
from swarm.coordinator.token_log import prompt_kinds
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Refused, RowKind, Segment
from tests.coordinator.fake_ring import STOP, FakeRing, next_token
from tests.coordinator.fake_stages import MODEL, NODE, Row, make_plan, prompt_rows

LIMITS = SessionLimits(
    chunk_rows=4, sibling_rows=3, window=5, wait_s=50.0, answer_s=10.0, answer_row_s=0.5, draft_s=3.0
)
CONTEXT = 40
TOKENS = st.integers(98, 100)
SPECULATION = st.builds(
    Speculation,
    enabled=st.sampled_from([True, True, True, False]),
    max_k=st.sampled_from([MAX_K, 3]),
    fixed_k=st.sampled_from([None, 1, 2, 3, 5, 10]),
    fixed_depth=st.sampled_from([None, 1, 2, 4]),
    ngram=st.booleans(),
    model=st.booleans(),
)


class SessionMachine(RuleBasedStateMachine):
    @initialize(speculation=SPECULATION, stages=st.integers(1, 3))
    def start(self, speculation: Speculation, stages: int) -> None:
        self.speculation = speculation
        self.now = 0.0
        self.epoch = 1
        self.counters = Counters()
        self.plan = make_plan(1, stages)
        self.count = 0
        self.new_session()

    def new_session(self) -> None:
        self.count += 1
        self.ring = FakeRing(self.plan)  # a coordinator hands a session its own messages only
        name = SessionId(f"aaaaaaaa-{self.count:x}-00000000")
        self.session = Session(name, NODE, self.plan, LIMITS, self.counters, self.speculation)
        self.truth: list[Row] = []
        self.turn: Begin | None = None
        self.ask: AskDraft | None = None
        self.drawn = 0
        self.sent: dict[int, tuple[int, int]] = {}
        """Attempt to the number and the end of its last segment."""
        self.forgotten = False

    # --- what people do ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.turn is None)
    @rule(
        data=st.data(),
        new=st.lists(TOKENS, max_size=20),
        most=st.integers(1, 20),
        stop=st.booleans(),
        model=st.booleans(),
        remembered=st.booleans(),
    )
    def begin(self, data: st.DataObject, new: list[int], most: int, stop: bool, model: bool, remembered: bool) -> None:
        if self.session.state is State.DONE:
            self.new_session()
        kept = data.draw(st.integers(0, len(self.truth)))
        prompt = ((*(token for token, _ in self.truth[:kept]), *new) or (98,))[: CONTEXT - 1]
        stops = frozenset({STOP} if stop else ())
        held = self.adopt(data, prompt)
        before = bytes(kind for _, kind in self.truth[: min(kept, max(0, len(prompt) - 2))])
        kinds = before.rstrip(bytes((RowKind.PREFILL,))) if remembered and not held else b""
        self.turn = Begin(
            prompt, MODEL, CONTEXT, max_tokens=most, stop_tokens=stops, held=held, kinds=kinds, draft_model=model
        )
        self.drawn = 0
        fed = max(self.session.log.fed, held)
        effects = self.session.handle(self.turn, self.now)
        reused = self.session.reused
        assert reused <= max(0, min(fed, len(prompt) - 2))
        rows = [(token, RowKind(kind)) for token, kind in zip(prompt, prompt_kinds(len(prompt), kinds), strict=True)]
        assert (self.truth + rows[len(self.truth) : held])[:reused] == rows[:reused]
        assert not remembered or reused >= min(fed, kept, len(prompt) - 2) - 2, "a rewind costs two tokens more at most"
        assert reused >= held
        sent = [effect.segment.start for effect in effects if isinstance(effect, SendSegment)]
        assert not sent or sent[0] == reused, "what is held is not run again"
        self.truth = rows
        self.carry_out(effects)

    def adopt(self, data: st.DataObject, prompt: tuple[int, ...]) -> int:
        """Positions of a new session's prompt that the stages hold, as others computed it; later ones hold no more."""
        if len(self.session.log) or not self.plan.stages or len(prompt) <= MIN_PREFILL_ROWS:
            return 0
        held = len(prompt) - MIN_PREFILL_ROWS
        for stage in self.ring.stages:
            held = data.draw(st.integers(0, held))
            stage.caches[self.session.id] = prompt_rows(prompt)[:held]
        return held

    @precondition(lambda self: self.turn is not None)
    @rule(reason=st.sampled_from([FinishReason.STOP, FinishReason.CANCELLED]))
    def end(self, reason: FinishReason) -> None:
        effects = self.session.handle(End(reason), self.now)
        assert Finish(reason) in effects
        assert not any(isinstance(effect, SendSegment | AskDraft) for effect in effects)
        self.turn = self.ask = None

    # --- what the world does ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.turn is not None and self.plan.stages)
    @rule(steps=st.integers(1, 60), right=st.booleans())
    def run_undisturbed(self, steps: int, right: bool) -> None:
        for _ in range(steps):
            self.advance(right)
            self.session.validate_state()

    @precondition(lambda self: self.ring.busy)
    @rule(data=st.data(), refuse=st.sampled_from([False] * 7 + [True]))
    def move_one(self, data: st.DataObject, refuse: bool) -> None:
        stage = data.draw(st.sampled_from(self.ring.busy))
        link = self.ring.links[stage]
        if link and data.draw(st.booleans()):
            self.ring.arrive(stage, data.draw(st.sampled_from(sorted({segment.attempt for segment in link}))))
        else:
            self.ring.step(stage, refuse)

    @precondition(lambda self: self.ring.answers)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        answers = self.ring.answers
        attempt = data.draw(st.sampled_from(sorted({message.attempt for message in answers})))
        message = next(m for m in answers if m.attempt == attempt)
        if not again:
            answers.remove(message)
        self.handle(message)

    @precondition(lambda self: any(self.ring.links))
    @rule(data=st.data())
    def drop_segment(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from([link for link in self.ring.links if link]))
        del link[data.draw(st.integers(0, len(link) - 1))]

    @precondition(lambda self: self.ring.answers)
    @rule(data=st.data())
    def drop_answer(self, data: st.DataObject) -> None:
        del self.ring.answers[data.draw(st.integers(0, len(self.ring.answers) - 1))]

    @precondition(lambda self: self.plan.stages)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.ring.forget(data.draw(st.integers(0, len(self.ring.stages) - 1)), self.session.id)
        self.forgotten = True

    @precondition(lambda self: self.ask is not None)
    @rule(right=st.integers(0, 10), count=st.integers(0, 10))
    def answer_draft(self, right: int, count: int) -> None:
        self.draft(right, count)

    @rule(attempt=st.integers(0, 3), start=st.integers(0, 20), tokens=st.lists(TOKENS, max_size=3))
    def answer_a_draft_nobody_waits_for(self, attempt: int, start: int, tokens: list[int]) -> None:
        if self.ask is None:
            self.handle(Drafted(attempt, start, tuple(tokens), 0.1))

    @rule(stages=st.integers(0, 3), kv_tokens=st.sampled_from([0, 0, 30]))
    def change_plan(self, stages: int, kv_tokens: int) -> None:
        self.epoch += 1
        self.plan = make_plan(self.epoch, stages, kv_tokens)
        self.ring = FakeRing(self.plan)
        self.forgotten = False
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
        self.ring.links[0].clear()
        self.handle(LinkLost(self.session.attempt, "closed"))

    @precondition(lambda self: self.session.deadline is not None)
    @rule(share=st.sampled_from([0.5, 1.0, 1.0, 1.0]))
    def wait(self, share: float) -> None:
        assert self.session.deadline is not None
        self.now = max(self.now, self.now + share * (self.session.deadline - self.now))
        self.handle(Tick())

    # --- what the session does --------------------------------------------------------------------------------------

    def advance(self, right: bool) -> bool:
        """One move of a world without faults, the last stages first; False where nothing is to be done."""
        self.now += 0.01
        if self.ring.answers:
            self.handle(self.ring.answers.pop(0))
        elif self.ring.busy:
            self.ring.advance(self.ring.busy[-1])
        elif self.ask is not None:
            self.draft(MAX_K if right else 0, self.ask.count)
        else:
            return False
        return True

    def draft(self, right: int, count: int) -> None:
        """Answer the question: so many tokens that the target would draw, then others, `count` in all."""
        ask, self.ask = self.ask, None
        assert ask is not None
        known = min(len(self.truth), ask.start)
        rows = self.truth[:known] + [(token, RowKind.DECODE) for token in ask.tokens[known:]]
        for i in range(min(count, ask.count)):
            rows.append((next_token(rows) + (i >= right), RowKind.DECODE))
        self.handle(Drafted(ask.attempt, ask.start, tuple(token for token, _ in rows[ask.start :]), 0.05))

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
                self.ring.links[0].append(effect.segment)
            elif isinstance(effect, AskDraft):
                self.check_ask(effect)
                self.ask = effect
            elif isinstance(effect, Finish):
                self.check_finish(effect.reason)
            elif isinstance(effect, Fail):
                assert self.session.state is State.DONE
                assert any(isinstance(other, CloseEverywhere) for other in effects)
                self.turn = self.ask = None

    def check_emitted(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            assert token == next_token(self.truth), "not the token of plain decoding"
            self.truth.append((token, RowKind.DECODE))
            self.drawn += 1

    def check_segment(self, segment: Segment) -> None:
        assert self.turn is not None
        start, end = segment.start, segment.start + len(segment.tokens)
        rows = [(token, segment.kind) for token in segment.tokens]
        assert rows[: max(0, len(self.truth) - start)] == self.truth[start:end], "ids and kinds of the log"
        assert end <= len(self.truth) or segment.wanted == len(rows), "every drafted row is verified"
        assert (segment.epoch, segment.attempt) == (self.plan.epoch, self.session.attempt)
        number, follows = self.sent.get(segment.attempt, (-1, start))
        assert (segment.number, start) == (number + 1, follows), "a gap between two segments"
        assert number >= 0 or start <= len(self.truth)
        self.sent[segment.attempt] = (segment.number, end)
        if segment.kind is RowKind.PREFILL:
            assert 2 <= len(rows) <= LIMITS.chunk_rows
        else:
            assert 1 <= len(rows) <= max(LIMITS.sibling_rows, self.speculation.max_k + 1)
        assert end < self.limit, "the last token's row is never run"

    def check_ask(self, ask: AskDraft) -> None:
        assert self.turn is not None
        assert self.turn.draft_model
        assert self.speculation.model
        assert ask.attempt == self.session.attempt
        assert ask.start == len(ask.tokens)
        assert ask.tokens[: len(self.truth)] == tuple(token for token, _ in self.truth[: ask.start])
        assert 1 <= ask.count <= self.speculation.max_k

    def check_finish(self, reason: FinishReason) -> None:
        assert self.turn is not None
        if reason is FinishReason.STOP:
            assert next_token(self.truth) in self.turn.stop_tokens
        else:
            assert reason is FinishReason.LENGTH
            assert len(self.truth) >= self.limit
        self.turn = self.ask = None

    @property
    def limit(self) -> int:
        assert self.turn is not None
        assert self.turn.max_tokens is not None
        prompt_end = len(self.truth) - self.drawn
        return min(CONTEXT, self.plan.kv_tokens or CONTEXT, prompt_end + self.turn.max_tokens)

    @invariant()
    def valid(self) -> None:
        self.session.validate_state()
        fed, certain = self.session.log.fed, self.session.log.certain
        assert self.counters.mismatches == 0
        assert self.session.log.ids(0, certain) == tuple(token for token, _ in self.truth[:certain])
        if self.session.state in (*RUNNING, State.IDLE) and not self.forgotten:
            for stage in self.ring.stages:
                assert stage.caches.get(self.session.id, [])[:fed] == self.truth[:fed], "fed means held by all"
        usage = self.session.speculation
        assert usage.accepted + usage.rejected <= usage.drafted

    def teardown(self) -> None:
        """Left alone with a ring, an answer ends."""
        if not hasattr(self, "session") or self.turn is None:
            return
        if not self.plan.stages:
            self.change_plan(2, 0)
        for _ in range(2000):
            if self.turn is None:
                return
            if not self.advance(right=True):
                self.wait(1.0)
        raise AssertionError(f"no end: {self.session.state}")


SessionMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSessionMachine = SessionMachine.TestCase
