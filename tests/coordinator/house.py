"""A coordinator over a ring in one process: fake stages behind a fake port."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from swarm.coordinator.coordinator import Coordinator, CoordinatorLimits
from swarm.coordinator.language import LanguageModel
from swarm.coordinator.requests import ChatMessage, FinishReason, GenerateRequest, Usage
from swarm.coordinator.session import SessionLimits
from swarm.protocol.errors import LinkClosedError
from swarm.protocol.ids import NodeId, is_session_id
from swarm.protocol.messages import Adopt, Adopted, CloseSession, Drawn, Message, Refused, Segment
from swarm.protocol.plan import Plan
from swarm.ring.port import RingListener, RingLoad
from tests.coordinator.fake_stages import MODEL, NODE, FakeStages, make_plan, plain_decode

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


class FakePort:
    """Runs segments in the order they were sent; `hold` stops it, `break_links` makes sending fail."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.node = NODE
        self._make_stages(plan)
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

    def _make_stages(self, before: Plan) -> None:
        """Those of each ring, by the node of its first; `stages` are the first ring's. A ring of `before` stays."""
        kept = getattr(self, "by_first", {})
        self.by_first: dict[NodeId, FakeStages] = {}
        for ring in map(self.plan.ring, range(len(self.plan.rings))):
            first = ring.stages[0].node
            self.by_first[first] = kept[first] if kept and before.has_ring(ring) else FakeStages(ring.epoch)
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
        before, self.plan = self.plan, plan
        self._make_stages(before)
        assert self.listener is not None
        self.listener.plan_changed(plan)


class House:
    def __init__(self, plan: Plan, limits: CoordinatorLimits) -> None:
        self.ring = FakePort(plan)
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
