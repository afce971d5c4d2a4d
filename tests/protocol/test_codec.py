"""Messages against literal bytes, and there and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.protocol import limits
from swarm.protocol.codec import Buffer, Decoder, encode
from swarm.protocol.errors import LimitError, ProtocolError
from swarm.protocol.ids import Epoch, NodeId, SessionId
from swarm.protocol.messages import (
    MESSAGE_TYPES,
    Drawn,
    Goodbye,
    Members,
    Message,
    Ping,
    Prepared,
    RowKind,
    Segment,
    Welcome,
)
from swarm.protocol.plan import NO_PLAN
from swarm.protocol.sampling import SamplingParams
from tests.protocol.messages_strategy import of, same

A, B = NodeId("a" * 32), NodeId("b" * 32)
SESSION = SessionId("aaaaaaaa-1-0badcafe")

LITERAL: list[tuple[Message, list[str]]] = [
    (Ping(1), ["83 0c 81 01 80"]),
    (Goodbye("bye", False), ["83 05 82 63 627965 f4 80"]),
    (Welcome(b"\x01\x02"), ["83 04 81 42 0102 80"]),
    (Prepared(Epoch(3, A)), ["83 15 81 82 03 7820" + "61" * 32 + "80"]),
    (
        Members((), NO_PLAN),
        ["83 0b 82 80 8a 82 00 7820" + "30" * 32 + "f6 80 00 00 fb0000000000000000 60 80 65 7061676564 80 80"],
    ),
    (
        Drawn(SESSION, Epoch(3, A), 2, 500, (7, 70000)),
        ["83 181f 85 73" + SESSION.encode().hex() + "82 03 7820" + "61" * 32 + "02 1901f4 82 07 1a00011170 80"],
    ),
    (
        Segment(
            SESSION, B, Epoch(3, A), 0, 9, RowKind.DECODE, (5, 6), 1, SamplingParams(seed=4),
            np.array([[1.0], [-2.0]], "<f4"),
        ),
        [
            "83 181e 8c 73" + SESSION.encode().hex() + "7820" + "62" * 32 + "82 03 7820" + "61" * 32
            + "00 09 02 82 05 06 01 86 fb0000000000000000 00 fb3ff0000000000000 fb0000000000000000"
            + "fb3ff0000000000000 04 00 00 00 81 83 01 02 01",
            "0000803f 000000c0",
        ],
    ),
]  # fmt: skip


def decode(frames: list[Any]) -> Message:
    decoder = Decoder()
    *early, last = [decoder.feed(frame) for frame in frames]
    assert early == [None] * len(early)
    assert last is not None
    return last


def joined(frames: list[Buffer]) -> list[str]:
    return [bytes(frame).hex() for frame in frames]


@pytest.mark.parametrize(("message", "frames"), LITERAL, ids=lambda v: type(v).__name__)
def test_literal_bytes_both_ways(message: Message, frames: list[str]) -> None:
    assert joined(encode(message)) == [frame.replace(" ", "") for frame in frames]
    assert same(decode([bytes.fromhex(frame) for frame in frames]), message)


@pytest.mark.parametrize("kind", MESSAGE_TYPES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_there_and_back(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(of(kind))
    wrap = data.draw(st.sampled_from([bytes, bytearray, memoryview]))
    assert same(decode([wrap(frame) for frame in encode(message)]), message)


def test_one_decoder_takes_many_messages() -> None:
    decoder, sent = Decoder(), [message for message, _ in LITERAL]
    got = [decoder.feed(frame) for message in sent for frame in encode(message)]
    assert all(map(same, (m for m in got if m is not None), sent))


def test_tensors_are_not_copied() -> None:
    hidden = np.ones((2, 3), "<f4")
    message = dataclasses.replace(LITERAL[-1][0], hidden=hidden)  # type: ignore[type-var]
    frames = encode(message)
    assert np.shares_memory(np.frombuffer(frames[1], "<f4"), hidden)
    frame = bytes(frames[1])
    got = decode([frames[0], frame])
    assert isinstance(got, Segment)
    assert got.hidden is not None
    assert np.shares_memory(got.hidden, np.frombuffer(frame, "<f4"))
    assert not got.hidden.flags.writeable


def test_a_strided_tensor_is_sent_as_its_values() -> None:
    values = np.arange(12, dtype="<f4").reshape(3, 4)[:, ::2]
    got = decode(encode(dataclasses.replace(LITERAL[-1][0], hidden=values)))  # type: ignore[type-var]
    assert isinstance(got, Segment)
    np.testing.assert_array_equal(got.hidden, values)  # type: ignore[arg-type]


def test_an_older_peer_leaves_last_fields_away_and_a_newer_one_adds_some() -> None:
    assert decode([cbor2.dumps([5, ["bye"], []])]) == Goodbye("bye", True)
    assert decode([cbor2.dumps([12, [1, "new", {"a": [None]}, b"x"], []])]) == Ping(1)


def test_what_we_may_not_send_is_our_own_bug() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        encode(Goodbye("x" * (limits.MAX_HEADER_BYTES + 1)))
    with pytest.raises(ValueError, match="float64"):
        encode(dataclasses.replace(LITERAL[-1][0], hidden=np.zeros(1)))  # type: ignore[type-var]


SEGMENT = cbor2.loads(bytes(encode(LITERAL[-1][0])[0]))


def segment_with(index: int, value: Any, tensors: list[Any] | None = None) -> bytes:
    tag, fields, descriptions = SEGMENT
    fields = [*fields[:index], value, *fields[index + 1 :]]
    return cbor2.dumps([tag, fields, descriptions if tensors is None else tensors])


@pytest.mark.parametrize(
    ("header", "error", "text"),
    [
        (b"", ProtocolError, "not CBOR"),
        (b"\xff", ProtocolError, "not CBOR"),
        (b"\x83\x0c\x81\x01\x80\x00", ProtocolError, "bytes behind"),
        (b"\x00" * (limits.MAX_HEADER_BYTES + 1), LimitError, "header too large"),
        (cbor2.dumps({}), ProtocolError, "wrong shape"),
        (cbor2.dumps([12, [1]]), ProtocolError, "wrong shape"),
        (cbor2.dumps([12, 1, []]), ProtocolError, "wrong shape"),
        (cbor2.dumps([0, [], []]), ProtocolError, "unknown message"),
        (cbor2.dumps([True, [], []]), ProtocolError, "unknown message"),
        (cbor2.dumps(["12", [], []]), ProtocolError, "unknown message"),
        (cbor2.dumps([[], [], []]), ProtocolError, "unknown message"),
        (cbor2.dumps([12, [], []]), ProtocolError, "incomplete"),
        (cbor2.dumps([12, [1.0], []]), ProtocolError, "sent_ns"),
        (cbor2.dumps([12, [True], []]), ProtocolError, "sent_ns"),
        (cbor2.dumps([12, [2**63], []]), ProtocolError, "sent_ns"),
        (b"\x83\x0c\x81\xc2\x49\x01\x00\x00\x00\x00\x00\x00\x00\x00\x80", ProtocolError, "tag"),
        (cbor2.dumps([5, ["x" * 4097], []]), ProtocolError, "reason"),
        (cbor2.dumps([5, [b"bytes"], []]), ProtocolError, "reason"),
        (cbor2.dumps([5, ["x", 1], []]), ProtocolError, "retry"),
        (cbor2.dumps([21, [[3, "A" * 32]], []]), ProtocolError, "proposer"),
        (cbor2.dumps([21, [[3]], []]), ProtocolError, "Epoch is incomplete"),
        (segment_with(0, "aaaaaaaa-1-0badcafe\n"), ProtocolError, "session"),
        (segment_with(5, 3), ProtocolError, "kind"),
        (segment_with(6, [0] * (limits.MAX_SEGMENT_ROWS + 1)), LimitError, "too many tokens"),
        (segment_with(6, [1, None]), ProtocolError, "tokens"),
        (segment_with(8, [float("nan"), 0, 1.0, 0.0, 1.0, 0]), ProtocolError, "temperature"),
        (segment_with(8, [11.0, 0, 1.0, 0.0, 1.0, 0]), ProtocolError, "temperature"),
        (segment_with(9, None), ProtocolError, "no field uses"),
        (segment_with(9, 1), ProtocolError, "tensor reference"),
        (segment_with(9, True), ProtocolError, "tensor reference"),
        (segment_with(9, 0, [[1, 2]] * 9), LimitError, "too many tensors"),
        (segment_with(9, 0, [[9, 2]]), ProtocolError, "tensor type"),
        (segment_with(9, 0, [[]]), ProtocolError, "description"),
        (segment_with(9, 0, [7]), ProtocolError, "description"),
        (segment_with(9, 0, [[1, 2.0]]), ProtocolError, "description"),
        (segment_with(9, 0, [[1, -1]]), LimitError, "shape"),
        (segment_with(9, 0, [[1, 1, 1, 1, 1, 1]]), LimitError, "shape"),
        (segment_with(9, 0, [[1, 2**14, 2**12 + 1]]), LimitError, "tensor too large"),
        (segment_with(9, 0, [[1, 2**62, 2**62]]), LimitError, "shape"),
        (segment_with(9, 0, [[1, 0, 2**63]]), LimitError, "shape"),
    ],
)
def test_refused(header: bytes, error: type[ProtocolError], text: str) -> None:
    with pytest.raises(error, match=text):
        # The tensor's eight bytes follow, for those that are refused only then.
        decode([header, b"\x00" * 8])


@pytest.mark.parametrize("length", [0, 7, 9, 4096])
def test_a_tensor_has_its_length(length: int) -> None:
    decoder = Decoder()
    assert decoder.feed(cbor2.dumps(SEGMENT)) is None
    with pytest.raises(ProtocolError, match="expected 8 bytes"):
        decoder.feed(b"\x00" * length)


def test_every_tensor_belongs_to_a_field() -> None:
    tag, fields, _ = cbor2.loads(bytes(encode(Ping(1))[0]))
    with pytest.raises(ProtocolError, match="no field uses"):
        decode([cbor2.dumps([tag, fields, [[1, 1]]]), b"\x00" * 4])


def test_tags_are_unique_and_every_message_can_be_read() -> None:
    tags = [kind.TAG for kind in MESSAGE_TYPES]
    assert len(set(tags)) == len(tags)
