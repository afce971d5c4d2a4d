"""Which pairing code a node keeps: none that nobody has confirmed in the place of one that was good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from swarm.cli import founding
from swarm.cli.run import _Node, _pair
from swarm.protocol.config import Settings
from swarm.ring.identity import load_or_create
from swarm.ring.pairing import load_code, save_code

pytestmark = pytest.mark.anyio

GOOD, OTHER = "K7QM-2RXW-9DFT", "0000-1111-2222"
PEERS = (("10.0.0.7", 7420),)


@pytest.mark.parametrize(
    ("known", "given", "peers", "heard", "kept"),
    [
        (GOOD, None, PEERS, False, GOOD),
        (GOOD, OTHER, PEERS, False, GOOD),
        (GOOD, OTHER, (), False, OTHER),
        (None, OTHER, PEERS, False, None),
        (None, OTHER, (), False, OTHER),
        (GOOD, OTHER, PEERS, True, OTHER),
    ],
    ids=[
        "remembered",
        "unproven, a peer",
        "a new code for a new swarm",
        "new here, a peer",
        "founds the swarm",
        "confirmed",
    ],
)
async def test_what_is_on_disk_before_the_first_link(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: str | None,
    given: str | None,
    peers: tuple[tuple[str, int], ...],
    heard: bool,
    kept: str | None,
) -> None:
    async def check(code: str, *_: Any) -> bool:
        assert code == given
        return heard

    monkeypatch.setattr(founding, "check_code", check)
    if known is not None:
        save_code(tmp_path, "office", known)
    settings = Settings(tmp_path, swarm="office", code=given, peers=peers, interfaces=("lo",))
    code, saved = await _pair(settings, load_or_create(tmp_path))
    assert code == (given or known)
    assert load_code(tmp_path, "office") == kept
    assert saved is (kept == code)


async def test_a_link_proves_the_code(tmp_path: Path) -> None:
    class Ring:
        def __init__(self) -> None:
            self.linked = anyio.Event()

        async def joined(self) -> None:
            await self.linked.wait()

    save_code(tmp_path, "office", GOOD)
    node = _Node(Settings(tmp_path, swarm="office"), load_or_create(tmp_path), OTHER, kept=False)
    ring = node._ring = Ring()  # type: ignore[assignment]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node._keep_code)
        await anyio.wait_all_tasks_blocked()
        assert load_code(tmp_path, "office") == GOOD
        ring.linked.set()
    assert load_code(tmp_path, "office") == OTHER
