"""The rules of exactness of both engines, each broken on purpose: the self-test must notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov
import pytest

from swarm.engine import devices, paged, stateful
from swarm.engine.blocks import BlockTable
from swarm.engine.layout import Layout
from swarm.engine.selftest import SelfTest, self_test
from swarm.model import tiny
from swarm.protocol.config import ENGINES, STATEFUL
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind, Segment


def run() -> SelfTest:
    return self_test("CPU", threads=1)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_rules_hold_on_the_cpu(kind: str) -> None:
    found = self_test("CPU", threads=1, kind=kind)
    assert (found.engine, found.exact) == (kind, True)
    assert found.differences == dict.fromkeys(("again", "cut", "chunks", "batches", "windows"), 0.0)


# --- paged -----------------------------------------------------------------------------------------------------------


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


# --- stateful --------------------------------------------------------------------------------------------------------


def run_stateful() -> SelfTest:
    return self_test("CPU", threads=1, kind=STATEFUL)


def test_stateful_rule_1_positions_that_change_their_lane_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(layout: Layout, rows: int) -> int:
        """As `Layout.append`, leaving nothing out."""
        layout.runs.append((layout.held, layout.cells - layout.held))
        layout.held, layout.cells = layout.held + rows, layout.cells + rows
        return 0

    monkeypatch.setattr(Layout, "append", append)
    assert run_stateful().differences["windows"] > 0


def test_stateful_rule_2_a_cache_that_begins_empty_changes_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_empty(engine: stateful.StatefulEngine, name: SessionId) -> Any:
        session = stateful._Session(engine._compiled, engine._compiled.create_infer_request(), Layout(cells=0))
        engine._sessions[name] = session
        return session

    monkeypatch.setattr(stateful.StatefulEngine, "_open", open_empty)
    assert run_stateful().differences["chunks"] > 0


@pytest.mark.skipif(stateful.usable_cores() < 2, reason="needs two cores")
def test_stateful_rule_3_a_head_shared_between_threads_changes_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "KV_HEADS", 1)
    monkeypatch.setattr(stateful, "dividing_threads", lambda heads, cores: 2)
    assert run_stateful().differences["windows"] > 0


def test_stateful_rule_4_a_forward_of_one_row_changes_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plugin does not quantize activations."""
    monkeypatch.setattr(stateful, "weight_group", lambda weights: 0)
    assert run_stateful().exact
    monkeypatch.setattr(stateful, "MIN_ROWS", 1)
    assert run_stateful().differences["windows"] > 0


def _as(segment: Segment, kind: RowKind) -> Segment:
    from dataclasses import replace

    return replace(segment, kind=kind)


def _leave(model: ov.Model, hidden_size: int) -> None:
    """Do not restore the size."""
