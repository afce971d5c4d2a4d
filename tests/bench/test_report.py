"""How benchmarks take turns and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import report as reporting
from bench.report import in_turns, on_core, percentile, ratios, report, spread


def test_turns_alternate_and_the_first_does_not_count() -> None:
    calls: list[str] = []

    def party(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = in_turns({"a": lambda: party("a"), "b": lambda: party("b")}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_spread_and_percentile() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.000 [1.000 to 3.000]"
    assert percentile([float(i) for i in range(100)], 0.95) == 95.0
    assert percentile([1.0], 0.95) == 1.0
    assert ratios([2.0, 3.0], [1.0, 2.0]) == [2.0, 1.5]


def test_last_line_is_the_result_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    report("x", {"hop_ms": 0.12345}, {"rounds": 5}, simulated=True)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "x"
    assert line["figures"] == {"hop_ms": 0.1235}
    assert line["simulated"] is True
    assert line["settings"]["rounds"] == 5
    assert line["settings"]["machine"]["openvino"]
    assert json.loads((tmp_path / "results" / "x.json").read_text(encoding="utf-8")) == line
    report("y", {}, {}, keep=False)
    assert not (tmp_path / "results" / "y.json").exists()


def test_a_node_is_one_core() -> None:
    core = reporting.cores()[-1]
    assert on_core(core, reporting.cores) == [core]
