"""From a model and what members offer to rings: pure, deterministic, never above what a node advertised.

`split` finds the best ring of some PCs. PCs that it leaves over make a further ring by the same rules and with the
same promise of KV, as long as one fits that is not much slower. And sometimes shorter rings beat one long ring:

A segment of r rows takes t(r) of compute, over N equal stages t(r)/N each and a hop h. With U users a ring is full:
N segments of r = U/N rows are under way, and U tokens take t(r) + N·h. The same PCs as R rings have the same r and take
t(r) + N/R·h: they save hops and nothing else, and hold the model R times. So loads are compared at r = 1, a user for
each PC, where a ring gives one token per bottleneck. A user alone gains the same hops without speculation; with it,
drafts keep up to N segments of the one answer under way, which only a long ring can run at once. That is the common
case, so shorter rings must be `CLEARLY_BETTER`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import fsum

from swarm.protocol import limits
from swarm.protocol.config import ENGINES, PAGED
from swarm.protocol.errors import ProtocolError
from swarm.protocol.ids import Epoch, NodeId
from swarm.protocol.plan import Plan, Stage
from swarm.ring.fit import Load, ModelShape, shortfall
from swarm.ring.split import TIE, Offer, Prediction, Problem, Ring, best_ring, forecast, quantized_speeds

KV_PROMISES = ((4, 4096), (2, 4096), (1, 4096), (1, 2048))
"""(sessions, tokens of each), largest first: KV cache set aside. The last is the least worth starting with."""

PROMISE_COST = 1.25
"""A larger promise may make the bottleneck this much longer: more room is not worth a far slower ring."""

RING_SLOWDOWN = 2.0
"""A token through a further ring takes at most this many times as long as through the first: on a slower one a session
would be worse off than sharing a stage of the first with another."""

CLEARLY_BETTER = 1.5
"""Shorter rings must together be so many times as fast as the plan of the longest. Below that, what drafts gain on a
long ring and the memory of the copies weigh more."""

MAX_RINGS = 16
"""Bounds the time of planning: each is searched for. More PCs that hold a model alone stay spares."""

MAX_EPOCH_NUMBER = 2**48
"""No honest swarm gets here; a peer that names a larger one would end all planning."""


def make_plan(
    model: ModelShape,
    offers: Sequence[Offer],
    epoch: Epoch,
    *,
    previous: Plan | None = None,
    remark: str = "",
    draft_bytes: int = 0,
) -> Plan:
    """The best plan for `model` on `offers`; without stages and with `missing_bytes` where it does not fit.

    `previous` keeps the order of its nodes; `remark` is put behind the note. Nodes keep `draft_bytes` free for a draft
    model where that costs neither sessions nor much speed. All stages run one engine, that of the nodes which together
    give the best plan: the last bits of two engines differ. The result depends on nothing else.
    """
    plan = _make_plan(model, offers, epoch, previous, remark)
    if draft_bytes and plan.stages:
        less = [replace(offer, memory_bytes=max(0, offer.memory_bytes - draft_bytes)) for offer in offers]
        roomy = _make_plan(model, less, epoch, previous, remark)
        before, after = (rate(model, offers, found) for found in (plan, roomy))
        if before and after and roomy.kv_tokens >= plan.kv_tokens and after * PROMISE_COST >= before:
            return roomy
    return plan


def _make_plan(model: ModelShape, offers: Sequence[Offer], epoch: Epoch, previous: Plan | None, remark: str) -> Plan:
    plans = []
    for engine in [name for name in ENGINES if any(offer.engine == name for offer in offers)] or [PAGED]:
        same = [offer for offer in offers if offer.engine == engine]
        left_out = _with(_other_engine(engine, offers), remark)
        plans.append(_plan_with(engine, model, same, epoch, previous, left_out))
    return min(plans, key=lambda plan: (-(rate(model, offers, plan) or 0.0), plan.missing_bytes))


def _plan_with(
    engine: str, model: ModelShape, offers: Sequence[Offer], epoch: Epoch, previous: Plan | None, remark: str
) -> Plan:
    offers = sorted(offers, key=lambda offer: offer.node)[: limits.MAX_STAGES]
    order = _stable_order(offers, previous)
    speeds = quantized_speeds(order)
    feasible: list[tuple[Problem, Ring]] = []
    for tokens in _promises(model.context_tokens):
        problem = Problem(model, tokens, Load.of(model, tokens, engine), order, speeds, previous)
        best = best_ring(problem, limits.MAX_STAGES)
        if best is not None:
            feasible.append((problem, best))
    if not feasible:
        least = Load.of(model, _promises(model.context_tokens)[-1], engine)
        missing = shortfall(least, [offer.memory_bytes for offer in offers])
        note = _with(f"the swarm lacks {_size(missing)} of memory for this model", remark)
        return Plan(epoch, model.manifest, missing_bytes=missing, note=note, engine=engine)
    limit = min(ring.prediction.bottleneck_ms for _, ring in feasible) * PROMISE_COST
    problem, first = next((p, ring) for p, ring in feasible if ring.prediction.bottleneck_ms <= limit)
    longest = _with_further(problem, first, limits.MAX_STAGES)
    rings = _shorter(problem, longest) or longest
    times = tuple(round(ring.prediction.token_ms, 3) for ring in rings)
    note = _with(_note(rings, longest, offers, len(model.layer_bytes)), remark)
    stages = tuple(stage for ring in rings for stage in ring.stages)
    return Plan(epoch, model.manifest, stages, problem.kv_tokens, 0, times[0], note, times, engine)


def _with_further(problem: Problem, first: Ring, most: int) -> list[Ring]:
    """`first`, and rings of at most `most` stages of the PCs that it and those before leave over."""
    rings, ring = [], first
    while ring.prediction.token_ms <= first.prediction.token_ms * RING_SLOWDOWN:
        rings.append(ring)
        problem = problem.without(ring)
        found = best_ring(problem, most) if len(rings) < MAX_RINGS else None
        if found is None:
            break
        ring = found
    return rings


def _shorter(problem: Problem, longest: Sequence[Ring]) -> list[Ring]:
    """Rings that are clearly better than those of `longest`, half as long, a quarter, …; none where there are none."""
    chosen: list[Ring] = []
    needed = _rate(longest) * CLEARLY_BETTER
    ideal = fsum(problem.speeds) / max(1, problem.load.compute_total) / 1e3
    most = len(longest[0].stages) // 2
    while most and needed <= ideal:
        first = best_ring(problem, most)
        if first is not None and first.prediction.token_ms <= longest[0].prediction.token_ms:
            rings = _with_further(problem, first, most)
            if _rate(rings) >= needed:
                chosen, needed = rings, _rate(rings) * TIE
        most //= 2
    return chosen


def _rate(rings: Sequence[Ring]) -> float:
    """Tokens per millisecond with a user for each PC."""
    return fsum(1 / max(ring.prediction.bottleneck_ms, 1e-9) for ring in rings)


def rate(model: ModelShape, offers: Sequence[Offer], plan: Plan) -> float | None:
    """Tokens per second of `plan` on `offers` with a user for each PC; None as in `predict`."""
    predictions = [predict(model, offers, stages) for stages in plan.rings]
    found = [1e3 / max(p.bottleneck_ms, 1e-9) for p in predictions if p is not None]
    return fsum(found) if found and len(found) == len(predictions) else None


def predict(model: ModelShape, offers: Sequence[Offer], stages: Sequence[Stage]) -> Prediction | None:
    """What a ring of `stages` would do on `offers`; None where one of its nodes is gone or lacks the memory."""
    by_node = {offer.node: offer for offer in offers}
    if not stages or any(s.node not in by_node or s.bytes > by_node[s.node].memory_bytes for s in stages):
        return None
    ordered = sorted(offers, key=lambda offer: offer.node)
    speed = dict(zip((offer.node for offer in ordered), quantized_speeds(ordered), strict=True))
    load = Load.of(model, 0)
    last = len(stages) - 1
    used = [by_node[stage.node] for stage in stages]
    compute = [load.compute(s.start, s.end, i == last) / speed[s.node] * 1e3 for i, s in enumerate(stages)]
    return forecast(used, compute)


def check_plan(plan: Plan) -> None:
    """Raises `ProtocolError` for a plan from a peer that no honest proposer makes."""
    stages = plan.stages
    problem = ""
    if not 0 <= plan.epoch.number < MAX_EPOCH_NUMBER:
        problem = f"epoch number {plan.epoch.number}"
    elif len(stages) > limits.MAX_STAGES or (stages and stages[-1].end > limits.MAX_LAYERS):
        problem = f"{len(stages)} stages to layer {stages[-1].end}"
    elif len({stage.node for stage in stages}) != len(stages):
        problem = "a node with two stages"
    elif any(stage.start >= stage.end or stage.bytes < 0 for stage in stages):
        problem = "an empty stage"
    elif [stage.start for stage in stages] != _starts(stages):
        problem = f"ranges {[(stage.start, stage.end) for stage in stages]}"[:200]
    elif plan.ring_token_ms and len(plan.ring_token_ms) != len(plan.rings):
        problem = f"{len(plan.ring_token_ms)} times for {len(plan.rings)} rings"
    elif plan.ring_epochs and (len(plan.ring_epochs) != len(plan.rings) or max(plan.ring_epochs) > plan.epoch):
        problem = f"{len(plan.ring_epochs)} epochs for {len(plan.rings)} rings, or one of the future"
    elif stages and plan.model is None:
        problem = "stages of no model"
    elif min(plan.kv_tokens, plan.missing_bytes, *plan.ring_token_ms) < 0:
        problem = "a negative size"
    elif plan.engine not in ENGINES:
        problem = f"engine {plan.engine[:20]!r}"
    if problem:
        raise ProtocolError("bad plan", expected="rings that cover every layer once", found=problem)


def keep_rings(plan: Plan, before: Plan, gone: Collection[NodeId] = ()) -> Plan:
    """`plan`; rings that it has just as `before`, the plan in force, keep their epochs, and their sessions go on.

    What a node in `gone` held is lost, though it is in both.
    """
    if (plan.model, plan.engine, plan.kv_tokens) != (before.model, before.engine, before.kv_tokens):
        return plan
    parts = [before.ring(index) for index in range(len(before.rings))]
    since = {part.stages: part.epoch for part in parts if not any(stage.node in gone for stage in part.stages)}
    if not since.keys() & set(plan.rings):
        return plan
    return replace(plan, ring_epochs=tuple(since.get(stages, plan.epoch) for stages in plan.rings))


def _starts(stages: Sequence[Stage]) -> list[int]:
    """Where the stages of a plan must start, as they end: at 0, and at 0 again behind the last layer."""
    last = stages[-1].end if stages else 0
    return [0, *(0 if stage.end == last else stage.end for stage in stages[:-1])][: len(stages)]


def _stable_order(offers: Sequence[Offer], previous: Plan | None) -> list[Offer]:
    """Nodes of the previous plan in its order, then the others by id."""
    place = {stage.node: index for index, stage in enumerate(previous.stages)} if previous else {}
    return sorted(offers, key=lambda offer: (place.get(offer.node, len(place)), offer.node))


def _promises(context_tokens: int) -> list[int]:
    """Positions of KV cache to try, largest first, no session longer than the model's context."""
    totals = {sessions * min(tokens, context_tokens) for sessions, tokens in KV_PROMISES}
    return sorted(totals, reverse=True)


def _note(rings: Sequence[Ring], longest: Sequence[Ring], offers: Sequence[Offer], layers: int) -> str:
    used = {stage.node for ring in rings for stage in ring.stages}
    spares = [offer.name for offer in offers if offer.node not in used]
    stages = rings[0].stages
    if len(rings) > 1:
        text = _note_of_several(rings, longest)
    elif len(stages) > 1:
        text = f"{len(stages)} PCs share {layers} layers"
    elif spares:
        text = f"{stages[0].name} runs alone: a ring would be slower"
    else:
        text = f"one PC holds all {layers} layers"
    if not spares:
        return text
    return f"{text}; {'spare' if len(spares) == 1 else 'spares'}: {_listed(spares)}"


def _note_of_several(rings: Sequence[Ring], longest: Sequence[Ring]) -> str:
    sizes = sorted({len(ring.stages) for ring in rings})
    if sizes == [1]:
        return f"{len(rings)} rings: each of {len(rings)} PCs holds the model, a longer ring would be slower"
    text = f"{len(rings)} rings of {' to '.join(str(size) for size in sorted({sizes[0], sizes[-1]}))} PCs"
    if rings is longest:
        return f"{text}: the PCs that the first leaves over take answers too"
    return f"{text}: fewer hops, {_rate(rings) / _rate(longest):.1f} times as fast as rings of {len(longest[0].stages)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _other_engine(engine: str, offers: Sequence[Offer]) -> str:
    """Who has no part in a plan of `engine`, and why."""
    others = sorted(offer.name for offer in offers if offer.engine != engine)
    if not others:
        return ""
    shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return f"without {shown}: another --engine than {engine}"


def _with(note: str, remark: str) -> str:
    return f"{note}; {remark}" if note and remark else note or remark


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6))} MB"
