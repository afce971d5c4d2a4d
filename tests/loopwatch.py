"""Fails a test in which something keeps the event loop from turning.

    with loopwatch(0.25):
        anyio.run(main)

A thread samples the main thread while the loop runs: a callback that lasts longer than the bound is named with its
stack. Works around code that starts a loop, and inside a coroutine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

SAMPLES_PER_BOUND = 8


class LoopBlockedError(AssertionError):
    """The loop did not turn for longer than the bound; the text holds the stack that kept it."""


class _Watch:
    """Marks when the watched thread's loop enters and leaves a callback, and samples those that last."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._thread = threading.get_ident()
        self._entered: float | None = None
        self._stop = threading.Event()
        self.worst_s = 0.0
        self.stack = ""

    def run(self, original: Any, handle: asyncio.Handle) -> None:
        if threading.get_ident() != self._thread:
            original(handle)
            return
        self._entered = entered = time.perf_counter()
        try:
            original(handle)
        finally:
            self._entered = None
            self._note(time.perf_counter() - entered, f"{handle!r}\n")

    def sample(self) -> None:
        while not self._stop.wait(self._bound_s / SAMPLES_PER_BOUND):
            entered, frame = self._entered, sys._current_frames().get(self._thread)
            if entered is not None and frame is not None and time.perf_counter() - entered > self._bound_s:
                # Kept even where the callback ends later: this is what the loop was held by.
                self._note(time.perf_counter() - entered, "".join(traceback.format_stack(frame)))

    def stop(self) -> None:
        self._stop.set()

    def _note(self, lasted_s: float, stack: str) -> None:
        if lasted_s > self._bound_s:
            self.worst_s = max(self.worst_s, lasted_s)
            if not self.stack or not stack.startswith("<"):
                self.stack = stack


@contextlib.contextmanager
def loopwatch(bound_s: float) -> Iterator[None]:
    """Raise `LoopBlockedError` at the end where a callback of this thread's loop lasted longer than `bound_s`.

    Choose a bound well above what a busy machine adds: 0.25 s finds inference and file reads left on the loop.
    """
    watch = _Watch(bound_s)
    original = asyncio.Handle._run

    def run(handle: asyncio.Handle) -> None:
        watch.run(original, handle)

    sampler = threading.Thread(target=watch.sample, name="loopwatch", daemon=True)
    asyncio.Handle._run = run  # type: ignore[method-assign]
    sampler.start()
    try:
        yield
    finally:
        asyncio.Handle._run = original  # type: ignore[method-assign]
        watch.stop()
        sampler.join()
    if watch.worst_s > bound_s:
        raise LoopBlockedError(f"the event loop was blocked for {watch.worst_s:.2f} s:\n{watch.stack}")
