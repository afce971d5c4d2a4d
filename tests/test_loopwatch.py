"""The watch itself: it names who blocks the loop, and leaves the patient alone."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel
import pytest

from tests.loopwatch import LoopBlockedError, loopwatch


def hold_the_loop() -> None:
    time.sleep(0.3)


def test_a_blocked_loop_fails_and_names_the_stack() -> None:
    async def main() -> None:
        await anyio.lowlevel.checkpoint()
        hold_the_loop()

    with pytest.raises(LoopBlockedError, match="hold_the_loop"), loopwatch(0.1):
        anyio.run(main)


def test_waiting_and_threads_do_not_block_it() -> None:
    async def main() -> None:
        await anyio.sleep(0.3)
        await anyio.to_thread.run_sync(hold_the_loop)

    with loopwatch(0.2):
        anyio.run(main)


def test_works_inside_a_coroutine() -> None:
    async def main() -> None:
        with loopwatch(0.1):
            await anyio.lowlevel.checkpoint()
            hold_the_loop()
            await anyio.lowlevel.checkpoint()

    with pytest.raises(LoopBlockedError):
        anyio.run(main)
