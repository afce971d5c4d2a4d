"""The manifest: the same bytes everywhere, and whatever a peer sends as one is a manifest or a `ModelError`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.model.manifest import ABSENT, FORMAT, BlobRef, Manifest, TensorRef, blob_id, join, merge
from swarm.protocol import limits
from swarm.protocol.errors import ModelError
from swarm.protocol.ids import BlobId


def blob(number: int, size: int = 100, tensors: int = 1) -> BlobRef:
    refs = tuple(TensorRef(f"weight.{number}{i}", "u4", (4, 8), 0, 16) for i in range(tensors))
    return BlobRef(BlobId(f"{number:064x}"), size, refs)


MANIFEST = Manifest(
    name="small",
    source="/models/small",
    hidden_size=64,
    vocabulary=1000,
    context_tokens=2048,
    kv_bytes_per_token=(512, 512, 256),
    graph=blob(1, 5000, 0),
    tokenizer=blob(2, 6000, 0),
    embedding=blob(3, 300),
    layers=(blob(4), blob(5, 200, 2), blob(6)),
    head=blob(7, 50),
    tied=False,
)


def raw(**changes: Any) -> bytes:
    return cbor2.dumps({**cbor2.loads(MANIFEST.encode()), **changes})


def test_a_manifest_comes_back_as_it_was() -> None:
    pinned = replace(MANIFEST, revision="0123456789abcdef0123456789abcdef01234567", quantization="Q4_K")
    for manifest in (MANIFEST, replace(MANIFEST, tied=True, source="", name="ü"), pinned):
        assert Manifest.decode(manifest.encode()) == manifest


def test_a_manifest_from_before_revisions_is_read() -> None:
    old = cbor2.loads(MANIFEST.encode())
    del old["revision"], old["quantization"]
    assert Manifest.decode(cbor2.dumps(old)) == MANIFEST


def test_the_same_manifest_is_the_same_bytes() -> None:
    again = Manifest.decode(MANIFEST.encode())
    assert again.encode() == MANIFEST.encode()
    assert blob_id(MANIFEST.encode()) == hashlib.sha256(MANIFEST.encode()).hexdigest()
    assert replace(MANIFEST, vocabulary=1001).encode() != MANIFEST.encode()


def ids(blobs: list[BlobRef]) -> list[int]:
    return [int(one.id, 16) for one in blobs]


@pytest.mark.parametrize(
    ("start", "end", "untied", "tied"),
    [
        (0, 3, [3, 4, 5, 6, 7], [3, 4, 5, 6, 7]),
        (0, 1, [3, 4], [3, 4]),
        (1, 2, [5], [5]),
        (1, 3, [5, 6, 7], [3, 5, 6, 7]),
        (2, 3, [6, 7], [3, 6, 7]),
    ],
)
def test_a_range_needs_its_layers_and_what_stands_at_the_ends(
    start: int, end: int, untied: list[int], tied: list[int]
) -> None:
    assert ids(MANIFEST.weights(start, end)) == untied
    assert ids(replace(MANIFEST, tied=True).weights(start, end)) == tied


def test_equal_layers_are_fetched_once() -> None:
    assert ids(replace(MANIFEST, layers=(blob(4), blob(4), blob(4))).weights(0, 3)) == [3, 4, 7]


def test_sizes_add_up() -> None:
    assert MANIFEST.total_bytes == sum(one.bytes for one in MANIFEST.blobs()) == 5000 + 6000 + 300 + 400 + 50


HUGE = 10**6000
"""Python refuses to print it."""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": FORMAT + 1}, "another format"),
        ({"format": HUGE}, "not a manifest"),
        ({"layers": [], "kv_bytes_per_token": []}, "1 to 1024 layers"),
        ({"kv_bytes_per_token": [512]}, "layers"),
        ({"kv_bytes_per_token": [512, 512, 0]}, "kv_bytes_per_token"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 2**20 + 1}, "hidden_size"),
        ({"hidden_size": HUGE}, "not a manifest"),
        ({"hidden_size": 2**63}, "number"),
        ({"hidden_size": True}, "number"),
        ({"hidden_size": 64.0}, "number"),
        ({"vocabulary": limits.MAX_VOCABULARY + 1}, "vocabulary"),
        ({"vocabulary": -1}, "vocabulary"),
        ({"context_tokens": limits.MAX_CONTEXT_TOKENS + 1}, "context_tokens"),
        ({"name": 7}, "text"),
        ({"name": "x" * (limits.MAX_TEXT_CHARS + 1)}, "text"),
        ({"graph": {"id": "nothex", "bytes": 1, "tensors": []}}, "blob id"),
        ({"graph": {"id": "A" * 64, "bytes": 1, "tensors": []}}, "blob id"),
        ({"graph": {"id": "../../etc/passwd", "bytes": 1, "tensors": []}}, "blob id"),
        ({"graph": {"id": "0" * 64, "bytes": limits.MAX_BLOB_BYTES + 1, "tensors": []}}, "bytes"),
        ({"graph": {"id": "0" * 64, "bytes": 0, "tensors": []}}, "bytes"),
        ({"graph": None}, "not a manifest"),
        ({"layers": {"a": 1}}, "not a manifest"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Manifest.decode(raw(**changes))


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [((4, 8), 90, 16), ((4, 8), -1, 16), ((4, -8), 0, 16), ((4, 8), 0, -1), ((4, 8), 0, 101), ((), 100, 1)],
)
def test_a_tensor_lies_inside_its_blob(shape: tuple[int, ...], offset: int, size: int) -> None:
    bad = BlobRef(BlobId("0" * 64), 100, (TensorRef("weight.0", "u4", shape, offset, size),))
    with pytest.raises(ModelError, match=r"outside its blob; found weight\.0"):
        Manifest.decode(replace(MANIFEST, head=bad).encode())


def test_a_manifest_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MANIFEST_BYTES", len(MANIFEST.encode()) - 1)
    with pytest.raises(ModelError, match="too large"):
        Manifest.decode(MANIFEST.encode())


def decodes_or_says_why(data: bytes) -> None:
    try:
        manifest = Manifest.decode(data)
    except ModelError:
        return
    assert Manifest.decode(manifest.encode()) == manifest


@given(st.binary(max_size=300))
@settings(max_examples=300, derandomize=True)
def test_any_bytes(data: bytes) -> None:
    decodes_or_says_why(data)


@given(st.data())
@settings(max_examples=300, derandomize=True)
def test_damaged_bytes(data: st.DataObject) -> None:
    packed = bytearray(MANIFEST.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_says_why(bytes(packed[: data.draw(st.integers(0, len(packed)))]))
    decodes_or_says_why(bytes(packed))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.booleans().map(lambda negative: -HUGE if negative else HUGE)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=500, derandomize=True)
def test_any_value_at_any_place(data: st.DataObject) -> None:
    tree = cbor2.loads(MANIFEST.encode())
    place: Any = tree
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            place[key] = data.draw(values)
            break
        place = inner
    decodes_or_says_why(cbor2.dumps(tree))


# --- parts of a model that several nodes exported ---------------------------------------------------------------------


def part(start: int, end: int) -> Manifest:
    """What a node makes that exports layers ``[start, end)``."""
    return MANIFEST.without({ref.id for ref in MANIFEST.weights(0, 3)} - {ref.id for ref in MANIFEST.part(start, end)})


@pytest.mark.parametrize("spans", [[(0, 3)], [(0, 1), (1, 3)], [(2, 3), (0, 1), (1, 2)], [(0, 2), (1, 3)]])
def test_parts_join_to_the_whole(spans: list[tuple[int, int]]) -> None:
    parts = [Manifest.decode(part(*span).encode()) for span in spans]
    assert join(parts) == MANIFEST


@pytest.mark.parametrize("spans", [[(0, 1)], [(0, 1), (2, 3)], [(0, 2)], [(1, 3)]])
def test_missing_parts_are_told(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ModelError, match="parts of a model are missing"):
        join([part(*span) for span in spans])


def test_parts_of_different_models_do_not_join() -> None:
    with pytest.raises(ModelError, match="found another graph, tied"):
        join([part(0, 2), replace(part(2, 3), graph=blob(9, 5000, 0), tied=True)])
    with pytest.raises(ModelError, match="found another number of layers"):
        join([part(0, 2), replace(part(2, 3), layers=part(2, 3).layers[1:])])
    other = replace(MANIFEST.layers[1], id=blob(9).id)
    with pytest.raises(ModelError, match="different blobs of the same layer"):
        join([part(0, 2), replace(part(1, 3), layers=(*part(1, 3).layers[:1], other, MANIFEST.layers[2]))])


@pytest.mark.parametrize(
    ("known", "unknown"),
    [([], [(0, 3)]), ([(0, 1)], [(1, 3)]), ([(1, 2)], [(0, 1), (2, 3)]), ([(0, 2), (2, 3)], [])],
)
def test_what_a_part_does_not_know(known: list[tuple[int, int]], unknown: list[tuple[int, int]]) -> None:
    merged = merge([MANIFEST.without({ref.id for ref in MANIFEST.weights(0, 3)}), *(part(*span) for span in known)])
    assert merged.unknown(0, 3) == unknown
    assert merged.is_whole == (not unknown)
    assert [blob.bytes for blob in merged.blobs()] == [blob.bytes for blob in MANIFEST.blobs()]


def test_the_embedding_and_the_head_belong_to_the_layers_beside_them() -> None:
    without_head = MANIFEST.without({MANIFEST.head.id})
    assert without_head.head.id == ABSENT
    assert without_head.unknown(0, 3) == [(2, 3)]
    assert MANIFEST.without({MANIFEST.embedding.id}).unknown(0, 3) == [(0, 1)]


def test_another_form_of_a_layer_does_not_join() -> None:
    wider = replace(part(1, 3), layers=(replace(part(1, 3).layers[0], bytes=101), *MANIFEST.layers[1:]))
    with pytest.raises(ModelError, match="another form of the same layer"):
        join([part(0, 2), wider])
