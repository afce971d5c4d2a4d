"""The four rules of exactness, each broken on purpose: the self-test must notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov
import pytest

from swarm.engine import devices, paged
from swarm.engine.blocks import BlockTable
from swarm.engine.selftest import SelfTest, self_test
from swarm.protocol.messages import RowKind, Segment


def run() -> SelfTest:
    return self_test("CPU", threads=1)


def test_the_rules_hold_on_the_cpu() -> None:
    assert run().differences == dict.fromkeys(("again", "cut", "chunks", "batches", "windows"), 0.0)


def test_rule_1_without_an_f16_cache_rewinds_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.profile("CPU").properties, "KV_CACHE_PRECISION", "u8")
    assert run().differences["windows"] > 0


def test_rule_2_a_window_as_one_subsequence_changes_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneSubsequence(paged._Rows):
        def __init__(self, batch: Sequence[Segment], tables: Sequence[BlockTable]) -> None:
            prefill: Any = RowKind.PREFILL
            super().__init__([_as(segment, prefill) for segment in batch], tables)

    monkeypatch.setattr(paged, "_Rows", OneSubsequence)
    assert run().differences["windows"] > 0


def test_rule_3_a_forward_of_one_row_changes_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "MIN_ROWS", 1)
    assert max(run().differences.values()) > 0


def test_rule_4_a_hidden_input_without_its_size_changes_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_restore_hidden_size", _leave)
    assert run().differences["cut"] > 0


def _as(segment: Segment, kind: RowKind) -> Segment:
    from dataclasses import replace

    return replace(segment, kind=kind)


def _leave(model: ov.Model, hidden_size: int) -> None:
    """Do not restore the size."""
