"""A person stops an answer while its windows are in flight: the screen over a real coordinator, a ring in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.coordinator.house import House, ask, house, until, until_blocked
from tests.coordinator.test_cancel import drafting
from tests.coordinator.test_coordinator_drafts import FIXED, Oracle
from tests.ui.test_terminal import CTRL_C, ENTER, Screen, running

pytestmark = pytest.mark.anyio


async def in_flight(h: House, screen: Screen) -> None:
    """A question is being answered, and two windows of it are held on their way."""
    screen.press("Hello" + ENTER)
    await until(lambda: len(h.ring.sent) > 6)
    h.ring.hold()
    await until_blocked()
    (turn,) = h.coordinator._turns.values()
    assert len(turn.session._flights) == 2


@pytest.mark.parametrize("stop", [CTRL_C, "/stop" + ENTER])
async def test_windows_in_flight_are_given_up(tmp_path: Path, stop: str) -> None:
    limits = replace(FIXED, speculation=drafting(3, 2, ngram=False))
    async with house(limits=limits) as h, running(h.coordinator, tmp_path) as screen:
        h.coordinator.set_drafter(Oracle(ask("Hello")))
        await in_flight(h, screen)
        screen.press(stop)
        await screen.shows("stopped")
        await until(lambda: h.coordinator.stats().running == 0)
        sent = len(h.ring.sent)
        h.ring.go_on()
        await until(lambda: h.coordinator.stats().stale >= 2)
        await until_blocked()
        assert len(h.ring.sent) == sent, "nothing more is asked of the ring"
        screen.press("and now?" + ENTER)
        await screen.shows("ended by the limit of tokens")
        assert h.coordinator.stats().mismatches == 0


async def test_there_may_be_nothing_to_stop(tmp_path: Path) -> None:
    async with house() as h, running(h.coordinator, tmp_path) as screen:
        screen.press("/stop" + ENTER)
        await screen.shows("Nothing to stop.")
