"""The planner: what a person expects of an office, and what must hold for every model and every swarm."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarm.protocol.config import PAGED, STATEFUL
from swarm.protocol.errors import ProtocolError
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.plan import NO_PLAN, Plan, Stage
from swarm.ring.fit import Load, ModelShape
from swarm.ring.plan import MAX_EPOCH_NUMBER, MAX_RINGS, RING_SLOWDOWN, check_plan, keep_rings, make_plan, predict, rate
from swarm.ring.split import (
    HOP_OVERHEAD_MS,
    MAX_SLOWDOWN,
    MIN_GAIN,
    PRECISION,
    SPEED_STEP,
    TIE,
    Offer,
    quantized_speeds,
)

GB = 10**9
MB = 10**6
MANIFEST = BlobId("a" * 64)


def node(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


EPOCH = Epoch(1, node(1))


def model(
    layers: int = 30,
    layer_bytes: int = 10 * MB,
    embedding: int = 0,
    head: int = 0,
    *,
    tied: bool = False,
    kv: int = 1000,
    hidden: int = 576,
    context: int = 8192,
) -> ModelShape:
    sizes = (layer_bytes,) * layers
    return ModelShape(MANIFEST, sizes, embedding, head, tied, (kv,) * layers, hidden, context)


def offer(
    number: int, memory: float = 8 * GB, speed: float = 10 * GB, round_trip_ms: float = 0.4, name: str = ""
) -> Offer:
    return Offer(node(number), name or f"PC-{number}", int(memory), "CPU", speed, round_trip_ms)


def ranges(plan: Plan) -> list[tuple[str, int, int]]:
    return [(stage.name, stage.start, stage.end) for stage in plan.stages]


def sizes(plan: Plan) -> list[int]:
    return [stage.end - stage.start for stage in plan.stages]


# --- what a person expects ------------------------------------------------------------------------------------------


def test_one_pc_holds_it_all() -> None:
    plan = make_plan(model(), [offer(1)], EPOCH)
    assert ranges(plan) == [("PC-1", 0, 30)]
    assert plan.note == "one PC holds all 30 layers"
    assert plan.predicted_token_ms == pytest.approx(30.0)
    assert (plan.epoch, plan.model, plan.missing_bytes) == (EPOCH, MANIFEST, 0)


def test_three_equal_pcs_share_thirty_layers_evenly() -> None:
    plan = make_plan(model(), [offer(3), offer(1), offer(2)], EPOCH)
    assert ranges(plan) == [("PC-1", 0, 10), ("PC-2", 10, 20), ("PC-3", 20, 30)]
    assert plan.note == "3 PCs share 30 layers"
    assert plan.predicted_token_ms == pytest.approx(30 + 3 * (0.2 + HOP_OVERHEAD_MS))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 8, 10])
def test_equal_pcs_differ_by_a_layer_at_most(count: int) -> None:
    plan = make_plan(model(layer_bytes=50 * MB), [offer(i) for i in range(count)], EPOCH)
    assert len(plan.stages) == count
    assert max(sizes(plan)) - min(sizes(plan)) <= 1


def test_the_head_counts_as_layers_and_the_embedding_does_not() -> None:
    plan = make_plan(model(head=30 * MB, embedding=500 * MB), [offer(1), offer(2), offer(3)], EPOCH)
    assert sizes(plan) == [11, 11, 8]


def test_a_tied_head_is_the_embedding_again() -> None:
    plan = make_plan(model(embedding=30 * MB, tied=True), [offer(1), offer(2), offer(3)], EPOCH)
    assert sizes(plan) == [11, 11, 8]


def test_measurement_noise_does_not_make_equal_pcs_unequal() -> None:
    plan = make_plan(model(), [offer(1, speed=9.1 * GB), offer(2, speed=10.9 * GB), offer(3, speed=10 * GB)], EPOCH)
    assert sizes(plan) == [10, 10, 10]


def test_a_pc_twice_as_fast_gets_twice_the_layers() -> None:
    plan = make_plan(model(), [offer(1, speed=20 * GB), offer(2, speed=10 * GB)], EPOCH)
    assert sizes(plan) == [20, 10]


def test_a_far_slower_pc_is_a_spare() -> None:
    plan = make_plan(model(), [offer(1), offer(2), offer(7, speed=0.8 * GB)], EPOCH)
    assert ranges(plan) == [("PC-1", 0, 15), ("PC-2", 15, 30)]
    assert plan.note == "2 PCs share 30 layers; spare: PC-7"


def stateful(one: Offer) -> Offer:
    return replace(one, engine=STATEFUL)


def test_engines_are_never_mixed_in_one_ring() -> None:
    """The pair is faster than the one that runs another engine, so the pair serves."""
    plan = make_plan(model(), [offer(1), offer(2), stateful(offer(3))], EPOCH)
    assert ([stage.name for stage in plan.stages], plan.engine) == (["PC-1", "PC-2"], PAGED)
    assert plan.note == "2 PCs share 30 layers; without PC-3: another --engine than paged"
    plan = make_plan(model(), [offer(1), stateful(offer(2)), stateful(offer(3))], EPOCH)
    assert ([stage.name for stage in plan.stages], plan.engine) == (["PC-2", "PC-3"], STATEFUL)
    assert plan.note.endswith("without PC-1: another --engine than stateful")


def test_of_two_engines_that_are_equally_fast_paged_serves() -> None:
    plan = make_plan(model(), [stateful(offer(1)), offer(2)], EPOCH)
    assert ([stage.name for stage in plan.stages], plan.engine) == (["PC-2"], PAGED)


def test_a_model_that_fits_one_engines_pcs_alone_runs_there() -> None:
    offers = [offer(1, memory=100 * MB), *(stateful(offer(i, memory=400 * MB)) for i in (2, 3))]
    assert make_plan(model(kv=0), offers, EPOCH).engine == STATEFUL


def test_an_engine_that_this_version_does_not_know_has_no_part() -> None:
    plan = make_plan(model(), [offer(1), replace(offer(2), engine="tomorrow's")], EPOCH)
    assert [stage.name for stage in plan.stages] == ["PC-1"]
    nothing = make_plan(model(), [replace(offer(2), engine="tomorrow's")], EPOCH)
    assert (nothing.stages, nothing.missing_bytes > 0) == ((), True)


def test_stateful_caches_count_twice() -> None:
    paged, doubled = make_plan(model(kv=0), [offer(1)], EPOCH), make_plan(model(kv=0), [stateful(offer(1))], EPOCH)
    assert paged.stages[0].bytes == doubled.stages[0].bytes
    paged, doubled = make_plan(model(), [offer(1)], EPOCH), make_plan(model(), [stateful(offer(1))], EPOCH)
    assert doubled.stages[0].bytes - paged.stages[0].bytes == 30 * 1000 * paged.kv_tokens


def test_a_plan_of_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ProtocolError, match="engine 'next'"):
        check_plan(replace(make_plan(model(), [offer(1)], EPOCH), engine="next"))


def test_a_far_slower_pc_serves_where_its_memory_is_needed() -> None:
    offers = [offer(1, memory=170 * MB), offer(2, memory=170 * MB), offer(7, memory=300 * MB, speed=0.8 * GB)]
    plan = make_plan(model(kv=0), offers, EPOCH)
    assert {stage.name: stage.end - stage.start for stage in plan.stages} == {"PC-1": 14, "PC-2": 14, "PC-7": 2}


def test_a_pc_behind_a_slow_link_is_a_ring_of_its_own() -> None:
    plan = make_plan(model(), [offer(1), offer(2), offer(3, round_trip_ms=80)], EPOCH)
    assert [[stage.name for stage in stages] for stages in plan.rings] == [["PC-1", "PC-2"], ["PC-3"]]


def test_a_pc_behind_a_slow_link_is_a_spare_where_it_cannot_hold_the_model() -> None:
    plan = make_plan(model(), [offer(1), offer(2), offer(3, memory=200 * MB, round_trip_ms=80)], EPOCH)
    assert ranges(plan) == [("PC-1", 0, 15), ("PC-2", 15, 30)]
    assert plan.note == "2 PCs share 30 layers; spare: PC-3"


def test_a_small_model_on_a_slow_network_runs_alone_on_each() -> None:
    plan = make_plan(model(), [offer(i, round_trip_ms=50) for i in (1, 2, 3)], EPOCH)
    assert ranges(plan) == [("PC-1", 0, 30), ("PC-2", 0, 30), ("PC-3", 0, 30)]
    assert plan.note == "3 rings: each of 3 PCs holds the model, a longer ring would be slower"
    assert plan.ring_token_ms == (30.0, 30.0, 30.0)


def test_alone_means_first_on_the_fastest() -> None:
    plan = make_plan(model(), [offer(1, round_trip_ms=50), offer(2, speed=15 * GB, round_trip_ms=50)], EPOCH)
    assert ranges(plan) == [("PC-2", 0, 30), ("PC-1", 0, 30)]


def test_a_pc_that_holds_too_little_beside_one_that_runs_alone_is_a_spare() -> None:
    plan = make_plan(model(), [offer(1, round_trip_ms=50), offer(2, memory=200 * MB, round_trip_ms=50)], EPOCH)
    assert plan.note == "PC-1 runs alone: a ring would be slower; spare: PC-2"


def test_a_large_model_on_a_slow_network_still_runs_where_nobody_holds_it_alone() -> None:
    plan = make_plan(model(), [offer(i, memory=230 * MB, round_trip_ms=50) for i in (1, 2, 3)], EPOCH)
    assert len(plan.stages) >= 2


def test_one_user_never_waits_more_than_twice_as_long_as_alone() -> None:
    """Twenty stages of 1 ms and 5 ms hops would saturate faster than fewer, but each token would take 120 ms."""
    one_copy = [offer(i, memory=GB if i == 0 else 300 * MB, round_trip_ms=9) for i in range(20)]
    plan = make_plan(model(layers=20), one_copy, EPOCH)
    assert 1 < len(plan.ring(0).stages) < 20
    assert plan.predicted_token_ms <= MAX_SLOWDOWN * 20


def test_more_pcs_than_layers_leave_spares() -> None:
    offers = [offer(i, memory=200 * MB) for i in range(7)]
    plan = make_plan(model(layers=4, layer_bytes=100 * MB, kv=0), offers, EPOCH)
    assert sizes(plan) == [1, 1, 1, 1]
    assert plan.note.endswith("spares: PC-4, PC-5, PC-6")


def test_many_spares_are_counted_not_listed() -> None:
    offers = [offer(i, memory=1.2 * GB if i < 3 else GB // 2) for i in range(9)]
    plan = make_plan(model(layers=2, layer_bytes=GB), offers, EPOCH)
    assert plan.note.endswith("and 4 more")


def test_pcs_that_would_only_shrink_the_last_stage_make_a_ring_of_their_own() -> None:
    """With 30 layers, 16 to 29 equal PCs are no faster than 15: some stage has two layers anyway."""
    plan = make_plan(model(layer_bytes=100 * MB), [offer(i) for i in range(20)], EPOCH)
    assert [len(stages) for stages in plan.rings] == [15, 5]
    assert plan.note == "2 rings of 5 to 15 PCs: the PCs that the first leaves over take answers too"


# --- several rings --------------------------------------------------------------------------------------------------


def test_a_ring_that_is_much_slower_is_not_made() -> None:
    """Three times as slow alone as the others together: with a second user on their ring nobody would be slower."""
    plan = make_plan(model(), [offer(1), offer(2), offer(3, speed=3 * GB, round_trip_ms=80)], EPOCH)
    assert plan.note == "2 PCs share 30 layers; spare: PC-3"


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 8])
def test_equal_pcs_on_a_lan_stay_one_ring(count: int) -> None:
    plan = make_plan(model(layers=30), [offer(i, speed=5 * GB) for i in range(count)], EPOCH)
    assert len(plan.rings) == 1


def test_shorter_rings_where_hops_cost_more_than_drafts_can_gain() -> None:
    """Four stages of 7.5 ms and hops of 5 ms: 50 ms a token and one in 12.5 ms; four PCs alone one in 7.5 ms."""
    offers = [offer(i, round_trip_ms=9) for i in range(4)]
    plan = make_plan(model(), offers, EPOCH)
    assert [len(stages) for stages in plan.rings] == [1, 1, 1, 1]
    pairs = make_plan(model(kv=0), [replace(o, memory_bytes=200 * MB) for o in offers], EPOCH)
    assert [len(stages) for stages in pairs.rings] == [4], "shorter ones, of two, are not clearly better"


def test_shorter_rings_hold_the_same_promise_and_say_why() -> None:
    offers = [offer(i, memory=180 * MB, round_trip_ms=30) for i in range(8)]
    shape = model(layers=30, layer_bytes=10 * MB, kv=0)
    plan = make_plan(shape, offers, EPOCH)
    assert {len(stages) for stages in plan.rings} == {2}, plan.note
    assert plan.kv_tokens == 4 * 4096


def test_each_session_of_a_ring_sees_that_ring_alone() -> None:
    plan = make_plan(model(), [offer(1), offer(2), offer(3, round_trip_ms=80)], EPOCH)
    first, second = plan.ring(0), plan.ring(1)
    assert first.stages + second.stages == plan.stages
    assert (second.epoch, second.kv_tokens, second.predicted_token_ms) == (plan.epoch, plan.kv_tokens, 30.0)
    assert second.rings == (second.stages,)
    assert [plan.ring_of(node(i)) for i in (1, 2, 3, 4)] == [0, 0, 1, None]
    assert plan.after(node(1)) == plan.stages[1]
    assert plan.after(node(2)) is None, "the last of its ring"
    assert plan.after(node(3)) is None


def test_losing_a_pc_of_one_ring_leaves_the_other_its_layers() -> None:
    offers = [offer(1), offer(2), offer(3, round_trip_ms=80)]
    first = make_plan(model(), offers, EPOCH)
    assert ranges(make_plan(model(), offers[:2], EPOCH, previous=first)) == ranges(first)[:2]
    assert ranges(make_plan(model(), offers[1:], EPOCH, previous=first)) == [("PC-3", 0, 30), ("PC-2", 0, 30)]


def test_the_rate_of_rings_is_their_sum() -> None:
    offers = [offer(1), offer(2), offer(3, round_trip_ms=80)]
    plan = make_plan(model(), offers, EPOCH)
    rates = [rate(model(), offers, plan.ring(index)) for index in (0, 1)]
    assert rates == pytest.approx([1e3 / 15.7, 1e3 / 30])
    assert rate(model(), offers, plan) == pytest.approx(1e3 / 15.7 + 1e3 / 30)
    assert rate(model(), offers[:2], plan) is None, "a ring that lost a PC does not stand"


def test_many_equal_pcs_are_planned_at_once() -> None:
    began = time.process_time()
    plan = make_plan(model(), [offer(i, round_trip_ms=50) for i in range(200)], EPOCH)
    assert len(plan.rings) == MAX_RINGS
    assert time.process_time() - began < 5, "a fraction of a second where nothing else runs"


def test_unmeasured_speed_counts_as_the_slowest_known() -> None:
    plan = make_plan(model(), [offer(1, speed=20 * GB), offer(2, speed=10 * GB), offer(3, speed=0)], EPOCH)
    assert sizes(plan) == [16, 7, 7] or sizes(plan) == [15, 8, 7]


def test_nobody_measured_yet_is_an_even_split() -> None:
    assert sizes(make_plan(model(), [offer(i, speed=0) for i in range(3)], EPOCH)) == [10, 10, 10]


# --- KV promises ----------------------------------------------------------------------------------------------------


def test_the_largest_promise_that_fits_is_taken() -> None:
    shape = model(kv=1000)  # 30 kB a token: 16384 tokens are 491 MB
    for tokens in (4 * 4096, 2 * 4096, 4096, 2048):
        need = Load.of(shape, tokens).stage_memory(0, 30)
        assert make_plan(shape, [offer(1, memory=need)], EPOCH).kv_tokens == tokens
        assert make_plan(shape, [offer(1, memory=need - 1)], EPOCH).kv_tokens < tokens


def test_promises_stay_within_the_models_context() -> None:
    assert make_plan(model(context=2048), [offer(1)], EPOCH).kv_tokens == 4 * 2048
    assert make_plan(model(context=512), [offer(1, memory=GB)], EPOCH).kv_tokens == 4 * 512


def test_room_for_more_sessions_is_not_worth_a_far_slower_ring() -> None:
    """The fast PC holds two sessions alone; the slow one could add room for four, at half the rate and worse."""
    shape = model(kv=10_000)
    alone = Load.of(shape, 2 * 4096).stage_memory(0, 30)
    plan = make_plan(shape, [offer(1, memory=alone), offer(2, memory=9 * GB, speed=0.3 * GB)], EPOCH)
    assert [stage.name for stage in plan.stages] == ["PC-1"]
    assert plan.kv_tokens == 2 * 4096


def test_a_stage_shows_all_it_needs() -> None:
    shape = model(layers=4, embedding=7 * MB, head=3 * MB)
    plan = make_plan(shape, [offer(1), offer(2)], EPOCH)
    load = Load.of(shape, plan.kv_tokens)
    assert [stage.bytes for stage in plan.stages] == [load.stage_memory(s.start, s.end) for s in plan.stages]


# --- what does not fit ----------------------------------------------------------------------------------------------


def test_a_model_too_large_names_what_is_missing() -> None:
    shape = model(layer_bytes=GB, hidden=1024)
    plan = make_plan(shape, [offer(1, memory=8 * GB), offer(2, memory=16 * GB)], EPOCH)
    assert plan.stages == ()
    assert plan.kv_tokens == 0
    assert plan.missing_bytes > 6 * GB
    assert plan.note == f"the swarm lacks {plan.missing_bytes / 1e9:.1f} GB of memory for this model"


def test_adding_exactly_what_is_missing_makes_it_fit() -> None:
    shape = model(layer_bytes=GB, embedding=2 * GB, tied=True)
    small, large = offer(1, memory=8 * GB), offer(2, memory=16 * GB)
    missing = make_plan(shape, [small, large], EPOCH).missing_bytes
    assert make_plan(shape, [small, replace(large, memory_bytes=16 * GB + missing)], EPOCH).stages
    assert not make_plan(shape, [small, replace(large, memory_bytes=16 * GB + missing - 1)], EPOCH).stages


def test_without_offers_the_whole_model_is_missing() -> None:
    shape = model()
    plan = make_plan(shape, [], EPOCH)
    assert plan.missing_bytes == Load.of(shape, 2048).stage_memory(0, 30)


def test_room_is_kept_for_a_draft_where_it_costs_little() -> None:
    shape = model(20, 100 * MB)
    pcs = [offer(1, memory=4000 * MB), offer(2, memory=2000 * MB)]
    assert sizes(make_plan(shape, pcs, EPOCH)) == [10, 10]
    kept = make_plan(shape, pcs, EPOCH, draft_bytes=800 * MB)
    assert all(s.bytes + 800 * MB <= o.memory_bytes for s, o in zip(kept.stages, pcs, strict=True))
    assert kept.kv_tokens == make_plan(shape, pcs, EPOCH).kv_tokens


@pytest.mark.parametrize("second", [[], [offer(2, speed=0.5 * GB)]], ids=["no room", "a slow PC with room"])
def test_a_draft_costs_no_model_no_session_and_not_much_speed(second: list[Offer]) -> None:
    shape = model(20, 100 * MB)
    alone = Load.of(shape, 4 * 4096).stage_memory(0, 20)
    offers = [offer(1, memory=alone + 100 * MB), *second]
    plan = make_plan(shape, offers, EPOCH)
    assert [stage.name for stage in plan.stages] == ["PC-1"]
    assert make_plan(shape, offers, EPOCH, draft_bytes=600 * MB) == plan


def test_a_remark_is_on_every_screen() -> None:
    assert make_plan(model(), [offer(1)], EPOCH, remark="without PC-2: no compiler").note.endswith(
        "; without PC-2: no compiler"
    )
    assert make_plan(model(), [offer(1, memory=1)], EPOCH, remark="without PC-2").note.endswith("; without PC-2")


# --- re-planning ----------------------------------------------------------------------------------------------------


def test_a_newcomer_goes_where_the_others_keep_their_layers() -> None:
    first = make_plan(model(), [offer(5)], EPOCH)
    second = make_plan(model(), [offer(5), offer(3)], EPOCH, previous=first)
    third = make_plan(model(), [offer(5), offer(3), offer(1)], EPOCH, previous=second)
    assert ranges(second) == [("PC-5", 0, 15), ("PC-3", 15, 30)]
    assert ranges(third) == [("PC-5", 0, 10), ("PC-1", 10, 20), ("PC-3", 20, 30)]


def test_larger_swarms_keep_the_order_of_the_plan_before() -> None:
    first = make_plan(model(layer_bytes=GB // 10), [offer(i) for i in (3, 4, 5, 6, 7)], EPOCH)
    second = make_plan(model(layer_bytes=GB // 10), [offer(i) for i in (1, 3, 4, 5, 6, 7)], EPOCH, previous=first)
    assert [stage.name for stage in second.stages] == ["PC-3", "PC-4", "PC-5", "PC-6", "PC-7", "PC-1"]


def test_the_same_offers_give_the_same_plan_again() -> None:
    offers = [offer(i, speed=(5 + i) * GB) for i in range(7)]
    first = make_plan(model(), offers, EPOCH)
    assert make_plan(model(), offers, EPOCH, previous=first).stages == first.stages


@pytest.mark.parametrize("trip_ms", [0.4, 9.0, 80.0])
def test_the_same_offers_give_the_same_rings_again(trip_ms: float) -> None:
    offers = [offer(i, round_trip_ms=trip_ms if i > 2 else 0.4) for i in range(20)]
    first = make_plan(model(), offers, EPOCH)
    assert len(first.rings) > 1
    assert make_plan(model(), offers, EPOCH, previous=first).stages == first.stages


def test_losing_the_last_pc_moves_only_what_it_held() -> None:
    first = make_plan(model(), [offer(1), offer(2), offer(3)], EPOCH)
    second = make_plan(model(), [offer(1), offer(2)], EPOCH, previous=first)
    assert ranges(second) == [("PC-1", 0, 15), ("PC-2", 15, 30)]


def test_predict_agrees_with_the_plan() -> None:
    offers = [offer(1, speed=7 * GB), offer(2, round_trip_ms=3), offer(3)]
    plan = make_plan(model(head=20 * MB), offers, EPOCH)
    prediction = predict(model(head=20 * MB), offers, plan.stages)
    assert prediction is not None
    assert prediction.token_ms == pytest.approx(plan.predicted_token_ms, abs=1e-3)
    assert prediction.bottleneck_ms < prediction.token_ms


def test_predict_knows_when_a_plan_no_longer_stands() -> None:
    plan = make_plan(model(), [offer(1), offer(2)], EPOCH)
    assert predict(model(), [offer(1)], plan.stages) is None
    assert predict(model(), [offer(1), offer(2, memory=plan.stages[1].bytes - 1)], plan.stages) is None
    assert predict(model(), [offer(1)], ()) is None


def test_two_hundred_pcs_and_a_hundred_and_thirty_layers_are_planned_at_once() -> None:
    rng = random.Random(7)
    shape = model(130, 500 * MB, 2 * GB, 2 * GB, kv=4096, hidden=16384)
    offers = [
        offer(i, memory=rng.uniform(4, 24) * GB, speed=rng.uniform(5, 40) * GB, round_trip_ms=rng.uniform(0.3, 3))
        for i in range(200)
    ]
    began = time.process_time()
    plan = make_plan(shape, offers, EPOCH)
    assert plan.stages
    assert time.process_time() - began < 5, "a fraction of a second where nothing else runs"


# --- speeds ---------------------------------------------------------------------------------------------------------


def test_speeds_within_a_step_of_the_fastest_become_one() -> None:
    speeds = quantized_speeds([offer(1, speed=100), offer(2, speed=81), offer(3, speed=79), offer(4, speed=64)])
    assert speeds == [90.5, 90.5, 71.5, 71.5]


@given(st.lists(st.floats(1e8, 1e11), min_size=1, max_size=20))
def test_grouped_speeds_keep_the_order_and_stay_near(speeds: list[float]) -> None:
    grouped = quantized_speeds([offer(i, speed=speed) for i, speed in enumerate(speeds)])
    for raw, value in zip(speeds, grouped, strict=True):
        assert raw / SPEED_STEP * 0.999 <= value <= raw * SPEED_STEP * 1.001
    by_speed = sorted(zip(speeds, grouped, strict=True))
    assert [value for _, value in by_speed] == sorted(value for _, value in by_speed)


# --- for every model and swarm --------------------------------------------------------------------------------------

MODELS = st.lists(st.integers(1, 60), min_size=1, max_size=7).flatmap(
    lambda layers: st.builds(
        ModelShape,
        manifest=st.just(MANIFEST),
        layer_bytes=st.just(tuple(size * MB for size in layers)),
        embedding_bytes=st.integers(0, 50).map(lambda n: n * MB),
        head_bytes=st.integers(0, 50).map(lambda n: n * MB),
        head_uses_embedding=st.booleans(),
        kv_bytes_per_token=st.lists(st.integers(0, 4000), min_size=len(layers), max_size=len(layers)).map(tuple),
        hidden_size=st.integers(0, 256),
        context_tokens=st.sampled_from([512, 2048, 8192]),
    )
)


def swarms(largest: int, memory: int = 300) -> st.SearchStrategy[list[Offer]]:
    rows = st.tuples(
        st.integers(0, memory), st.sampled_from([0.3, 1.0, 1.1, 3.0, 10.0]), st.sampled_from([0.0, 1.0, 40.0])
    )
    return st.lists(rows, min_size=0, max_size=largest).map(
        lambda found: [offer(i, m * MB, s * GB, r) for i, (m, s, r) in enumerate(found)]
    )


@given(MODELS, swarms(12))
def test_every_plan_keeps_the_promises(shape: ModelShape, offers: list[Offer]) -> None:
    plan = make_plan(shape, offers, EPOCH)
    check_plan(plan)
    memory = {o.node: o.memory_bytes for o in offers}
    load = Load.of(shape, plan.kv_tokens)
    if plan.stages:
        for stages in plan.rings:
            assert [layer for s in stages for layer in s.layers] == list(range(len(shape.layer_bytes)))
        assert len(plan.rings) == len(plan.ring_token_ms) <= MAX_RINGS
        assert plan.predicted_token_ms == plan.ring_token_ms[0]
        assert max(plan.ring_token_ms) <= plan.predicted_token_ms * RING_SLOWDOWN + 1e-3
        assert plan.kv_tokens >= min(2048, shape.context_tokens)
        assert plan.missing_bytes == 0
    else:
        assert plan.missing_bytes > 0
    for stage in plan.stages:
        assert stage.bytes == load.stage_memory(stage.start, stage.end) <= memory[stage.node]
    alone = [load.compute_total / o.speed * 1e3 for o in offers if load.stage_memory(0, load.layers) <= o.memory_bytes]
    if alone and plan.stages:
        assert plan.predicted_token_ms <= min(alone) * MAX_SLOWDOWN * SPEED_STEP + 1e-3


@given(MODELS, swarms(12), st.randoms(use_true_random=False))
def test_the_order_of_offers_does_not_matter(shape: ModelShape, offers: list[Offer], rng: random.Random) -> None:
    shuffled = rng.sample(offers, len(offers))
    assert make_plan(shape, offers, EPOCH) == make_plan(shape, shuffled, EPOCH)


@settings(max_examples=50)
@given(MODELS, swarms(7))
def test_several_rings_are_never_slower_than_the_first_alone(shape: ModelShape, offers: list[Offer]) -> None:
    plan = make_plan(shape, offers, EPOCH)
    first = rate(shape, offers, plan.ring(0)) if plan.rings else None
    together = rate(shape, offers, plan)
    assert (first is None) == (together is None) == (not plan.rings)
    if first is not None and together is not None:
        assert (together > first) == (len(plan.rings) > 1) == ("rings" in plan.note)


@given(MODELS, swarms(11), st.data())
def test_more_memory_never_makes_a_plan_impossible(shape: ModelShape, offers: list[Offer], data: st.DataObject) -> None:
    plan = make_plan(shape, offers, EPOCH)
    assume(plan.stages)
    extra = data.draw(st.lists(st.integers(0, 90), min_size=len(offers), max_size=len(offers)))
    richer = [replace(o, memory_bytes=o.memory_bytes + e * MB) for o, e in zip(offers, extra, strict=True)]
    assert make_plan(shape, richer, EPOCH).stages


@given(MODELS, swarms(6))
def test_a_further_pc_never_makes_a_plan_impossible(shape: ModelShape, offers: list[Offer]) -> None:
    assume(make_plan(shape, offers, EPOCH).stages)
    assert make_plan(shape, [*offers, offer(99, memory=1)], EPOCH).stages


@given(MODELS, swarms(4, memory=60))
def test_the_missing_memory_is_exact(shape: ModelShape, offers: list[Offer]) -> None:
    missing = make_plan(shape, offers, EPOCH).missing_bytes
    assume(missing and offers)
    largest = max(offers, key=lambda o: o.memory_bytes)
    others = [o for o in offers if o is not largest]
    for add, fits in ((missing, True), (missing - 1, False)):
        helped = replace(largest, memory_bytes=largest.memory_bytes + add)
        assert bool(make_plan(shape, [*others, helped], EPOCH).stages) is fits


def cuts(layers: int, stages: int) -> list[list[tuple[int, int]]]:
    """Every way to cut `layers` into `stages` ranges of at least one."""
    return [list(pairwise([0, *inner, layers])) for inner in combinations(range(1, layers), stages - 1)]


@given(MODELS, st.lists(st.tuples(st.integers(1, 120), st.sampled_from([1.0, 3.0, 10.0])), min_size=2, max_size=3))
def test_small_swarms_get_the_best_split_there_is(shape: ModelShape, rows: list[tuple[int, float]]) -> None:
    """Against every order and every cut, where nobody holds the model alone and links are equal."""
    shape = replace(shape, kv_bytes_per_token=(0,) * len(shape.layer_bytes))
    offers = [offer(i, memory * MB, speed * GB, 1.0) for i, (memory, speed) in enumerate(rows)]
    load = Load.of(shape, 0)
    assume(all(load.stage_memory(0, load.layers) > o.memory_bytes for o in offers))
    hop = 0.5 + HOP_OVERHEAD_MS
    best: dict[int, float] = {}
    for count in range(2, len(offers) + 1):
        for row in permutations(offers, count):
            for cut in cuts(load.layers, count):
                work = [
                    (o, load.stage_memory(*r), load.compute(*r, r[1] == load.layers))
                    for o, r in zip(row, cut, strict=True)
                ]
                if all(need <= o.memory_bytes for o, need, _ in work):
                    slowest = max(compute / o.speed * 1e3 for o, _, compute in work) + hop
                    best[count] = min(best.get(count, slowest), slowest)
    plan = make_plan(shape, offers, EPOCH)
    assert bool(plan.stages) == bool(best)
    if not plan.stages:
        return
    prediction = predict(shape, offers, plan.rings[0])
    assert prediction is not None
    found, count = prediction.bottleneck_ms, len(plan.rings[0])
    slack = TIE * (1 + 2 * PRECISION)
    assert found <= best[count] * slack
    for other, time_ms in best.items():
        if other > count:
            assert time_ms * (1 + MIN_GAIN * (other / count - 1)) * slack >= best[count], "worth its further stage"


# --- plans from peers -----------------------------------------------------------------------------------------------


def stage(number: int, start: int, end: int) -> Stage:
    return Stage(node(number), f"PC-{number}", start, end, "CPU", 1)


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (Plan(Epoch(MAX_EPOCH_NUMBER, node(1)), None), "epoch"),
        (Plan(Epoch(-1, node(1)), None), "epoch"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5), stage(1, 5, 9))), "two stages"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5), stage(2, 5, 5))), "empty"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5), stage(2, 6, 9))), "ranges"),
        (Plan(EPOCH, MANIFEST, (stage(1, 1, 5),)), "ranges"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5), stage(2, 4, 9))), "ranges"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5000),)), "5000"),
        (Plan(EPOCH, None, (stage(1, 0, 5),)), "no model"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5), stage(2, 0, 6))), "ranges"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 6), stage(2, 0, 5))), "ranges"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5), stage(2, 5, 9), stage(3, 5, 9))), "ranges"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5), stage(2, 0, 5), stage(1, 0, 5))), "two stages"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5),), ring_token_ms=(1.0, 2.0)), "2 times for 1 rings"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5),), ring_token_ms=(-1.0,)), "negative"),
        (Plan(EPOCH, MANIFEST, (), kv_tokens=-1), "negative"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5),), ring_epochs=(EPOCH, EPOCH)), "2 epochs for 1 rings"),
        (Plan(EPOCH, MANIFEST, (stage(1, 0, 5),), ring_epochs=(Epoch(2, node(1)),)), "future"),
    ],
)
def test_plans_no_honest_proposer_makes_are_refused(plan: Plan, found: str) -> None:
    with pytest.raises(ProtocolError, match=found):
        check_plan(plan)


def test_plans_an_honest_proposer_makes_are_not() -> None:
    check_plan(NO_PLAN)
    check_plan(make_plan(model(), [offer(1), offer(2)], EPOCH))
    check_plan(make_plan(model(), [], EPOCH))
    check_plan(Plan(EPOCH, MANIFEST, (stage(1, 0, 5), stage(2, 5, 9), stage(3, 0, 9), stage(4, 0, 2), stage(5, 2, 9))))


def test_a_ring_that_stays_as_it_is_keeps_its_epoch() -> None:
    long, short, other = (stage(1, 0, 5), stage(2, 5, 9)), (stage(3, 0, 9),), (stage(4, 0, 9),)
    second, third = Epoch(2, node(1)), Epoch(3, node(2))
    first = Plan(EPOCH, MANIFEST, long + short)
    then = keep_rings(Plan(second, MANIFEST, long + other), first)
    assert then.ring_epochs == (EPOCH, second)
    assert [then.has_ring(first.ring(ring)) for ring in range(2)] == [True, False]
    at_last = keep_rings(Plan(third, MANIFEST, other + short + long), then)
    assert at_last.ring_epochs == (second, third, EPOCH), "what was not in the plan before is new"
    for plan in (then, at_last):
        check_plan(plan)
    lost = keep_rings(Plan(third, MANIFEST, long + other), then, {node(2)})
    assert lost.ring_epochs == (third, second), "a process of it began anew"
    for changed in ({"kv_tokens": 9}, {"model": BlobId("b" * 64)}, {"engine": STATEFUL}):
        assert not keep_rings(replace(then, epoch=third, ring_epochs=(), **changed), then).ring_epochs
    assert not keep_rings(Plan(third, MANIFEST, (stage(1, 0, 4), stage(2, 4, 9))), then).ring_epochs


@pytest.mark.parametrize("tied", [False, True])
def test_a_join_moves_as_few_bytes_as_any_order_of_the_pcs(tied: bool) -> None:
    """The newcomer takes its layers where embedding and head stay with those who have them."""
    shape = model(layers=30, embedding=40 * MB, head=0 if tied else 40 * MB, tied=tied)
    offers = [offer(number, speed=1e8) for number in range(3)]
    two = make_plan(shape, offers[:2], EPOCH)
    three = make_plan(shape, offers, EPOCH, previous=two)
    assert [len(two.stages), len(three.stages)] == [2, 3]
    orders = permutations(stage.node for stage in three.stages)
    assert moved(shape, two, three.stages) == min(
        moved(shape, two, [replace(stage, node=node) for stage, node in zip(three.stages, order, strict=True)])
        for order in orders
    )


def moved(shape: ModelShape, before: Plan, stages: Sequence[Stage]) -> int:
    """Bytes that nodes lack."""
    return sum(
        size for stage in stages for part, size in parts(shape, stage) if (part, size) not in held(shape, before, stage)
    )


def held(shape: ModelShape, before: Plan, stage: Stage) -> list[tuple[str, int]]:
    old = before.stage_of(stage.node)
    return parts(shape, old) if old else []


def parts(shape: ModelShape, stage: Stage) -> list[tuple[str, int]]:
    found = [(f"layer {layer}", shape.layer_bytes[layer]) for layer in stage.layers]
    last = stage.end == len(shape.layer_bytes)
    if stage.start == 0 or (last and shape.head_uses_embedding):
        found.append(("embedding", shape.embedding_bytes))
    return [*found, ("head", shape.head_bytes)] if last else found
