"""The scripts run to their last line; what they measure is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.clients import Stream, read
from bench.nodes import together
from bench.throttle import Line

ROOT = Path(__file__).parents[2]


def run_quickly(*arguments: str, simulated: bool = False) -> dict[str, float]:
    command = [sys.executable, "-m", *arguments, "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["simulated"] is simulated
    figures: dict[str, float] = result["figures"]
    return figures


def test_hop() -> None:
    assert "hop_ms" in run_quickly("bench.hop")


@pytest.mark.model
@pytest.mark.slow
def test_shards() -> None:
    figures = run_quickly("bench.shards", "--model", "smollm2")
    assert figures["smollm2_logits_max_diff"] == 0.0
    assert {"smollm2_solo_vs_genai", "smollm2_stages2", "smollm2_stages3"} <= figures.keys()


@pytest.mark.model
@pytest.mark.slow
def test_gguf() -> None:
    figures = run_quickly("bench.gguf", "--model", "smollm2")
    assert {"smollm2_before_ms", "smollm2_after_ms"} <= figures.keys()
    assert figures["smollm2_perplexity_ratio"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.large
@pytest.mark.slow
def test_drafts() -> None:
    figures = run_quickly("bench.drafts")
    assert 0.4 < figures["int8_right_greedy"] <= 1
    assert figures["int8_1_ms"] < figures["target_1_ms"]


@pytest.mark.model
@pytest.mark.slow
def test_rewind() -> None:
    figures = run_quickly("bench.rewind")
    assert figures["rewind_ms"] < figures["rewind_physical_256_ms"]


@pytest.mark.model
@pytest.mark.slow
def test_prefix() -> None:
    figures = run_quickly("bench.prefix", "--model", "smollm2")
    assert figures["prefix_identical"] == 1.0
    assert {"prefix_ttft", "prefix_together"} <= figures.keys()


@pytest.mark.model
@pytest.mark.slow
def test_beam_idx() -> None:
    figures = run_quickly("bench.beam_idx")
    assert (figures["fused_with"], figures["fused_without"]) == (30, 0)
    assert figures["with_64_tokens_per_second"] > 0


@pytest.mark.model
@pytest.mark.slow
def test_two_nodes() -> None:
    figures = run_quickly("bench.two_nodes", "--model", "smollm2", "--users", "1")
    assert figures["smollm2_two_nodes_one_user"] > 0


@pytest.mark.model
@pytest.mark.slow
def test_store() -> None:
    figures = run_quickly("bench.store")
    assert {"fetch_1_source", "fetch_3_sources", "start_cold_s", "start_warm_store_s"} <= figures.keys()
    assert figures["replan_bytes_to_plan"] == 1.0


def test_a_line_carries_its_rate_and_no_more() -> None:
    line = Line(1000.0)
    first, second = line.release_time(100), line.release_time(100)
    assert second - first == pytest.approx(0.1)


def test_simulated() -> None:
    figures = run_quickly("bench.simulated", simulated=True)
    assert figures["three_nodes_three_users"] > 1
    assert figures["four_stages_spec"] > 1


@pytest.mark.model
@pytest.mark.slow
def test_costs() -> None:
    figures = run_quickly("bench.costs")
    assert 0 < figures["stage2_of_4_rows2_ms"] < figures["stage2_of_4_rows32_ms"]


@pytest.mark.model
@pytest.mark.slow
def test_exactness() -> None:
    figures = run_quickly("bench.exactness")
    assert figures["smollm2_identical"] == figures["smollm2_runs"] > 0
    assert figures["smollm2_rejected"] > 0


@pytest.mark.model
@pytest.mark.slow
def test_mixes() -> None:
    figures = run_quickly("bench.mixes", "--stages", "2")
    assert figures["smollm2_answers"] > 50
    assert {figures[f"smollm2_{name}"] for name in ("different", "faults", "mismatches")} == {0}


@pytest.mark.model
@pytest.mark.slow
def test_wan() -> None:
    assert run_quickly("bench.wan")["wan50"] > 0


@pytest.mark.model
@pytest.mark.slow
def test_two_nodes_that_draft() -> None:
    figures = run_quickly("bench.two_nodes", "--model", "smollm2", "--users", "1", "--speculation")
    assert figures["smollm2_two_nodes_one_user_spec"] > 0


@pytest.mark.large
@pytest.mark.slow
def test_speculation() -> None:
    figures = run_quickly("bench.speculation")
    assert figures["spec_identical"] == 1.0
    assert {"spec_mean", "spec_min", "spec_vs_genai"} <= figures.keys()


@pytest.mark.export
def test_export() -> None:
    pytest.importorskip("optimum.intel")
    figures = run_quickly("bench.export")
    assert min(figures.values()) > 0
    assert {"whole_peak_mb", "half_peak_mb", "quarter_peak_mb", "quarter_to_optimum_whole"} <= figures.keys()


@pytest.mark.export
def test_families() -> None:
    pytest.importorskip("optimum.intel")
    figures = run_quickly("bench.families")
    assert figures == {"llama: max_difference": 0.0, "llama: cuts": 5, "llama: same_blobs": 1.0}


@pytest.mark.model
@pytest.mark.slow
def test_users() -> None:
    figures = run_quickly("bench.users", "--model", "smollm2")
    assert figures["genai_users1"] == 1.0
    assert {"paged_stages1_users4", "paged_stages2_users4_ttft_p95_ms", "genai_users4_tpot_p95_ms"} <= figures.keys()


@pytest.mark.model
@pytest.mark.slow
def test_session_memory() -> None:
    figures = run_quickly("bench.session_memory", "--model", "smollm2")
    assert figures["paged_session_mb"] == pytest.approx(figures["paged_kv_mb"], rel=0.5)
    assert figures["stateful_session_mb"] >= 0.9 * figures["stateful_kv_mb"]


def test_an_answer_is_read_from_what_arrived() -> None:
    def event(text: str, **more: object) -> bytes:
        line = json.dumps({"choices": [{"delta": {"content": text}}], **more})
        return f"data: {line}\n\n".encode()

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)

    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    first, second = chunk(event("Hel")), chunk(event("lo", usage={"completion_tokens": 2}))
    arrived = [(1.0, head + first[:20]), (2.0, first[20:]), (3.0, second), (4.0, chunk(b"data: [DONE]\n\n"))]
    assert read(0.5, arrived) == Stream(0.5, (2.0, 3.0), 2, "Hello")


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": "gone"}\n']
)
def test_a_refusal_is_no_answer(said: bytes) -> None:
    with pytest.raises(RuntimeError):
        read(0.0, [(1.0, said)] if said else [])


def test_only_what_all_users_shared_counts() -> None:
    early = Stream(asked=0.0, pieces=(1.0, 2.0, 3.0, 4.0, 5.0), tokens=5, text="")
    late = Stream(asked=0.0, pieces=(2.5, 3.5, 4.5, 5.5, 6.5), tokens=9, text="")
    found = together([early, late])
    # From 2.5 to 5: three tokens of one, two pieces of two tokens each of the other.
    assert found.rate == pytest.approx((3 + 4) / 2.5)
    assert found.tpot_ms == [1000.0, 500.0]
    assert found.ttft_ms == pytest.approx(1750.0)


def test_users_one_after_the_other_have_no_rate_together() -> None:
    early = Stream(asked=0.0, pieces=(1.0, 2.0), tokens=2, text="")
    late = Stream(asked=0.0, pieces=(3.0, 4.0), tokens=2, text="")
    assert together([early, late]).rate == 0.0
