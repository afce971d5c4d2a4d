"""Whole nodes find a draft model for their ring: from outside once, from peers, from their store; or do without."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest

from swarm.model import sources
from swarm.model.drafts import DraftPair
from swarm.model.inventory import pins
from swarm.model.store import Store
from swarm.protocol.errors import ModelError
from swarm.protocol.ids import BlobId
from swarm.ring import draft_supply, supply
from swarm.ring.fit import draft_memory
from swarm.ring.supply import Report, acquire_model
from tests.model import gguf_files
from tests.ring import test_node
from tests.ring.test_node import Pc, open_office

pytestmark = pytest.mark.anyio

ir = test_node.ir
_no_patience = test_node._no_patience


@pytest.fixture(autouse=True)
def _no_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_supply, "CALM_S", 0.1)


@pytest.fixture
def small(ir: Path, tmp_path: Path) -> Path:
    """The same model under another name, as its own draft."""
    return Path(shutil.copytree(ir, tmp_path / "small"))


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked for from outside; asking still works."""
    asked: list[str] = []

    def acquire(source: sources.Source, workdir: Path, progress: sources.ProgressCallback) -> Path:
        asked.append(source.name)
        return sources.acquire(source, workdir, progress)

    monkeypatch.setattr(supply, "acquire", acquire)
    return asked


async def until_drafts(pc: Pc) -> None:
    await pc.until(lambda: bool(pc.drafts) and pc.drafts[-1] is not None, "draft")


async def test_one_gets_the_draft_from_outside_and_the_others_from_it(
    tmp_path: Path, ir: Path, small: Path, outside: list[str]
) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, draft=str(small))
        two = await office.start("two", draft="auto")
        for pc in (one, two):
            await until_drafts(pc)
        assert outside == [ir.name, "small"]
        (first,), (second,) = one.drafts, two.drafts
        assert first is not None
        assert second is not None
        assert first.id == second.id
        assert all(two.store.has(blob.id) for blob in second.manifest.blobs())
        assert {first.id, one.ring.plan.model} <= pins(one.store).models
        offers = {m.name: m.draft for m in two.ring._membership.members}
        assert all(offer and offer.manifest == first.id for offer in offers.values())
        assert {offer and offer.memory_bytes for offer in offers.values()} == {draft_memory(first.shape)}
        assert one.ring.view().no_draft == two.ring.view().no_draft == ""


async def test_the_table_finds_the_draft_and_a_night_off_needs_nothing(
    tmp_path: Path, ir: Path, small: Path, outside: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_supply, "draft_for", lambda _: DraftPair("tiny", "", str(small)))
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, draft="auto")
        await until_drafts(one)
        await one.crash()
        one = await office.start("one", ir, draft="auto")
        await until_drafts(one)
        assert outside == [ir.name, "small"]
        two = await office.start("two", draft="none")
        await two.until_spread_over(one, two)
        assert two.ring.view().no_draft == "off"
        assert two.drafts == []


async def test_no_draft_is_known(tmp_path: Path, ir: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, draft="auto")
        await one.until(lambda: one.ring.view().no_draft != "", "word of the draft")
        assert "no draft model is known" in one.ring.view().no_draft
        assert one.drafts == []


async def test_another_tokenizer_is_refused_with_the_first_token_that_differs(tmp_path: Path, ir: Path) -> None:
    metadata = gguf_files.tiny_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], "he"]
    file = tmp_path / "other.gguf"
    file.write_bytes(gguf_files.tiny_llama(**{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["h e"]}))
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, draft=str(file))
        await one.until(lambda: one.ring.view().no_draft != "", "word of the draft")
        assert "the same tokenizer; found token 260 is 'the' here and 'he' there" in one.ring.view().no_draft
        assert one.ring.view().no_draft in one.ring.view().notices[-1]
        assert one.drafts == []
        assert await one.answer()


async def test_short_of_memory_there_is_no_draft_and_the_screen_says_so(tmp_path: Path, ir: Path, small: Path) -> None:
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, draft=str(small), memory_bytes=60 * 10**6)
        two = await office.start("two", draft="auto")
        await one.until(lambda: "no memory for" in one.ring.view().no_draft, "word of the memory")
        await until_drafts(two)
        assert one.drafts == []
        assert "MB needed" in one.ring.view().notices[-1]
        assert await one.answer() == await two.answer()


async def test_a_draft_that_cannot_be_had_stops_nothing(
    tmp_path: Path, ir: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise ModelError("the hub cannot be reached")

    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, draft=str(small))
        monkeypatch.setattr(draft_supply, "acquire_model", refuse)
        await one.until(lambda: "cannot be reached" in one.ring.view().no_draft, "word of the failure")
        assert await one.answer()
        assert one.ring._membership.me.draft is None


async def test_a_new_plan_comes_before_the_draft(
    tmp_path: Path, ir: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the draft is fetched a PC comes: the ring forms anew at once, the draft waits, and comes afterwards."""
    begun, stopped = [], []

    async def acquire(wanted: str, store: Store, report: Report) -> BlobId:
        begun.append(wanted)
        if stopped:
            return await acquire_model(wanted, store, report)
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append(wanted)
        raise AssertionError("never")

    monkeypatch.setattr(draft_supply, "acquire_model", acquire)
    async with open_office(tmp_path, ir) as office:
        one = await office.start("one", ir, draft=str(small))
        await one.until(lambda: bool(begun), "fetch of the draft")
        two = await office.start("two", draft="none")
        await one.until_spread_over(one, two)
        assert stopped == begun[:1]
        await until_drafts(one)
