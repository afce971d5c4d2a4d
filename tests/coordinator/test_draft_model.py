"""The draft model's shell: asks that come together, are replaced, cancelled, late; the end in the middle of a draft."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import openvino as ov
import pytest

from swarm.coordinator.draft_model import DraftModel
from swarm.coordinator.events import AskDraft
from swarm.engine.base import Output
from swarm.engine.paged import PagedEngine
from swarm.engine.timed import StageTimes, TimedEngine
from swarm.model.cut import cut
from swarm.model.shard import Shard
from swarm.model.tiny import VOCABULARY as TINY_VOCABULARY
from swarm.model.tiny import tiny_model
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.errors import DeviceError
from swarm.protocol.ids import NO_EPOCH, NodeId
from swarm.protocol.messages import RowKind, Segment
from swarm.protocol.sampling import GREEDY, SamplingParams
from tests.coordinator.test_draft_book import VOCABULARY, ask, following, session
from tests.loopwatch import loopwatch
from tests.prompts import PROMPTS

pytestmark = pytest.mark.anyio

PROMPT = tuple(range(30))
WAIT_S = 30.0


class Gated(TimedEngine):
    """Every forward waits until the test lets it go; what ran is counted."""

    def __init__(self, kv_tokens: int = 10_000, open_: bool = False) -> None:
        super().__init__(True, True, kv_tokens, StageTimes(0.0), VOCABULARY, self._wait)
        self.gate = threading.Semaphore(10**6 if open_ else 0)
        self.entered = threading.Semaphore(0)
        self.batches: list[list[Segment]] = []
        self.failure: Exception | None = None

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        if self.failure is not None:
            raise self.failure
        outputs = super().run(batch)
        self.batches.append(list(batch))
        return outputs

    def _wait(self, _seconds: float) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=WAIT_S)

    async def one(self) -> None:
        """Wait for a forward that has begun and let it end."""
        await self.begun()
        self.gate.release()

    async def begun(self) -> None:
        assert await anyio.to_thread.run_sync(lambda: self.entered.acquire(timeout=WAIT_S))


@asynccontextmanager
async def drafting(engine: TimedEngine | PagedEngine, ask_s: float = WAIT_S) -> AsyncIterator[DraftModel]:
    model = DraftModel(engine, ask_s)
    with loopwatch(0.5):
        async with anyio.create_task_group() as tasks:
            await tasks.start(model.run)
            yield model
            tasks.cancel_scope.cancel()
    assert not model.available


async def test_drafts_are_the_continuation() -> None:
    async with drafting(Gated(open_=True)) as model:
        assert model.available
        assert (await model.draft(session(1), ask(PROMPT, 4))).tokens == following(PROMPT, 4)
        longer = PROMPT + following(PROMPT, 4)
        assert (await model.draft(session(1), ask(longer, 2))).tokens == following(longer, 2)
        assert (await model.draft(session(1), ask(PROMPT[:7], 2))).tokens == following(PROMPT[:7], 2)


async def test_nothing_is_asked_for() -> None:
    async with drafting(Gated()) as model:
        assert (await model.draft(session(1), ask((), 3))).tokens == ()
        assert (await model.draft(session(1), ask(PROMPT, 0))).tokens == ()
    assert (await DraftModel(Gated()).draft(session(1), ask(PROMPT, 1))).tokens == ()


async def test_asks_that_wait_are_run_together() -> None:
    engine = Gated()
    found: dict[int, tuple[int, ...]] = {}
    async with drafting(engine) as model, anyio.create_task_group() as asks:

        async def one(number: int) -> None:
            found[number] = (await model.draft(session(number), ask((number, 2), 3))).tokens

        asks.start_soon(one, 0)
        await engine.begun()
        asks.start_soon(one, 1)
        asks.start_soon(one, 2)
        await anyio.wait_all_tasks_blocked()
        for _ in range(10):
            engine.gate.release()
    assert found == {number: following((number, 2), 3) for number in range(3)}
    assert [len(batch) for batch in engine.batches] == [1, 3, 3, 2]


async def test_a_newer_ask_ends_the_older_between_two_steps() -> None:
    engine = Gated()
    found: dict[str, tuple[int, ...]] = {}
    async with drafting(engine) as model, anyio.create_task_group() as asks:

        async def one(name: str, tokens: tuple[int, ...], count: int) -> None:
            found[name] = (await model.draft(session(1), ask(tokens, count))).tokens

        asks.start_soon(one, "old", PROMPT, 9)
        await engine.one()
        await engine.begun()
        asks.start_soon(one, "new", (*PROMPT, 5), 2)
        await anyio.wait_all_tasks_blocked()
        assert found == {"old": following(PROMPT, 1)}
        for _ in range(10):
            engine.gate.release()
    assert found["new"] == following((*PROMPT, 5), 2)
    assert len(engine.batches) == 4


async def test_a_cancelled_ask_stops_between_two_steps() -> None:
    engine = Gated()
    async with drafting(engine) as model:
        async with anyio.create_task_group() as asks:
            asks.start_soon(model.draft, session(1), ask(PROMPT, 9))
            await engine.one()
            await engine.begun()
            asks.cancel_scope.cancel()
        engine.gate.release()
        await anyio.wait_all_tasks_blocked()
        engine.gate = threading.Semaphore(100)
        assert (await model.draft(session(2), ask((1, 2), 1))).tokens == following((1, 2), 1)
    assert [batch[0].session for batch in engine.batches] == [session(1), session(1), session(2)]


async def test_an_ask_that_nobody_waits_for_takes_its_time() -> None:
    """The model reads a prompt beside a ring on the same device; it is not given up for that."""
    async with drafting(Gated(open_=True), ask_s=0.0) as model:
        assert (await model.draft(session(1), ask(PROMPT, 1))).tokens == ()
        patient = replace(ask((3,) * 200, 1), patient=True)
        assert (await model.draft(session(2), patient)).tokens == following((3,) * 200, 1)


async def test_a_late_ask_gets_what_there_is_and_its_prompt_is_fed_on() -> None:
    engine = Gated()
    long = tuple([3] * 200)
    async with drafting(engine, ask_s=0.05) as model:
        assert (await model.draft(session(1), ask(long, 4))).tokens == ()
        for _ in range(4):
            await engine.one()
        engine.gate = threading.Semaphore(100)
        await anyio.wait_all_tasks_blocked()
        model._ask_s = WAIT_S
        assert (await model.draft(session(1), ask((*long, 8), 1))).tokens == following((*long, 8), 1)
    rows = [sum(len(segment.tokens) for segment in batch) for batch in engine.batches]
    assert rows == [64, 64, 64, 8, 1]


async def test_a_closed_session_is_freed() -> None:
    engine = Gated(kv_tokens=64, open_=True)
    async with drafting(engine) as model:
        await model.draft(session(1), ask(PROMPT, 1))
        free = engine.free_tokens
        model.close_session(session(1))
        model.close_session(session(7))
        assert (await model.draft(session(2), ask((1, 2), 1))).tokens == following((1, 2), 1)
        assert engine.free_tokens == free
        assert (await model.draft(session(1), ask(PROMPT, 1))).tokens == following(PROMPT, 1)


async def test_caches_that_are_only_kept_give_way() -> None:
    engine = Gated(kv_tokens=128, open_=True)
    async with drafting(engine) as model:
        for number in range(9):
            assert (await model.draft(session(number), ask(PROMPT, 1))).tokens == following(PROMPT, 1)
        assert (await model.draft(session(50), ask(PROMPT * 4, 2))).tokens == following(PROMPT * 4, 2)


async def test_what_never_fits_gets_no_draft() -> None:
    async with drafting(Gated(kv_tokens=64, open_=True)) as model:
        assert (await model.draft(session(1), ask(PROMPT * 5, 2))).tokens == ()
        assert (await model.draft(session(2), ask((VOCABULARY,), 2))).tokens == ()
        assert (await model.draft(session(1), ask(PROMPT, 2))).tokens == following(PROMPT, 2)


async def test_two_that_do_not_fit_together_take_turns_or_go_without() -> None:
    found = []
    async with drafting(Gated(kv_tokens=64, open_=True)) as model, anyio.create_task_group() as asks:

        async def one(number: int) -> None:
            found.append((await model.draft(session(number), ask((*PROMPT, number), 8))).tokens)

        asks.start_soon(one, 1)
        asks.start_soon(one, 2)
    assert len(found) == 2
    assert len(max(found, key=len)) == 8


async def test_the_end_in_the_middle_of_a_draft_waits_for_one_step_only() -> None:
    engine = Gated()
    found = []
    async with anyio.create_task_group() as asks:
        async with drafting(engine) as model:

            async def one() -> None:
                found.append((await model.draft(session(1), ask(PROMPT, 9))).tokens)

            asks.start_soon(one)
            await engine.one()
            await engine.begun()
            threading.Timer(0.05, engine.gate.release).start()
        assert len(engine.batches) == 2
    assert found == [following(PROMPT, 1)]


@pytest.mark.parametrize("failure", [DeviceError("the device is gone"), ValueError("the device is gone")])
async def test_whatever_fails_in_a_forward_ends_the_drafting_and_nothing_else(failure: Exception) -> None:
    engine = Gated(open_=True)
    async with drafting(engine) as model:
        assert (await model.draft(session(1), ask(PROMPT, 1))).tokens
        engine.failure = failure
        assert (await model.draft(session(1), ask(PROMPT, 2))).tokens == ()
        await anyio.wait_all_tasks_blocked()
        assert not model.available
        assert "the device is gone" in model.broken
        assert (await model.draft(session(1), ask(PROMPT, 2))).tokens == ()


def whole(model: ov.Model, layers: int, vocabulary: int) -> PagedEngine:
    return PagedEngine(Shard(cut(model, 0, layers)), "CPU", 1024, vocabulary, 1)


def decode(target: PagedEngine, prompt: tuple[int, ...], count: int, sampling: SamplingParams) -> list[int]:
    """Plainly, by the target's rules: the prompt prefilled, the answer row by row."""
    answer: list[int] = []
    rows, kind, start = prompt, RowKind.PREFILL, 0
    for _ in range(count):
        segment = Segment(session(1), NodeId("0" * 32), NO_EPOCH, 0, start, kind, rows, 1, sampling)
        start += len(rows)
        (token,) = target.run([segment])[0].drawn
        answer.append(token)
        rows, kind = (token,), RowKind.DECODE
    return answer


async def check_always_right(
    engine: PagedEngine, prompt: tuple[int, ...], answer: list[int], sampling: SamplingParams
) -> None:
    """With its rejections: before every draft that counts it is asked to go on from a wrong token."""
    async with drafting(engine) as model:
        done = 1  # the target's own first token comes with the prompt
        while done < len(answer):
            sequence = (*prompt, *answer[:done])
            wrong = (*sequence, answer[done] ^ 1)
            count = min(5, len(answer) - done)
            for tokens in (wrong, sequence):
                drafts = (await model.draft(session(2), AskDraft(0, len(tokens), tokens, count, sampling))).tokens
            assert list(drafts) == answer[done : done + count]
            done += count


SAMPLINGS = [GREEDY, SamplingParams(temperature=0.8, seed=5)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
async def test_a_model_that_drafts_for_itself_is_always_right(sampling: SamplingParams) -> None:
    prompt = tuple((7 * position) % TINY_VOCABULARY for position in range(100))
    answer = decode(whole(tiny_model(2), 2, TINY_VOCABULARY), prompt, 24, sampling)
    await check_always_right(whole(tiny_model(2), 2, TINY_VOCABULARY), prompt, answer, sampling)


@pytest.mark.model
async def test_smollm2_drafts_for_itself(smollm2_ir: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_ir)
    prompt = tuple(tokenizer.encode(tokenizer.render_chat([("user", PROMPTS["reasoning"])])))
    target, draft = (whole(ov.Core().read_model(smollm2_ir / "openvino_model.xml"), 30, 49152) for _ in range(2))
    for sampling in SAMPLINGS:
        await check_always_right(draft, prompt, decode(target, prompt, 32, sampling), sampling)
