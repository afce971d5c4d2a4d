"""`GET /status` and ``status --json``: a `Snapshot` as plain JSON values. Pure; fields are only ever added."""

from __future__ import annotations

import math
from typing import Any

from swarm.protocol.ids import NodeId
from swarm.protocol.messages import MemberState, Phase
from swarm.protocol.plan import Plan
from swarm.protocol.snapshot import MemberView, Snapshot, SpeculationView
from swarm.protocol.version import SOFTWARE_VERSION

_RETRY_S = (1, 60)
"""Bounds of a Retry-After: a fetch that says two hours may still end sooner, with another peer."""

_RETRY_UNKNOWN_S = 5


def status(snapshot: Snapshot) -> dict[str, Any]:
    """The whole picture; the pairing code is left out, it is a secret."""
    forming = snapshot.forming
    return {
        "ready": snapshot.ready,
        "reason": "" if snapshot.ready else snapshot.reason,
        "swarm": snapshot.swarm,
        "open": snapshot.open,
        "model": snapshot.model,
        "epoch": snapshot.plan.epoch.number,
        "node": {"id": snapshot.node, "name": snapshot.name},
        "api": snapshot.api,
        "addresses": list(snapshot.addresses),
        "members": [_member(member) for member in snapshot.members],
        "stages": _stages(snapshot.plan),
        "kv_tokens": snapshot.plan.kv_tokens,
        "predicted_token_ms": snapshot.plan.predicted_token_ms,
        "ring_token_ms": list(snapshot.plan.ring_token_ms),
        "engine": snapshot.plan.engine,
        "note": snapshot.plan.note,
        "forming": None if forming is None else {"epoch": forming.epoch.number, "stages": _stages(forming)},
        "missing_bytes": _missing_bytes(snapshot),
        "progress": progress(snapshot),
        "fetched": [{"node": node, "name": _name(snapshot, node), "bytes": count} for node, count in snapshot.fetched],
        "tokens_per_second": snapshot.tokens_per_second,
        "speculation": _speculation(snapshot.speculation),
        "queued": snapshot.queued,
        "notices": list(snapshot.notices),
        "uptime_s": round(snapshot.uptime_s, 3),
        "version": SOFTWARE_VERSION,
    }


def _name(snapshot: Snapshot, node: NodeId) -> str:
    member = snapshot.member(node)
    return member.name if member else ""


def _missing_bytes(snapshot: Snapshot) -> int:
    plans = [plan for plan in (snapshot.plan, snapshot.forming) if plan is not None]
    return 0 if any(plan.stages for plan in plans) else max(plan.missing_bytes for plan in plans)


def _member(member: MemberView) -> dict[str, Any]:
    return {
        "id": member.node,
        "name": member.name,
        "state": member.state.name.lower(),
        "memory_bytes": member.memory_bytes,
        "device": member.device,
        "resident_bytes": member.resident_bytes,
        "round_trip_ms": member.round_trip_ms,
        "step_ms": member.step_ms,
        "hop_ms": member.hop_ms,
        "tokens_per_second": member.tokens_per_second,
        "sessions": member.sessions,
        "waiting": member.waiting,
    }


def _stages(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "node": stage.node,
            "name": stage.name,
            "start": stage.start,
            "end": stage.end,
            "device": stage.device,
            "bytes": stage.bytes,
            "ring": ring,
        }
        for ring, stages in enumerate(plan.rings)
        for stage in stages
    ]


def _speculation(view: SpeculationView) -> dict[str, Any]:
    """Of all answers of this node since it started."""
    return {
        "enabled": view.enabled,
        "draft": view.draft,
        "no_draft": view.no_draft,
        "windows": view.windows,
        "drafted": view.drafted,
        "accepted": view.accepted,
        "rejected": view.rejected,
        "wasted_rows": view.wasted_rows,
        "k": round(view.k, 2),
        "depth": round(view.depth, 2),
        "gain": round(view.gain, 3),
        "ngram": {"drafted": view.ngram_drafted, "accepted": view.ngram_accepted},
        "model": {"drafted": view.model_drafted, "accepted": view.model_accepted},
    }


def _busy(snapshot: Snapshot) -> list[MemberView]:
    gone = (MemberState.DEAD, MemberState.LEFT)
    return [member for member in snapshot.members if member.phase is not Phase.IDLE and member.state not in gone]


def progress(snapshot: Snapshot) -> list[dict[str, Any]]:
    """What the members are busy with; `total` 0 where it is not known, `seconds_left` null likewise."""
    return [
        {
            "node": member.node,
            "name": member.name,
            "phase": member.phase.name.lower(),
            "label": member.label,
            "done": member.done,
            "total": member.total,
            "rate": member.rate,
            "seconds_left": member.seconds_left,
        }
        for member in _busy(snapshot)
    ]


def retry_after_s(snapshot: Snapshot) -> int:
    """When to ask again: the longest time left of any progress, within bounds."""
    left = [member.seconds_left for member in _busy(snapshot)]
    known = [seconds for seconds in left if seconds is not None]
    low, high = _RETRY_S
    return min(high, max(low, math.ceil(max(known)))) if known else _RETRY_UNKNOWN_S
