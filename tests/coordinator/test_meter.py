from __future__ import annotations

import pytest

from swarm.coordinator.meter import WINDOW_S, TokenMeter


def test_a_steady_rate_is_shown_and_forgotten() -> None:
    meter = TokenMeter()
    assert meter.rate(100.0) == 0
    for tenth in range(100):
        meter.add(2, 100.0 + tenth / 10)
    assert meter.rate(109.9) == pytest.approx(20, rel=0.1)
    assert meter.rate(110.0 + WINDOW_S) == 0


def test_memory_is_bounded() -> None:
    meter = TokenMeter()
    for moment in range(10_000):
        meter.add(1, moment / 7)
    assert len(meter._buckets) <= 12
