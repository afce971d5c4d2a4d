"""Tokens per second over the last seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 3.0
"""Long enough to be steady at a few tokens a second, short enough to follow a change."""


class TokenMeter:
    """Counts in buckets of a tenth of the window, so its memory does not grow with the rate."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque(maxlen=12)

    def add(self, tokens: int, now: float) -> None:
        bucket = _bucket(now)
        if self._buckets and self._buckets[-1][0] == bucket:
            tokens += self._buckets.pop()[1]
        self._buckets.append((bucket, tokens))

    def rate(self, now: float) -> float:
        """Tokens per second in the last `WINDOW_S`."""
        oldest = _bucket(now) - 10
        return sum(tokens for bucket, tokens in self._buckets if bucket > oldest) / WINDOW_S


def _bucket(now: float) -> int:
    return int(now * 10 / WINDOW_S)
