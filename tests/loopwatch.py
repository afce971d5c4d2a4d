"""Fails a test in which something keeps the event loop from turning.

    with loopwatch(0.25):
        anyio.run(main)

A thread samples the main thread while the loop runs: a callback that lasts longer than the bound is named with its
stack. Works around code that starts a loop, and inside a coroutine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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
        self._clock = _RunClock()
        self._entered: float | None = None
        self._sampled = ""
        self._stop = threading.Event()
        self.worst_s = 0.0
        self.stack = ""

    def run(self, original: Any, handle: asyncio.Handle) -> None:
        if threading.get_ident() != self._thread:
            original(handle)
            return
        self._sampled = ""
        self._entered = entered = self._clock.now()
        try:
            original(handle)
        finally:
            self._entered = None
            lasted = self._clock.now() - entered
            if lasted > max(self._bound_s, self.worst_s):
                self.worst_s, self.stack = lasted, self._sampled or f"{handle!r}\n"

    def sample(self) -> None:
        while not self._stop.wait(self._bound_s / SAMPLES_PER_BOUND):
            entered, frame = self._entered, sys._current_frames().get(self._thread)
            if entered is not None and frame is not None and self._clock.now() - entered > self._bound_s:
                self._sampled = "".join(traceback.format_stack(frame))

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._clock.close()


class _RunClock:
    """A clock of the thread that makes it, which stands still while that thread waits for a core that others use.

    That wait is known from Linux alone, and once it is over; elsewhere this is an ordinary clock.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now(self) -> float:
        """Seconds."""
        waited_ns = int(os.pread(self._file, 100, 0).split()[1]) if self._file is not None else 0
        return time.perf_counter() - waited_ns / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


@contextlib.contextmanager
def loopwatch(bound_s: float) -> Iterator[None]:
    """Raise `LoopBlockedError` at the end where a callback of this thread's loop lasted longer than `bound_s`.

    0.25 s finds inference and file reads left on the loop. Choose more where threads compute in Python meanwhile.
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
        watch.close()
    if watch.worst_s > bound_s:
        raise LoopBlockedError(f"the event loop was blocked for {watch.worst_s:.2f} s:\n{watch.stack}")
