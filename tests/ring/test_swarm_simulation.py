"""Membership, plan and forming together, on many simulated PCs: whatever happened, once it is quiet all agree.

Invariants are checked at every step by `simulated_swarm`: one plan per epoch, epochs only go up, no stage above its
node's memory, a stage is called loaded exactly when it was prepared.
"""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.ring.simulated_swarm import MB, World

QUIET_S = 200.0
"""Longer than the longest backoff that the runs below can reach."""


REST_S = 20.0
"""So long nothing may change before a swarm counts as at rest."""


def comes_to_rest(world: World, seconds: float = QUIET_S) -> None:
    end, since, before = world.now + seconds + REST_S, world.now, None
    while world.now < end:
        world.run(0.5)
        trouble = world.trouble()
        now = world.living[0].forming.plan.epoch if world.living else None
        if trouble or now != before:
            since, before = world.now, now
        # A node that failed is left out for a while, and what does not fit without it waits for it.
        elif world.now - since >= REST_S and world.runs_what_fits():
            return
    raise AssertionError(trouble or "new epochs without end, or a model that fits is not run")


def test_one_node_serves_alone() -> None:
    world = World(1)
    node = world.add(7)
    comes_to_rest(world, 20)
    assert [stage.node for stage in node.forming.plan.stages] == [node.id]
    assert len(world.acquired_by) == 1


def test_three_started_together_share_the_layers_and_acquire_once() -> None:
    world = World(2)
    for number in (3, 1, 2):
        world.add(number)
    comes_to_rest(world, 30)
    plan = world.living[0].forming.plan
    assert len(plan.stages) == 3
    assert [node for _, node, _ in world.acquired_by] == [min(world.nodes)]


def test_a_newcomer_with_a_lower_id_does_not_acquire_again() -> None:
    world = World(3)
    world.acquire_s = 30.0
    first = world.add(9)
    world.run(10)
    assert len(world.acquired_by) == 1
    world.add(1)
    comes_to_rest(world, 60)
    assert [node for _, node, _ in world.acquired_by] == [first.id]


def test_a_model_asked_for_is_acquired_by_who_asked() -> None:
    world = World(4)
    world.add(1)
    asking = world.add(2, wanted="small-model")
    world.add(3)
    comes_to_rest(world, 40)
    assert [(node, wanted) for _, node, wanted in world.acquired_by] == [(asking.id, "small-model")]


def test_joining_changes_the_plan_once_and_keeps_serving() -> None:
    world = World(5)
    one = world.add(5)
    comes_to_rest(world, 30)
    before = one.forming.plan
    world.add(2)
    world.run(4)
    assert one.forming.plan.epoch == before.epoch or len(one.forming.plan.stages) == 2
    comes_to_rest(world, 30)
    assert len(one.forming.plan.stages) == 2
    assert one.forming.plan.epoch.number == before.epoch.number + 1


def test_leaving_is_planned_out_before_it_goes() -> None:
    world = World(6)
    nodes = [world.add(number) for number in (1, 2, 3)]
    comes_to_rest(world, 30)
    world.leave(nodes[0])
    assert world.run_until(lambda: not nodes[0].up, 15)
    assert all(node.forming.plan.stage_of(nodes[0].id) is None for node in nodes[1:])
    comes_to_rest(world, 20)
    assert len(nodes[1].forming.plan.stages) == 2


@pytest.mark.parametrize(("silent", "seconds"), [(False, 9.0), (True, 20.0)])
def test_a_crash_costs_a_pause(silent: bool, seconds: float) -> None:
    world = World(7)
    nodes = [world.add(number) for number in (1, 2, 3)]
    comes_to_rest(world, 30)
    world.crash(nodes[1], silent=silent)
    assert world.run_until(lambda: not world.trouble() and len(nodes[0].forming.plan.stages) == 2, seconds)


def test_the_leader_may_crash_while_it_proposes() -> None:
    for moment in range(12):
        world = World(moment)
        nodes = [world.add(number) for number in (1, 2, 3, 4)]
        world.run(6 + moment * 0.5)
        world.crash(nodes[0])
        comes_to_rest(world, 60)


def test_a_quick_restart_is_noticed_and_loaded_again() -> None:
    world = World(8)
    nodes = [world.add(number) for number in (1, 2, 3)]
    comes_to_rest(world, 30)
    epoch = nodes[0].forming.plan.epoch
    for node in nodes:
        world.crash(node)
        world.start(node)
        comes_to_rest(world, 60)
        assert len(node.forming.plan.stages) == 3
        assert node.forming.plan.epoch > epoch


def test_a_node_that_cannot_prepare_is_left_out_and_tried_again_later() -> None:
    world = World(9)
    nodes = [world.add(number) for number in (1, 2, 3)]
    comes_to_rest(world, 30)
    joining = world.add(4)
    joining.cannot_prepare = True
    comes_to_rest(world, 20)
    assert len(nodes[0].forming.plan.stages) == 3
    for node in nodes:
        assert any("PC-4" in text and "the compiler said no" in text for text in node.notices), "on every screen"
    joining.cannot_prepare = False
    assert world.run_until(lambda: len(joining.forming.plan.stages) == 4, 60)


def test_a_node_that_dies_whenever_it_prepares_does_not_keep_the_ring_from_forming() -> None:
    world = World(10)
    nodes = [world.add(number) for number in (1, 2, 3)]
    comes_to_rest(world, 30)
    bad = world.add(4)
    for _ in range(400):
        world.run(0.25)
        preparing = bad.up and bad.forming.preparing
        if preparing and preparing.stage_of(bad.id):
            world.crash(bad)
            world.after(1.0, world.start, bad)
    assert len(nodes[0].forming.plan.stages) == 3
    epochs = {epoch.number for epoch in world.plans}
    assert len(epochs) < 15, "tried again with growing pauses"


def test_a_partition_runs_on_both_sides_and_heals() -> None:
    world = World(11)
    nodes = [world.add(number) for number in range(1, 7)]
    comes_to_rest(world, 40)
    world.partition(nodes[:3])
    world.run(40)
    left, right = nodes[0].forming.plan, nodes[5].forming.plan
    assert {stage.node for stage in left.stages} <= {node.id for node in nodes[:3]}
    assert {stage.node for stage in right.stages} <= {node.id for node in nodes[3:]}
    world.heal()
    comes_to_rest(world, 90)
    assert len(nodes[0].forming.plan.stages) == 6


def test_too_little_memory_is_on_every_screen_until_enough_has_joined() -> None:
    world = World(12)
    nodes = [world.add(number, memory=200 * MB) for number in (1, 2)]
    assert world.run_until(lambda: all(node.forming.plan.missing_bytes for node in nodes), 30)
    assert nodes[0].forming.plan.stages == ()
    nodes += [world.add(number, memory=200 * MB) for number in (3, 4, 5)]
    comes_to_rest(world, 60)
    assert nodes[0].forming.plan.stages


def test_noise_in_memory_and_speed_changes_nothing() -> None:
    world = World(13)
    nodes = [world.add(number) for number in (1, 2, 3)]
    comes_to_rest(world, 30)
    epoch = nodes[0].forming.plan.epoch
    for _ in range(60):
        for node in nodes:
            node.speed = 1e10 * world.random.uniform(0.9, 1.08)
            node.memory = int(2000 * MB * world.random.uniform(0.9, 1.08))
            node.changed()
        world.run(1)
    assert nodes[0].forming.plan.epoch == epoch


def test_memory_that_shrinks_below_the_stage_changes_the_plan() -> None:
    world = World(14)
    nodes = [world.add(number) for number in (1, 2, 3)]
    comes_to_rest(world, 30)
    stage = nodes[1].forming.plan.stage_of(nodes[1].id)
    assert stage is not None
    nodes[1].memory = stage.bytes - 1
    nodes[1].changed()
    world.run(3)
    comes_to_rest(world, 30)


def test_pcs_left_over_make_a_ring_and_losing_one_leaves_the_other() -> None:
    """So fast that one alone beats a ring: the small two, who cannot, are the second one."""
    world = World(16)
    world.round_trip_ms = 0.0
    large = world.add(5, speed=4e11)
    small = [world.add(number, memory=600 * MB, speed=4e11) for number in (2, 7)]
    comes_to_rest(world, 30)
    plan = large.forming.plan
    assert [[stage.node for stage in stages] for stages in plan.rings] == [[large.id], [node.id for node in small]]
    world.crash(small[0])
    comes_to_rest(world, 30)
    assert [stage.node for stage in large.forming.plan.stages] == [large.id]
    world.start(small[0])
    comes_to_rest(world, 60)
    assert len(large.forming.plan.rings) == 2
    world.crash(large)
    comes_to_rest(world, 30)
    assert {stage.node for stage in small[0].forming.plan.stages} == {node.id for node in small}
    assert len(small[0].forming.plan.rings) == 1


def test_a_pc_that_cannot_prepare_its_ring_leaves_the_others_theirs() -> None:
    world = World(17)
    nodes = [world.add(number, speed=1e13) for number in (1, 2)]
    comes_to_rest(world, 30)
    assert len(nodes[0].forming.plan.rings) == 2
    joining = world.add(3, speed=1e13)
    joining.cannot_prepare = True
    comes_to_rest(world, 30)
    assert [stage.node for stage in nodes[0].forming.plan.stages] == [node.id for node in nodes]
    joining.cannot_prepare = False
    assert world.run_until(lambda: len(joining.forming.plan.rings) == 3, 60)


ACTIONS = st.lists(
    st.tuples(
        st.floats(0.0, 8.0),
        st.sampled_from(["join", "crash", "vanish", "restart", "leave", "drop", "drop", "partition", "heal", "memory"]),
        st.integers(0, 1000),
    ),
    max_size=14,
)


@settings(
    deadline=None,
    max_examples=25,
    # A shorter run is another run: nothing to shrink by.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32), size=st.integers(3, 12), failures=st.sampled_from([0.0, 0.0, 0.2]), actions=ACTIONS)
def test_whatever_happens_the_swarm_comes_to_rest(
    seed: int, size: int, failures: float, actions: list[tuple[float, str, int]]
) -> None:
    world = World(seed)
    world.prepare_failures = failures
    for _ in range(size):
        join(world)
    for pause, action, number in actions:
        world.run(pause)
        disturb(world, action, number)
    world.prepare_failures = 0.0
    world.heal()
    if not world.living:
        join(world)
    comes_to_rest(world)


def join(world: World) -> None:
    number = world.random.randrange(1, 10_000)
    if f"{number:032x}" not in world.nodes and len(world.nodes) < 20:
        memory = world.random.choice([150, 250, 400, 2000]) * MB
        world.add(number, memory=memory, speed=world.random.choice([1e9, 8e9, 1e10, 4e11]))


def disturb(world: World, action: str, number: int) -> None:
    running = [node for node in world.nodes.values() if node.up]
    down = [node for node in world.nodes.values() if not node.up]
    if action == "join":
        join(world)
    elif action == "restart" and down:
        world.start(down[number % len(down)])
    elif action == "heal":
        world.heal()
    elif running:
        node = running[number % len(running)]
        if action in ("crash", "vanish"):
            world.crash(node, silent=action == "vanish")
        elif action == "leave":
            world.leave(node)
        elif action == "drop":
            world.drop_link(node)
        elif action == "memory":
            node.memory = node.most_memory * (1 + number % 4) // 4
            node.changed()
        elif action == "partition" and not world.sides:
            world.partition(running[: number % len(running)])


def test_two_hundred_nodes_agree() -> None:
    began = time.process_time()
    world = World(15, strict=False)
    world.tick_s, world.beat_s, world.acquire_s, world.slowest_prepare_s = 0.5, 2.0, 1.0, 1.0
    for number in range(1, 201):
        world.add(number, memory=400 * MB)
    assert world.run_until(lambda: not world.trouble(), 60, step=1.0), world.trouble()
    for node in world.nodes.values():
        node.membership.validate_state()
        node.forming.validate_state()
    assert len(world.acquired_by) == 1
    plan = world.nodes[min(world.nodes)].forming.plan
    assert len(plan.stages) > 1
    assert time.process_time() - began < 60, "a few seconds where nothing else runs"
