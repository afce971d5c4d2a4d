"""Users of several PCs who ask at the same moment and begin alike: computed once, and nobody's answer is another."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from swarm.coordinator import adoption
from swarm.coordinator.requests import ChatMessage, GenerateRequest, Usage
from tests.ring import test_node
from tests.ring.test_node import Pc, open_office

pytestmark = pytest.mark.anyio

ir = test_node.ir
_no_patience = test_node._no_patience

BEGINNING = "the a " * 100
ENDS = ("the", "a a", "the a the", "a the the a")


async def answer(pc: Pc, prompt: str) -> tuple[list[int], Usage]:
    request = GenerateRequest((ChatMessage("user", prompt),), max_tokens=24, ignore_stop_tokens=True)
    tokens: list[int] = []
    async for delta in pc.coordinator.generate(request):
        tokens += delta.tokens
        usage = delta.usage
    assert usage is not None
    return tokens, usage


async def test_four_who_ask_together_compute_their_beginning_once(
    tmp_path: Path, ir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir)
        await one.until_spread_over(one)
        alone: dict[str, list[int]] = {}
        with monkeypatch.context() as patch:
            patch.setattr(adoption, "MIN_PROMPT", 1 << 20)
            for end in ENDS:
                one.coordinator._idle.clear()
                alone[end], usage = await answer(one, BEGINNING + end)
                assert usage.reused_tokens == 0

        two = await office.start("two")
        for pc in (one, two):
            await pc.until_spread_over(one, two)
        found: dict[str, list[int]] = {}
        usages: list[Usage] = []

        async def ask(pc: Pc, end: str) -> None:
            found[end], usage = await answer(pc, BEGINNING + end)
            usages.append(usage)

        async with anyio.create_task_group() as users:
            for number, end in enumerate(ENDS):
                users.start_soon(ask, (one, two)[number % 2], end)
        assert found == alone
        reused = sorted(usage.reused_tokens for usage in usages)
        assert reused[0] == 0
        assert reused[1] > 0.9 * min(usage.prompt_tokens for usage in usages)
