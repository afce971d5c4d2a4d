"""What goes where a store is too full: the least, the longest unused, and never what somebody works with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.model.eviction import Contents, Eviction, Held, evict, only_of
from swarm.protocol.ids import BlobId


def blob(number: int) -> BlobId:
    return BlobId(f"{number:064x}")


def held(number: int, used: float, *blobs: int) -> Held:
    return Held(blob(number), used, frozenset({blob(number), *map(blob, blobs)}))


def sizes(**named: int) -> dict[BlobId, int]:
    return {blob(int(name[1:])): size for name, size in named.items()}


OLD, NEW = held(1, 10.0, 11, 12), held(2, 20.0, 12, 21)
HERE = sizes(b1=1, b2=1, b11=100, b12=100, b21=100, b90=50)


def test_nothing_goes_where_nothing_is_needed() -> None:
    assert evict(Contents([OLD, NEW], HERE), 0) == Eviction()


def test_blobs_of_no_model_go_first() -> None:
    assert evict(Contents([OLD, NEW], HERE), 50) == Eviction((), (blob(90),), freed_bytes=50)


def test_then_the_longest_unused_model_without_what_it_shares() -> None:
    assert evict(Contents([NEW, OLD], HERE), 51) == Eviction((OLD.id,), (blob(90), blob(1), blob(11)), freed_bytes=151)


def test_what_two_models_share_goes_with_the_second() -> None:
    found = evict(Contents([OLD, NEW], HERE), 152)
    assert found.models == (OLD.id, NEW.id)
    assert found.freed_bytes == sum(HERE.values())


def test_a_model_in_use_keeps_what_is_worked_with() -> None:
    found = evict(Contents([OLD, NEW], HERE, models_in_use=(OLD.id,), blobs_in_use=(blob(1), blob(11))), 10_000)
    assert found.models == (NEW.id,)
    assert set(found.blobs) == set(HERE) - {blob(1), blob(11)}  # its other layer goes last
    assert found.blobs[-1] == blob(12)
    assert evict(Contents([OLD, NEW], HERE, models_in_use=(OLD.id,), blobs_in_use=(blob(1), blob(11))), 151).blobs == (
        blob(90),
        blob(2),
        blob(21),
    )


def test_what_is_not_here_frees_nothing() -> None:
    assert evict(Contents([OLD], {}), 5) == Eviction((OLD.id,), (), freed_bytes=0)


def test_only_of() -> None:
    assert only_of(OLD, [NEW], ()) == {blob(1), blob(11)}
    assert only_of(OLD, [], [blob(12)]) == {blob(1), blob(11)}


def test_pieces_that_nobody_fetches_go_before_anything_else() -> None:
    contents = Contents([OLD], HERE, {blob(5): 10, blob(6): 10}, blobs_in_use=[blob(5)])
    assert evict(contents, 10) == Eviction(partials=(blob(6),), freed_bytes=10)
    assert evict(contents, 11).blobs[0] == blob(2)


def test_compiled_forms_go_with_their_model_or_before_layers_of_one_in_use() -> None:
    old, new = (Held(model.id, model.used, model.blobs, 1000) for model in (OLD, NEW))
    contents = Contents([old, new], HERE, models_in_use=[new.id], blobs_in_use=[blob(21)])
    assert evict(contents, 60) == Eviction((old.id,), (blob(90), blob(1), blob(11)), freed_bytes=1151)
    found = evict(contents, 1152)
    assert (found.compiled, found.freed_bytes) == ((new.id,), 2151)
    assert blob(12) not in found.blobs


def test_what_others_have_goes_before_what_may_be_the_only_copy() -> None:
    contents = Contents([OLD], sizes(b11=1, b12=1), models_in_use=[OLD.id], elsewhere=[blob(12)])
    assert evict(contents, 1).blobs == (blob(12),)
    assert evict(contents, 2).blobs == (blob(12), blob(11))


@given(
    st.lists(st.tuples(st.floats(0, 9), st.sets(st.integers(10, 20), min_size=1)), max_size=4),
    st.dictionaries(st.integers(0, 25), st.integers(1, 9)),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 25)),
    st.dictionaries(st.integers(0, 25), st.integers(1, 9)),
    st.sets(st.integers(0, 25)),
    st.integers(0, 100),
)
def test_of_any_store(
    models: list[tuple[float, set[int]]],
    here: dict[int, int],
    used: set[int],
    pinned: set[int],
    begun: dict[int, int],
    others: set[int],
    needed: int,
) -> None:
    helds = [Held(blob(n), when, held(n, 0, *blobs).blobs, n) for n, (when, blobs) in enumerate(models)]
    present, partials = ({blob(number): size for number, size in what.items()} for what in (here, begun))
    models_in_use, blobs_in_use, elsewhere = ({blob(number) for number in what} for what in (used, pinned, others))
    found = evict(Contents(helds, present, partials, models_in_use, blobs_in_use, elsewhere), needed)
    assert len(set(found.blobs)) == len(found.blobs)
    assert set(found.blobs) <= set(present) - blobs_in_use
    assert set(found.partials) <= set(partials) - blobs_in_use
    assert not set(found.models) & models_in_use
    assert set(found.compiled) <= models_in_use
    compiled = [model.compiled_bytes for model in helds if model.id in (*found.models, *found.compiled)]
    gone = [present[one] for one in found.blobs] + [partials[one] for one in found.partials]
    assert found.freed_bytes == sum(gone) + sum(compiled)
    if found.freed_bytes < needed:  # then it is all that there is
        assert not set(present) - set(found.blobs) - blobs_in_use
        assert not set(partials) - set(found.partials) - blobs_in_use
    # What stays is whole as far as it was: only the models that go, and unused parts of those in use, lose blobs.
    for model in helds:
        if model.id not in found.models and model.id not in models_in_use:
            assert not set(found.blobs) & model.blobs
    # Nobody who was used later goes while somebody who was used earlier stays.
    stay = [model.used for model in helds if model.id not in found.models and model.id not in models_in_use]
    go = [model.used for model in helds if model.id in found.models]
    assert not stay or not go or max(go) <= min(stay)
