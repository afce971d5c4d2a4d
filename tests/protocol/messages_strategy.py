"""Hypothesis strategies for every message, built from the types of their fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.protocol.ids import BlobId, NodeId, SessionId
from swarm.protocol.limits import MAX_TENSOR_RANK
from swarm.protocol.messages import MESSAGE_TYPES
from swarm.protocol.sampling import SamplingParams
from swarm.protocol.tensors import Array

DTYPES = ("<f4", "<f2", "<i4", "<i8")

_HEX = "0123456789abcdef"


def _hex(digits: int) -> st.SearchStrategy[str]:
    return st.text(_HEX, min_size=digits, max_size=digits)


_SHARE = st.floats(0, 1)

_BY_HINT: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    bytes: st.binary(max_size=40),
    NodeId: _hex(32),
    BlobId: _hex(64),
    SessionId: st.builds(lambda a, n, b: f"{a}-{n:x}-{b}", _hex(8), st.integers(0, 2**48 - 1), _hex(8)),
    SamplingParams: st.builds(
        SamplingParams,
        temperature=st.floats(0, 10),
        top_k=st.integers(0, 1_000_000),
        top_p=_SHARE,
        min_p=_SHARE,
        repetition_penalty=st.floats(0.1, 10),
        seed=st.integers(0, 2**63 - 1),
    ),
}


def arrays() -> st.SearchStrategy[Array]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=MAX_TENSOR_RANK, min_side=0, max_side=5)
    return st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), shapes))


@cache
def of(hint: Any) -> st.SearchStrategy[Any]:
    """Well-formed values of a field's type."""
    if hint in _BY_HINT:
        return _BY_HINT[hint]
    if hint == Array:
        return arrays()
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if arm is type(None) else of(arm) for arm in typing.get_args(hint)))
    if origin is tuple:
        return st.lists(of(typing.get_args(hint)[0]), max_size=4).map(tuple)
    if issubclass(hint, IntEnum):
        return st.sampled_from(hint)
    hints = typing.get_type_hints(hint)
    return st.builds(hint, *(of(hints[f.name]) for f in dataclasses.fields(hint)))


def messages() -> st.SearchStrategy[Any]:
    return st.one_of(*map(of, MESSAGE_TYPES))


def same(a: Any, b: Any) -> bool:
    """Equality of messages, tensors bit for bit."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
