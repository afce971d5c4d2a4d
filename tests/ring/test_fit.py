"""Where layers fit: against brute force, and what more memory may never do."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

from hypothesis import assume, given
from hypothesis import strategies as st

from swarm.protocol.ids import BlobId
from swarm.protocol.limits import MAX_SEGMENT_ROWS
from swarm.ring.fit import HEAD_WORK, WORKSPACE_FACTOR, Load, ModelShape, arrange, fitting_order, shortfall

MODEL = ModelShape(
    manifest=BlobId("a" * 64),
    layer_bytes=(100, 100, 100, 100),
    embedding_bytes=70,
    head_bytes=5,
    head_uses_embedding=True,
    kv_bytes_per_token=(2, 2, 2, 2),
    hidden_size=0,
    context_tokens=4096,
)


def models(max_layers: int = 6) -> st.SearchStrategy[ModelShape]:
    sizes = st.integers(1, 60)
    return st.lists(sizes, min_size=1, max_size=max_layers).flatmap(
        lambda layers: st.builds(
            ModelShape,
            manifest=st.just(BlobId("a" * 64)),
            layer_bytes=st.just(tuple(layers)),
            embedding_bytes=st.integers(0, 50),
            head_bytes=st.integers(0, 50),
            head_uses_embedding=st.booleans(),
            kv_bytes_per_token=st.just((0,) * len(layers)),
            hidden_size=st.just(0),
            context_tokens=st.just(4096),
        )
    )


def splits(layers: int, stages: int) -> list[list[tuple[int, int]]]:
    """Every way to cut `layers` into `stages` ranges of at least one."""
    return [
        list(pairwise([0, *cuts, layers])) for cuts in combinations(range(1, layers), stages - 1) if stages <= layers
    ]


def brute_force_fits(load: Load, memory: list[int]) -> bool:
    for count in range(1, min(len(memory), load.layers) + 1):
        for ranges in splits(load.layers, count):
            needs = [load.stage_memory(start, end) for start, end in ranges]
            if any(all(n <= m for n, m in zip(needs, row, strict=True)) for row in permutations(memory, count)):
                return True
    return False


def test_a_stage_counts_weights_kv_workspace_and_what_the_ends_hold() -> None:
    load = Load.of(MODEL, 10)
    assert load.stage_memory(1, 3) == 2 * (100 + 20)
    assert load.stage_memory(0, 1) == 120 + 70
    assert load.stage_memory(3, 4) == 120 + 5 + 70, "a tied head is the embedding again"
    assert load.stage_memory(0, 4) == 4 * 120 + 70 + 75


def test_an_untied_head_is_counted_alone() -> None:
    untied = ModelShape(BlobId("a" * 64), (100,), 70, 90, False, (0,), 0, 4096)
    assert Load.of(untied, 0).stage_memory(0, 1) == 100 + 70 + 90


def test_the_workspace_is_a_full_chunk_of_activations_in_every_stage() -> None:
    wide = ModelShape(BlobId("a" * 64), (100, 100), 0, 0, False, (0, 0), 64, 4096)
    workspace = MAX_SEGMENT_ROWS * 64 * 4 * WORKSPACE_FACTOR
    load = Load.of(wide, 0)
    assert load.stage_memory(0, 1) == load.stage_memory(1, 2) == 100 + workspace
    assert load.stage_memory(0, 2) == 200 + workspace


def test_the_embedding_is_held_but_not_streamed() -> None:
    load = Load.of(MODEL, 0)
    assert load.compute(0, 2, last=False) == 200
    assert load.compute(2, 4, last=True) == 200 + int(HEAD_WORK * 75)
    assert load.compute_total == 400 + int(HEAD_WORK * 75)


def test_arrange_fills_in_order_and_passes_over_what_is_too_small() -> None:
    load = Load.of(MODEL, 0)
    assert arrange(load, [270, 50, 275]) == [(0, 0, 2), (2, 2, 4)]
    assert arrange(load, [169, 475]) is None
    assert arrange(load, [1000, 1000]) == [(0, 0, 4)]


def test_arrange_leaves_a_layer_for_the_node_with_room_for_the_head() -> None:
    load = Load.of(MODEL, 0)
    assert arrange(load, [470, 175]) == [(0, 0, 3), (1, 3, 4)]


def test_arrange_keeps_to_the_bound_on_work() -> None:
    load = Load.of(MODEL, 0)
    assert arrange(load, [1000, 1000], [150.0, 400.0]) == [(0, 0, 1), (1, 1, 4)]
    assert arrange(load, [1000, 1000], [150.0, 300.0]) is None


def test_an_order_is_found_where_only_one_fits() -> None:
    load = Load.of(MODEL, 0)
    # Only 275 can hold two layers and the head, only 270 two layers and the embedding.
    assert fitting_order(load, [275, 270]) == [1, 0]


def test_no_memory_and_no_nodes_fit_nothing() -> None:
    load = Load.of(MODEL, 0)
    assert fitting_order(load, []) is None
    assert fitting_order(load, [0, 0, 0]) is None


@given(models(), st.lists(st.integers(0, 200), max_size=4))
def test_small_swarms_fit_exactly_when_brute_force_says_so(model: ModelShape, memory: list[int]) -> None:
    load = Load.of(model, 0)
    order = fitting_order(load, memory)
    assert (order is not None) == brute_force_fits(load, memory)
    if order is not None:
        assert arrange(load, [memory[i] for i in order]) is not None


@given(models(), st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_what_arrange_gives_fits_and_covers_every_layer_once(model: ModelShape, memory: list[int]) -> None:
    load = Load.of(model, 0)
    split = arrange(load, memory)
    assume(split is not None)
    assert split is not None
    assert [layer for _, start, end in split for layer in range(start, end)] == list(range(load.layers))
    assert [index for index, _, _ in split] == sorted({index for index, _, _ in split})
    assert all(load.stage_memory(start, end) <= memory[index] for index, start, end in split)


@given(models(40), st.lists(st.integers(0, 400), min_size=1, max_size=14), st.data())
def test_more_memory_never_loses_a_fit(model: ModelShape, memory: list[int], data: st.DataObject) -> None:
    load = Load.of(model, 0)
    assume(fitting_order(load, memory) is not None)
    extra = data.draw(st.lists(st.integers(0, 100), min_size=len(memory), max_size=len(memory)))
    assert fitting_order(load, [m + e for m, e in zip(memory, extra, strict=True)]) is not None


@given(st.integers(1, 60), st.integers(1, 40), st.lists(st.integers(0, 300), min_size=9, max_size=14))
def test_large_swarms_with_equal_layers_fit_when_counting_says_so(layers: int, size: int, memory: list[int]) -> None:
    model = ModelShape(BlobId("a" * 64), (size,) * layers, 0, 0, False, (0,) * layers, 0, 4096)
    assert (fitting_order(Load.of(model, 0), memory) is not None) == (sum(m // size for m in memory) >= layers)


@given(models(10), st.lists(st.integers(0, 120), max_size=10))
def test_the_shortfall_is_the_least_that_helps_the_largest_node(model: ModelShape, memory: list[int]) -> None:
    load = Load.of(model, 0)
    missing = shortfall(load, memory)
    ranked = sorted(memory, reverse=True) or [0]
    assert fitting_order(load, [ranked[0] + missing, *ranked[1:]]) is not None
    if missing:
        assert fitting_order(load, [ranked[0] + missing - 1, *ranked[1:]]) is None
    else:
        assert fitting_order(load, memory) is not None or not memory


def test_the_shortfall_without_nodes_is_the_whole_model() -> None:
    assert shortfall(Load.of(MODEL, 0), []) == 4 * 100 + 70 + 75
