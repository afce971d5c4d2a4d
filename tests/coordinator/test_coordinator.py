"""The coordinator over a ring in one process: fake stages behind a fake port."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from swarm.coordinator import adoption
from swarm.coordinator.coordinator import Coordinator, CoordinatorLimits
from swarm.coordinator.events import AskDraft
from swarm.coordinator.idle import IdleLimits
from swarm.coordinator.language import LanguageModel
from swarm.coordinator.pace import Speculation
from swarm.coordinator.requests import ChatMessage, Delta, FinishReason, GenerateRequest, Usage
from swarm.coordinator.session import SessionLimits
from swarm.coordinator.turn import INBOX, READER_BUFFER
from swarm.protocol.errors import CapacityError, DeviceError, LinkClosedError, SessionError, SwarmError, UsageError
from swarm.protocol.ids import NodeId, SessionId, is_session_id
from swarm.protocol.messages import Adopt, Adopted, CloseSession, Drawn, Message, Refused, RowKind, Segment
from swarm.protocol.plan import NO_PLAN, Plan
from swarm.ring.port import RingListener, RingLoad
from tests.coordinator.fake_stages import MODEL, NODE, FakeStages, make_plan, plain_decode

pytestmark = pytest.mark.anyio

LIMITS = CoordinatorLimits(session=SessionLimits(chunk_rows=8, sibling_rows=4, backoff_s=0.01))


class Letters:
    """A tokenizer whose tokens are characters."""

    stop_tokens: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def render_chat(self, messages: Sequence[tuple[str, str]], /) -> str:
        self.threads.add(threading.get_ident())
        return "".join(f"{role}:{content}\n" for role, content in messages) + "assistant:"

    def encode(self, text: str, /) -> list[int]:
        return [ord(character) for character in text]

    def stream(self) -> Letters:
        return self

    def push(self, token: int, /) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


class FakeRing:
    """Runs segments in the order they were sent; `hold` stops it, `break_links` makes sending fail."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.node = NODE
        self._make_stages()
        self.sent: list[Segment] = []
        self.closed: set[tuple[NodeId, str]] = set()
        self.listener: RingListener | None = None
        self.link_error: LinkClosedError | None = None
        self.answers_adoptions = True
        self.elsewhere: tuple[RingLoad, ...] = ()
        self._queue, self._work = anyio.create_memory_object_stream[tuple[NodeId, Segment]](100)
        self._running = anyio.Event()
        self._running.set()

    def attach(self, listener: RingListener) -> None:
        self.listener = listener

    def loads(self) -> tuple[RingLoad, ...]:
        return self.elsewhere or (RingLoad(),) * len(self.plan.rings)

    def _make_stages(self) -> None:
        """Those of each ring, by the node of its first; `stages` are the first ring's."""
        self.by_first = {stages[0].node: FakeStages(self.plan.epoch) for stages in self.plan.rings}
        self.stages = next(iter(self.by_first.values()), FakeStages(self.plan.epoch))

    async def send(self, to: NodeId, message: Message) -> None:
        if self.link_error is not None:
            raise self.link_error
        if isinstance(message, CloseSession):
            self.closed.add((to, message.session))
            return
        if isinstance(message, Adopt):
            assert self.listener is not None
            if self.answers_adoptions:
                held = self.by_first[to].adopt(message.session, message.tokens)
                self.listener.adopted(Adopted(message.session, message.epoch, held))
            return
        assert isinstance(message, Segment)
        assert to in self.by_first
        assert is_session_id(message.session)
        self.sent.append(message)
        await self._queue.send((to, message))

    async def run(self) -> None:
        with self._queue, self._work:
            async for to, segment in self._work:
                await self._running.wait()
                await anyio.lowlevel.checkpoint()
                answer = self.by_first.get(to, self.stages).run(segment)
                assert self.listener is not None
                if isinstance(answer, Drawn):
                    self.listener.drawn(answer)
                elif isinstance(answer, Refused):
                    self.listener.refused(answer)

    def hold(self) -> None:
        self._running = anyio.Event()

    def go_on(self) -> None:
        self._running.set()

    def change_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._make_stages()
        assert self.listener is not None
        self.listener.plan_changed(plan)


class House:
    def __init__(self, plan: Plan, limits: CoordinatorLimits) -> None:
        self.ring = FakeRing(plan)
        self.letters = Letters()
        self.coordinator = Coordinator(self.ring, limits)
        self.coordinator.set_model(LanguageModel(MODEL, self.letters, 1000))


@asynccontextmanager
async def house(plan: Plan | None = None, limits: CoordinatorLimits = LIMITS) -> AsyncIterator[House]:
    built = House(plan or make_plan(1, 2), limits)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(built.ring.run)
            await tasks.start(built.coordinator.run)
            yield built
            built.ring.go_on()
            await built.coordinator.close()
            tasks.cancel_scope.cancel()


def ask(*contents: str, max_tokens: int | None = 20, stop: tuple[str, ...] = ()) -> GenerateRequest:
    roles = ("user", "assistant")
    messages = tuple(ChatMessage(roles[i % 2], content) for i, content in enumerate(contents))
    return GenerateRequest(messages, max_tokens=max_tokens, stop=stop)


def expected(request: GenerateRequest, count: int = 20) -> str:
    prompt = Letters().encode(Letters().render_chat([(m.role, m.content) for m in request.messages]))
    return "".join(map(chr, plain_decode(prompt, count)))


async def collect(coordinator: Coordinator, request: GenerateRequest) -> tuple[str, FinishReason, Usage]:
    deltas = [delta async for delta in coordinator.generate(request)]
    last = deltas[-1]
    assert last.finish is not None
    assert last.usage is not None
    assert all(delta.finish is None for delta in deltas[:-1])
    return "".join(delta.text for delta in deltas), last.finish, last.usage


async def until(condition: Callable[[], bool]) -> None:
    """`house` has a deadline for all of it."""
    while not condition():  # noqa: ASYNC110 - what tests wait for has no event of its own
        await anyio.sleep(0.001)


async def until_blocked() -> None:
    await anyio.wait_all_tasks_blocked()


async def test_an_answer_is_that_of_plain_decoding() -> None:
    async with house() as h:
        request = ask("how are you?")
        text, finish, usage = await collect(h.coordinator, request)
        assert text == expected(request)
        assert finish is FinishReason.LENGTH
        assert (usage.prompt_tokens, usage.completion_tokens, usage.reused_tokens) == (28, 20, 0)
        assert usage.first_token_ms > 0
        assert usage.token_ms > 0
        assert threading.get_ident() not in h.letters.threads, "encoding does not block the event loop"
        assert h.coordinator.stats().tokens_per_second > 0


class Oracle:
    """A draft model that knows the answer; `error` or `hang` instead where they are set."""

    available = True

    def __init__(self, request: GenerateRequest) -> None:
        self.answer = [*map(ord, expected(request, 40))]
        self.prompt_tokens = len(Letters().render_chat([(m.role, m.content) for m in request.messages]))
        self.error: SwarmError | None = None
        self.hang = False
        self.asked: list[AskDraft] = []
        self.closed: list[SessionId] = []

    async def draft(self, session: SessionId, ask: AskDraft) -> tuple[int, ...]:
        self.asked.append(ask)
        await anyio.lowlevel.checkpoint()
        if self.hang:
            await anyio.sleep_forever()
        if self.error is not None:
            raise self.error
        start = ask.start - self.prompt_tokens
        return tuple(self.answer[start : start + ask.count])

    def close_session(self, session: SessionId) -> None:
        self.closed.append(session)


FIXED = replace(LIMITS, session=replace(LIMITS.session, draft_s=0.05), speculation=Speculation(fixed_k=3, ngram=False))


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_draft_model_drafts(depth: int) -> None:
    request = ask("how are you?")
    limits = replace(FIXED, speculation=Speculation(fixed_k=3, fixed_depth=depth, ngram=False))
    async with house(limits=limits) as h:
        oracle = Oracle(request)
        h.coordinator.set_drafter(oracle)
        text, _, usage = await collect(h.coordinator, request)
        assert text == expected(request)
        spent = usage.speculation
        assert spent.model_accepted > 10
        assert spent.rejected == 0
        assert 1 <= spent.k <= 3
        assert 1 <= spent.depth <= depth
        assert h.coordinator.stats().speculation == spent
        assert len(h.ring.sent) < 15, "windows of several tokens"
        assert oracle.closed == [], "the session is kept for the next turn"
        h.ring.change_plan(make_plan(2, 1))
        assert oracle.closed == [h.ring.sent[0].session]


async def test_a_draft_model_that_fails_stops_nobody() -> None:
    request = ask("how are you?")
    async with house(limits=FIXED) as h:
        oracle = Oracle(request)
        oracle.error = DeviceError("out of memory")
        h.coordinator.set_drafter(oracle)
        text, _, usage = await collect(h.coordinator, request)
        assert text == expected(request)
        assert usage.speculation.drafted == 0
        assert len(oracle.asked) == 1


async def test_a_draft_model_that_hangs_is_not_waited_for_again() -> None:
    request = ask("how are you?")
    async with house(limits=FIXED) as h:
        oracle = Oracle(request)
        oracle.hang = True
        h.coordinator.set_drafter(oracle)
        text, _, _ = await collect(h.coordinator, request)
        assert text == expected(request)
        assert len(oracle.asked) == 1


async def test_an_answer_that_is_cancelled_cancels_its_draft() -> None:
    request = ask("how are you?")
    async with house(limits=replace(FIXED, session=LIMITS.session)) as h:
        oracle = Oracle(request)
        oracle.hang = True
        h.coordinator.set_drafter(oracle)
        async with aclosing(h.coordinator.generate(request)) as deltas:
            await deltas.__anext__()
            await until(lambda: bool(oracle.asked))
        await until(lambda: h.coordinator.stats().running == 0)


async def test_many_at_once() -> None:
    async with house() as h:
        requests = [ask(f"question {i}" * (i + 1)) for i in range(8)]
        texts: dict[int, str] = {}

        async def one(i: int) -> None:
            texts[i], *_ = await collect(h.coordinator, requests[i])

        async with anyio.create_task_group() as tasks:
            for i in range(8):
                tasks.start_soon(one, i)
        assert texts == {i: expected(request) for i, request in enumerate(requests)}


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


@pytest.mark.parametrize("positions", [-1, 10_000])
async def test_a_stage_that_claims_nonsense_is_not_believed(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house() as h:
        monkeypatch.setattr(h.ring.stages, "adopt", lambda *_: positions)
        request = ask("a prompt that is long enough to be asked about, which takes some more words")
        text, _, usage = await collect(h.coordinator, request)
        assert (text, usage.reused_tokens) == (expected(request), 0)


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


async def test_stop_strings_cut_the_text_and_end_the_session() -> None:
    async with house() as h:
        whole = expected(ask("abc"), 200)
        request = ask("abc", max_tokens=None, stop=("never there", whole[6:9]))
        text, finish, usage = await collect(h.coordinator, request)
        assert text == whole[: whole.find(whole[6:9])]
        assert finish is FinishReason.STOP
        assert usage.completion_tokens <= 10


async def test_a_stop_string_at_the_very_end_counts_as_stop() -> None:
    async with house() as h:
        whole = expected(ask("abc"))
        text, finish, _ = await collect(h.coordinator, ask("abc", stop=(whole[-1] + "?", whole[-2:])))
        assert text == whole[: whole.find(whole[-2:])]
        assert finish is FinishReason.STOP


async def test_stop_tokens_end_the_answer_unless_they_are_ignored() -> None:
    async with house() as h:
        whole = expected(ask("abc"))
        h.letters.stop_tokens = frozenset({ord(whole[5])})
        text, finish, _ = await collect(h.coordinator, ask("abc"))
        assert text == whole[: whole.find(whole[5])]
        assert finish is FinishReason.STOP
        request = GenerateRequest(ask("abc").messages, max_tokens=20, ignore_stop_tokens=True)
        text, finish, usage = await collect(h.coordinator, request)
        assert finish is FinishReason.LENGTH
        assert usage.completion_tokens == 20


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


async def test_a_plan_change_while_the_reader_is_slow() -> None:
    async with house() as h:
        async with aclosing(h.coordinator.generate(ask("quick", max_tokens=150))) as deltas:
            text = (await anext(deltas)).text
            await until_blocked()
            h.ring.change_plan(make_plan(2, 1))
            h.ring.change_plan(make_plan(3, 3))
            text += "".join([delta.text async for delta in deltas])
        assert text == expected(ask("quick"), 150)


async def test_a_plan_change_forgets_kept_caches() -> None:
    async with house() as h:
        await collect(h.coordinator, ask("hello there, ring"))
        h.ring.change_plan(make_plan(2, 1))
        assert h.coordinator.stats().idle == 0
        _, _, usage = await collect(h.coordinator, ask("hello there, ring"))
        assert usage.reused_tokens == 0


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


async def test_closing_tells_stages_and_readers() -> None:
    async with house() as h:
        await collect(h.coordinator, ask("kept between turns"))
        h.ring.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close_when_running, h.coordinator)
            with pytest.raises(SessionError, match="leaving"):
                await collect(h.coordinator, ask("never finished"))
        assert {session for _, session in h.ring.closed} >= {h.ring.sent[0].session}
        with pytest.raises(SessionError, match="no questions now"):
            await collect(h.coordinator, ask("too late"))


async def close_when_running(coordinator: Coordinator) -> None:
    await until(lambda: coordinator.stats().running > 0)
    await coordinator.close()


async def test_closing_lets_a_running_answer_end() -> None:
    async with house() as h:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, h.coordinator, ask("nearly done", max_tokens=100))
            await until(lambda: h.coordinator.stats().running > 0)
            await h.coordinator.close(drain_s=30)
        assert h.coordinator.stats().running == 0


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


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (GenerateRequest(()), "no messages"),
        (ask("x", max_tokens=0), "max_tokens"),
        (ask("x", stop=("",)), "bad stop string"),
        (ask("x", stop=("s",) * 100), "too many stop strings"),
        (ask("x" * 1_000_001), "prompt is too long"),
    ],
)
async def test_requests_that_make_no_sense(request_: GenerateRequest, problem: str) -> None:
    async with house() as h:
        with pytest.raises(UsageError, match=problem):
            await collect(h.coordinator, request_)


async def test_requests_that_cannot_fit() -> None:
    async with house() as h:
        with pytest.raises(CapacityError, match="at most 999 tokens"):
            await collect(h.coordinator, ask("x" * 2000))


async def test_answers_at_once_are_bounded() -> None:
    async with house(limits=CoordinatorLimits(answers=1)) as h:
        async with aclosing(h.coordinator.generate(ask("one", max_tokens=None))) as deltas:
            assert isinstance(await anext(deltas), Delta)
            with pytest.raises(CapacityError, match="too many answers"):
                await collect(h.coordinator, ask("two"))
        await collect(h.coordinator, ask("three"))


# --- several rings --------------------------------------------------------------------------------------------------


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


async def test_a_session_that_ends_is_closed_on_its_ring_alone() -> None:
    plan = make_plan(1, 2, rings=2)
    async with house(plan, CoordinatorLimits(idle=IdleLimits(sessions=0))) as h:
        h.ring.elsewhere = (RingLoad(sessions=2), RingLoad())
        await collect(h.coordinator, ask("a question"))
        await until(lambda: bool(h.ring.closed))
        await until_blocked()
        assert {node for node, _ in h.ring.closed} == {stage.node for stage in plan.rings[1]}


# --- a pool that is full --------------------------------------------------------------------------------------------


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
