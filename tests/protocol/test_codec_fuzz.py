"""Whatever a peer sends, the decoder ends in a message or a `ProtocolError`, in bounded memory."""

from __future__ import annotations

import copy
import tracemalloc
from typing import Any

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.protocol import limits
from swarm.protocol.codec import Decoder, encode
from swarm.protocol.errors import ProtocolError
from swarm.protocol.messages import MESSAGE_TYPES, Message
from tests.protocol.messages_strategy import messages, of

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=20)
    | st.just(cbor2.undefined)
    | st.builds(cbor2.CBORSimpleValue, st.integers(32, 255)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=25,
)


def feed(*frames: bytes) -> list[Message]:
    """The messages of what was sent until it was refused; any exception but `ProtocolError` fails the test."""
    decoder, got = Decoder(), []
    try:
        for frame in frames:
            message = decoder.feed(frame)
            if message is not None:
                got.append(message)
    except ProtocolError as error:
        assert len(str(error)) < 2000  # noqa: PT017 - what is raised is not the question here
    # What was let in must be fit to be sent on.
    for message in got:
        encode(message)
    return got


@FUZZ
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes(frames: list[bytes]) -> None:
    feed(*frames)


@FUZZ
@given(anything, st.lists(st.binary(max_size=64), max_size=3))
def test_random_cbor(value: Any, more: list[bytes]) -> None:
    feed(cbor2.dumps(value), *more)


@FUZZ
@given(
    st.sampled_from([kind.TAG for kind in MESSAGE_TYPES]),
    st.lists(anything, max_size=14),
    st.lists(st.lists(st.integers(-2, 2**66) | st.integers(0, 5), max_size=6) | anything, max_size=10),
    st.lists(st.binary(max_size=64), max_size=3),
)
def test_random_fields(tag: int, fields: list[Any], tensors: list[Any], more: list[bytes]) -> None:
    feed(cbor2.dumps([tag, fields, tensors]), *more)


@FUZZ
@given(st.data(), messages())
def test_mutated_frames(data: st.DataObject, message: Message) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 5))):
        frame = data.draw(st.sampled_from(frames))
        at = data.draw(st.integers(0, len(frame)))
        match data.draw(st.sampled_from(["set", "insert", "cut", "repeat"])):
            case "set" if at < len(frame):
                frame[at] = data.draw(st.integers(0, 255))
            case "insert":
                frame[at:at] = data.draw(st.binary(max_size=9))
            case "cut":
                del frame[at : at + data.draw(st.integers(1, 20))]
            case _:
                frame[at:at] = frame[max(0, at - 16) : at]
    if data.draw(st.booleans()):
        frames.insert(data.draw(st.integers(0, len(frames))), bytearray(data.draw(st.binary(max_size=30))))
    feed(*map(bytes, frames))


def places(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Where a value could be replaced by another: every item of every nested list."""
    if not isinstance(value, list):
        return [path]
    return [path, *(place for i, item in enumerate(value) for place in places(item, (*path, i)))]


@pytest.mark.parametrize("kind", MESSAGE_TYPES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_in_any_place(kind: type[Message], data: st.DataObject) -> None:
    header, *tensors = encode(data.draw(of(kind)))
    value = [copy.deepcopy(cbor2.loads(bytes(header)))]
    path = data.draw(st.sampled_from(places(value)[1:]))
    target = value
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = data.draw(anything)
    feed(cbor2.dumps(value[0]), *map(bytes, tensors))


CRAFTED = {
    "list of 2^64-1": b"\x9b" + b"\xff" * 8,
    "list of 2^31": b"\x9a\x80\x00\x00\x00",
    "map of 2^64-1": b"\xbb" + b"\xff" * 8,
    "map of 2^31": b"\xba\x80\x00\x00\x00",
    "bytes of 2^64-1": b"\x5b" + b"\xff" * 8,
    "bytes of 2^40": b"\x5b\x00\x00\x01\x00\x00\x00\x00\x00",
    "bytes of 2^31": b"\x5a\x80\x00\x00\x00",
    "text of 2^40": b"\x7b\x00\x00\x01\x00\x00\x00\x00\x00",
    "text of 2^31": b"\x7a\x80\x00\x00\x00",
    "nested lists": b"\x81" * 200_000,
    "nested maps": b"\xa1\x00" * 100_000,
    "nested indefinite lists": b"\x9f" * 200_000,
    "nested tags": b"\xc6" * 200_000,
    "indefinite bytes without end": b"\x5f" + b"\x41a" * 80_000,
    "indefinite text of odd pieces": b"\x7f\x41a\xff",
    "a list as a key": b"\xa1\x80\x00",
    "a map as a key": b"\xa1\xa0\x00",
    "a NaN as a key": b"\xa1\xf9\x7e\x00\x00",
    "bad UTF-8": b"\x83\x05\x81\x62\xc3\x28\x80",
    "a shared value": b"\xd8\x1c\x81\xd8\x1d\x00",
    "a bignum": b"\xc2\x5a\x00\x03\x00\x00" + b"\xff" * 196_608,
    "a decimal": b"\xc4\x82\x1a\x7f\xff\xff\xff\x01",
    "a regular expression": b"\xd8\x23\x64(a+)",
    "a date": b"\xc0\x60",
    "a rational": b"\xd8\x1e\x82\x01\x00",
    "a break alone": b"\xff",
    "reserved length": b"\x1c",
    "simple value 20 in two bytes": b"\xf8\x14",
    "empty lists": b"\x99\xff\xf0" + b"\x80" * 0xFFF0,
    "empty maps, long": b"\x9a\x00\x03\xff\xf0" + b"\xa0" * 0x3FFF0,
    "tokens of one byte": b"\x83\x18\x1f\x85\x00\x00\x00\x00\x9a\x00\x03\xff\x00" + b"\x01" * 0x3FF00,
}


@pytest.mark.parametrize("value", ["80", "00", "6161", "4161", "820102"])
def test_no_tag_is_read(value: str) -> None:
    for tag in (*range(300), 1004, 43000, 55799, 2**32):
        tagged = b"\xdb" + tag.to_bytes(8, "big") + bytes.fromhex(value)
        for header in (tagged, b"\x83\x0c\x81" + tagged + b"\x80", b"\x83\x05\x82\x60\xf5\x81" + tagged):
            with pytest.raises(ProtocolError, match="tag"):
                Decoder().feed(header)


def test_chosen_keys_are_not_hashed() -> None:
    with pytest.raises(ProtocolError, match="not CBOR"):
        Decoder().feed(b"\x83\x0c\x82\x01\xa1\x00\x00\x80")


@pytest.mark.parametrize("frame", CRAFTED.values(), ids=CRAFTED.keys())
def test_crafted_headers_cost_little(frame: bytes) -> None:
    for header in (frame, b"\x83\x0c\x81" + frame, b"\x83\x0c\x81\x01\x81" + frame, b"\x83\x0c" + frame):
        tracemalloc.start()
        try:
            assert feed(header) == []
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # The worst honest ratio is an empty map a byte: 64 bytes and its place in the list.
        assert peak < 96 * limits.MAX_HEADER_BYTES


@pytest.mark.parametrize("shape", [[2**26 - 1], [0, 2**26], [2**13, 2**13], [1, 1, 1, 2**24]])
def test_a_declared_tensor_costs_nothing_before_it_comes(shape: list[int]) -> None:
    segment = [30, [], [[1, *shape]]]
    tracemalloc.start()
    try:
        feed(cbor2.dumps(segment))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
