"""A draft model beside the coordinator: right, failing, hanging, cancelled."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import anyio
import pytest

from swarm.coordinator.drafter import Draft
from swarm.coordinator.events import AskDraft
from swarm.coordinator.pace import Speculation
from swarm.coordinator.requests import GenerateRequest
from swarm.protocol.errors import DeviceError, SwarmError
from swarm.protocol.ids import SessionId
from tests.coordinator.fake_stages import make_plan
from tests.coordinator.house import LIMITS, Letters, ask, collect, expected, house, until

pytestmark = pytest.mark.anyio


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

    async def draft(self, session: SessionId, ask: AskDraft) -> Draft:
        self.asked.append(ask)
        await anyio.lowlevel.checkpoint()
        if self.hang:
            await anyio.sleep_forever()
        if self.error is not None:
            raise self.error
        start = ask.start - self.prompt_tokens
        return Draft(tuple(self.answer[start : start + ask.count]))

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
