"""Answers with a draft model in a real ring: the same tokens as without, and the draft is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest

from swarm.coordinator.coordinator import CoordinatorLimits
from swarm.coordinator.draft_host import DraftHost, paged_draft
from swarm.coordinator.pace import Speculation
from swarm.coordinator.requests import ChatMessage, GenerateRequest, Usage
from swarm.engine import shortlist
from swarm.protocol.sampling import GREEDY, SamplingParams
from swarm.ring import draft_supply
from tests.ring import test_node
from tests.ring.test_node import Pc, open_office

pytestmark = pytest.mark.anyio

ir = test_node.ir
_no_patience = test_node._no_patience

SAMPLINGS = (GREEDY, SamplingParams(temperature=0.8, seed=4))


async def answer(pc: Pc, sampling: SamplingParams) -> tuple[list[int], Usage]:
    request = GenerateRequest((ChatMessage("user", "the the the"),), sampling, 64, ignore_stop_tokens=True)
    tokens: list[int] = []
    async for delta in pc.coordinator.generate(request):
        tokens += delta.tokens
        usage = delta.usage
    assert usage is not None
    return tokens, usage


@pytest.mark.parametrize("short", [False, True], ids=["whole", "shortlist"])
async def test_a_draft_changes_no_token(tmp_path: Path, ir: Path, monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    monkeypatch.setattr(draft_supply, "CALM_S", 0.1)
    if short:  # of 261 tokens
        monkeypatch.setattr(shortlist, "FIRST", 100)
        monkeypatch.setattr(shortlist, "LAST", 30)
    small = Path(shutil.copytree(ir, tmp_path / "small"))
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, draft=str(small))
        await one.until_spread_over(one)
        one.coordinator._limits = CoordinatorLimits(speculation=Speculation(enabled=False))
        plain = [(await answer(one, sampling))[0] for sampling in SAMPLINGS]
        await one.until(lambda: bool(one.drafts), "draft")
        host = DraftHost(paged_draft(one.store, "CPU"), one.coordinator.set_drafter, one.ring.notice)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.run)
            host.offer(one.drafts[-1])
            await one.until(lambda: host.name != "", "drafter")
            one.coordinator._limits = CoordinatorLimits(speculation=Speculation(fixed_k=3, ngram=False))
            one.coordinator._idle.clear()
            for sampling, expected in zip(SAMPLINGS, plain, strict=True):
                tokens, usage = await answer(one, sampling)
                assert tokens == expected
                used = usage.speculation
                assert used.model_drafted > 30
                assert short or used.model_accepted == used.model_drafted
            tasks.cancel_scope.cancel()
