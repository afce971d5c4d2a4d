"""Messages to WebSocket frames and back; sans-I/O.

A message is one header frame, CBOR ``[tag, [field, …], [tensor description, …]]``, followed by one raw binary frame per
tensor. Tensor bytes are never copied into the header or out of the frame they came in. Fields go by position: a
decoder fills missing last fields with their defaults and ignores surplus ones, which is what lets messages grow.

`decode` trusts nothing: whatever a peer sends ends in a well-formed message or a `ProtocolError`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import cache
from io import BytesIO
from typing import Any, TypeAlias, cast

import cbor2

from swarm.protocol import limits
from swarm.protocol.errors import LimitError, ProtocolError, SwarmError
from swarm.protocol.ids import BlobId, Epoch, NodeId, SessionId, is_blob_id, is_node_id, is_session_id
from swarm.protocol.messages import MESSAGE_TYPES, Message
from swarm.protocol.plan import Plan, Stage
from swarm.protocol.sampling import SamplingParams
from swarm.protocol.tensors import Array, byte_length, describe, payload, rebuild

Buffer: TypeAlias = bytes | bytearray | memoryview

_BY_TAG: dict[int, type[Message]] = {kind.TAG: kind for kind in MESSAGE_TYPES}
_NESTED = (Epoch, Stage, Plan, SamplingParams)


def encode(message: Message) -> list[Buffer]:
    """The frames of `message`: header, then tensors, uncopied. Raises ``ValueError`` for one we may not send."""
    tensors: list[Array] = []
    fields = _pack(message, tensors)
    header = cbor2.dumps([message.TAG, fields, [describe(tensor) for tensor in tensors]])
    if len(header) > limits.MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes is over the limit of {limits.MAX_HEADER_BYTES}")
    return [header, *(payload(tensor) for tensor in tensors)]


def _pack(value: Any, tensors: list[Array]) -> Any:
    if dataclasses.is_dataclass(value):
        return [_pack(getattr(value, f.name), tensors) for f in dataclasses.fields(value)]
    if isinstance(value, tuple):
        if value and type(value[0]) is int:
            return list(value)
        return [_pack(item, tensors) for item in value]
    if isinstance(value, IntEnum):
        return int(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    tensors.append(value)
    return len(tensors) - 1


class Decoder:
    """Frames in, messages out, for one direction of one link. After an error the link must be dropped."""

    def __init__(self) -> None:
        self._header: tuple[int, list[Any], list[list[int]]] | None = None
        self._tensors: list[Array] = []

    def feed(self, frame: Buffer) -> Message | None:
        """The message that `frame` completes; None while its tensors are still to come. Raises `ProtocolError`."""
        if self._header is None:
            self._header = _read_header(frame)
        else:
            description = self._header[2][len(self._tensors)]
            expected = byte_length(description)
            if len(frame) != expected:
                raise ProtocolError("bad tensor frame", expected=f"{expected} bytes", found=f"{len(frame)} bytes")
            self._tensors.append(rebuild(description, frame))
        tag, fields, descriptions = self._header
        if len(self._tensors) < len(descriptions):
            return None
        tensors, self._header, self._tensors = self._tensors, None, []
        return _build(tag, fields, tensors)


def _read_header(frame: Buffer) -> tuple[int, list[Any], list[list[int]]]:
    if len(frame) > limits.MAX_HEADER_BYTES:
        raise LimitError("header too large", expected=f"at most {limits.MAX_HEADER_BYTES} bytes", found=str(len(frame)))
    stream = BytesIO(frame)
    try:
        value = cbor2.CBORDecoder(
            stream,
            semantic_decoders=_NO_TAGS,
            max_depth=limits.MAX_DEPTH + 4,
            allow_indefinite=False,
            strict_hashable_types=True,  # chosen numbers as keys can make a map quadratic
        ).decode()
    except Exception as error:
        # cbor2 raises its own errors and, for crafted input, ValueError, OverflowError, RecursionError and others.
        raise ProtocolError("a header is not CBOR", found=f"{type(error).__name__}: {error}"[:200]) from None
    if stream.tell() != len(frame):
        raise ProtocolError("bytes behind a header", expected="none", found=str(len(frame) - stream.tell()))
    if not (isinstance(value, list) and len(value) == 3 and isinstance(value[1], list) and isinstance(value[2], list)):
        raise ProtocolError("a header has the wrong shape", expected="[tag, fields, tensors]")
    tag, fields, descriptions = value
    if type(tag) is not int or tag not in _BY_TAG:
        raise ProtocolError("unknown message", expected=f"a tag of {sorted(_BY_TAG)}", found=repr(tag)[:40])
    if len(descriptions) > limits.MAX_TENSORS:
        raise LimitError("too many tensors", expected=f"at most {limits.MAX_TENSORS}", found=str(len(descriptions)))
    for description in descriptions:
        byte_length(description)
    return tag, fields, descriptions


def _refuse_tag(_value: Any, _immutable: bool) -> Any:
    raise ValueError("tags have no place in a header")


class _NoTags(Mapping[int, Callable[[Any, bool], Any]]):
    """Refuses every tag. A tag hook would not do: it never sees those that cbor2 knows itself.

    With them a peer could have regular expressions compiled here, mails parsed, and huge integers and cycles built.
    """

    def __getitem__(self, tag: int) -> Callable[[Any, bool], Any]:
        return _refuse_tag

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


_NO_TAGS = _NoTags()


def _build(tag: int, fields: list[Any], tensors: list[Array]) -> Message:
    unused = list(range(len(tensors)))
    message = _message_reader(tag)(fields, tensors, unused)
    if unused:
        raise ProtocolError("tensors that no field uses", expected="none", found=str(len(unused)))
    return cast(Message, message)


Reader: TypeAlias = Callable[[Any, list[Array], list[int]], Any]
"""(raw value, the message's tensors, indices of tensors not used yet) -> checked value"""


@cache
def _message_reader(tag: int) -> Reader:
    return _dataclass_reader(_BY_TAG[tag])


def _dataclass_reader(kind: type[Any]) -> Reader:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    readers = [_reader(hints[f.name], f.name) for f in fields]
    required = sum(1 for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)

    def read(raw: Any, tensors: list[Array], unused: list[int]) -> Any:
        if not isinstance(raw, list) or len(raw) < required:
            raise ProtocolError(f"{kind.__name__} is incomplete", expected=f"{required} fields", found=repr(raw)[:80])
        try:
            return kind(*(reader(value, tensors, unused) for reader, value in zip(readers, raw, strict=False)))
        except ProtocolError:
            raise
        except SwarmError as error:  # a field's own range check
            raise ProtocolError(f"bad {kind.__name__}", found=str(error)) from None

    return read


def _reader(hint: Any, name: str) -> Reader:
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        (inner,) = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        some = _reader(inner, name)
        return lambda raw, tensors, unused: None if raw is None else some(raw, tensors, unused)
    if origin is tuple:
        return _tuple_reader(typing.get_args(hint)[0], name)
    if hint == Array:
        return _read_tensor
    if hint in _NESTED or (isinstance(hint, type) and hint in MESSAGE_TYPES) or dataclasses.is_dataclass(hint):
        return _dataclass_reader(hint)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return _enum_reader(hint, name)
    check = _CHECKS.get(hint)
    if check is None:
        raise TypeError(f"the codec has no rule for {name}: {hint}")

    def read(raw: Any, _tensors: list[Array], _unused: list[int]) -> Any:
        if not check(raw):
            raise ProtocolError(f"bad value for {name}", expected=getattr(hint, "__name__", "?"), found=repr(raw)[:80])
        return raw

    return read


def _tuple_reader(item: Any, name: str) -> Reader:
    limit = limits.MAX_SEGMENT_ROWS if name == "tokens" else limits.MAX_ITEMS
    one = _reader(item, name)

    def read(raw: Any, tensors: list[Array], unused: list[int]) -> Any:
        if not isinstance(raw, list):
            raise ProtocolError(f"bad value for {name}", expected="a list", found=repr(raw)[:80])
        if len(raw) > limit:
            raise LimitError(f"too many {name}", expected=f"at most {limit}", found=str(len(raw)))
        return tuple(one(value, tensors, unused) for value in raw)

    return read


def _enum_reader(kind: type[IntEnum], name: str) -> Reader:
    known = {int(value): value for value in kind}

    def read(raw: Any, _tensors: list[Array], _unused: list[int]) -> Any:
        if type(raw) is not int or raw not in known:
            raise ProtocolError(f"bad value for {name}", expected=f"one of {sorted(known)}", found=repr(raw)[:40])
        return known[raw]

    return read


def _read_tensor(raw: Any, tensors: list[Array], unused: list[int]) -> Array:
    if type(raw) is not int or raw not in unused:
        raise ProtocolError("bad tensor reference", expected=f"one of {unused}", found=repr(raw)[:40])
    unused.remove(raw)
    return tensors[raw]


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    bool: lambda raw: type(raw) is bool,
    int: lambda raw: type(raw) is int and -(2**63) <= raw < 2**63,
    float: lambda raw: type(raw) in (float, int) and math.isfinite(raw),
    str: lambda raw: type(raw) is str and len(raw) <= limits.MAX_TEXT_CHARS,
    bytes: lambda raw: type(raw) is bytes and len(raw) <= limits.MAX_TEXT_CHARS,
    NodeId: lambda raw: type(raw) is str and is_node_id(raw),
    BlobId: lambda raw: type(raw) is str and is_blob_id(raw),
    SessionId: lambda raw: type(raw) is str and is_session_id(raw),
}
