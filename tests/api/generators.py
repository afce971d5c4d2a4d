"""A coordinator made up for tests of those above it: says what it is told to, and remembers what happened to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import anyio

from swarm.coordinator.requests import Delta, FinishReason, GenerateRequest, SpeculationUsage, Usage

SPECULATION = SpeculationUsage(
    windows=4,
    ngram_drafted=4,
    ngram_accepted=3,
    model_drafted=8,
    model_accepted=6,
    rejected=2,
    wasted_rows=5,
    in_flight=6,
    seconds=2.0,
    plain_seconds=3.0,
)
USAGE = Usage(7, 3, reused_tokens=2, first_token_ms=12.5, token_ms=4.0, speculation=SPECULATION)


class FakeGenerator:
    """Yields `texts` one by one, then the finish; raises `error` before the text with index `error_at`.

    With `endless` it repeats the texts for ever; with `held` it waits for `go` before each text.
    """

    def __init__(
        self,
        texts: Sequence[str] = ("Hel", "lo", " you"),
        *,
        finish: FinishReason = FinishReason.STOP,
        error: Exception | None = None,
        error_at: int = 0,
        endless: bool = False,
        held: bool = False,
    ) -> None:
        self.texts = texts
        self.finish = finish
        self.error = error
        self.error_at = error_at
        self.endless = endless
        self.requests: list[GenerateRequest] = []
        self.started = anyio.Event()
        self.closed = anyio.Event()
        """Set when a generator ended, for whatever reason."""
        self.go = anyio.Event()
        if not held:
            self.go.set()
        self.yielded = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.started.set()
        try:
            while True:
                for index, text in enumerate(self.texts):
                    if self.error is not None and index == self.error_at:
                        raise self.error
                    await self.go.wait()
                    await anyio.lowlevel.checkpoint()
                    self.yielded += 1
                    yield Delta(text, (index,))
                if not self.endless:
                    break
            if self.error is not None:
                raise self.error
            yield Delta(finish=self.finish, usage=USAGE)
        finally:
            self.closed.set()
