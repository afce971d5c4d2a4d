"""Tensors on the wire: raw little-endian bytes beside a header of type and shape."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from swarm.protocol.errors import LimitError, ProtocolError
from swarm.protocol.limits import MAX_TENSOR_BYTES, MAX_TENSOR_RANK

Array: TypeAlias = npt.NDArray[Any]

_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f2"), 3: np.dtype("<i4"), 4: np.dtype("<i8")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def describe(array: Array) -> list[int]:
    """``[type code, *shape]``. Raises ``ValueError`` for a type that has no code."""
    code = _CODES.get(array.dtype)
    if code is None:
        raise ValueError(f"a tensor of {array.dtype} cannot be sent")
    return [code, *array.shape]


def payload(array: Array) -> memoryview:
    """The bytes of `array` without a copy where it is contiguous."""
    if array.size == 0:
        return memoryview(b"")  # numpy's own view of nothing cannot be cast
    return np.ascontiguousarray(array).data.cast("B")


def byte_length(description: object) -> int:
    """The length in bytes that a described tensor must have. Raises `ProtocolError` on nonsense."""
    if not isinstance(description, list) or not description or not all(type(v) is int for v in description):
        raise ProtocolError("bad tensor description", expected="[type, *shape]", found=repr(description)[:80])
    code, *shape = description
    if code not in _DTYPES:
        raise ProtocolError("unknown tensor type", expected=f"one of {sorted(_DTYPES)}", found=str(code))
    # An axis is bounded by itself too: beside an axis of 0 the size says nothing of it.
    if len(shape) > MAX_TENSOR_RANK or not all(0 <= axis <= MAX_TENSOR_BYTES for axis in shape):
        raise LimitError("bad tensor shape", expected=f"at most {MAX_TENSOR_RANK} axes", found=str(shape)[:80])
    size = math.prod(shape) * _DTYPES[code].itemsize
    if size > MAX_TENSOR_BYTES:
        raise LimitError("tensor too large", expected=f"at most {MAX_TENSOR_BYTES} bytes", found=f"{size} bytes")
    return size


def rebuild(description: list[int], data: bytes | bytearray | memoryview) -> Array:
    """A read-only view of `data`, which must be `byte_length(description)` long."""
    code, *shape = description
    array: Array = np.frombuffer(data, dtype=_DTYPES[code]).reshape(shape)
    array.flags.writeable = False
    return array
