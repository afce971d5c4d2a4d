"""An answer read a little ahead of its client, so that the client's side can wait with a deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio

from swarm.coordinator.requests import Delta
from swarm.protocol.errors import SessionError

_AHEAD = 8
"""Deltas read ahead of a slow client; beyond it the generator waits, and with it the session (back-pressure)."""

_CLOSE_TIMEOUT_S = 5.0


class Pump:
    """Deltas of one generator, in order. Waiting with a deadline loses none, unlike cancelling ``anext``."""

    def __init__(self, source: AsyncGenerator[Delta, None]) -> None:
        self._source = source
        self._ahead: deque[Delta] = deque()
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    async def next(self, timeout_s: float | None = None) -> Delta | None:
        """The next delta; None where there is none within `timeout_s`.

        Raises what the generator raised, after its deltas, and `SessionError` where it ends without a finish.
        """
        if not self._ahead and not self._ended:
            self._some.clear()
            with anyio.move_on_after(timeout_s):
                await self._some.wait()
        if self._ahead:
            self._room.set()
            return self._ahead.popleft()
        if self._error is not None:
            raise self._error
        if self._ended:
            raise SessionError("the answer ended early", expected="a last piece with a finish", found="none")
        return None

    async def run(self) -> None:
        """Read the generator to its end; close it in any case."""
        try:
            async for delta in self._source:
                self._ahead.append(delta)
                self._some.set()
                while len(self._ahead) >= _AHEAD:
                    self._room.clear()
                    await self._room.wait()
        except Exception as error:  # handed to the reader, who knows what it means
            self._error = error
        finally:
            self._ended = True
            self._some.set()
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await self._source.aclose()


@asynccontextmanager
async def pumped(source: AsyncGenerator[Delta, None]) -> AsyncIterator[Pump]:
    """Read `source` while the body runs; leaving the body, or being cancelled in it, closes `source`."""
    pump = Pump(source)
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        try:
            yield pump
        except Exception as error:  # raised again below: a task group would wrap it in a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
