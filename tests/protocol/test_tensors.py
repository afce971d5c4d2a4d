from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.errors import LimitError, ProtocolError
from swarm.protocol.limits import MAX_TENSOR_BYTES, MAX_TENSOR_RANK
from swarm.protocol.tensors import Array, byte_length, describe, payload, rebuild
from tests.protocol.messages_strategy import arrays


@given(arrays())
def test_there_and_back_bit_for_bit(array: Array) -> None:
    description = describe(array)
    data = payload(array)
    assert len(data) == byte_length(description) == array.nbytes
    again = rebuild(description, data)
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert not again.flags.writeable


def test_bytes_are_little_endian_in_row_order() -> None:
    array = np.array([[1, 2], [3, 4]], "<i4")
    assert describe(array) == [3, 2, 2]
    assert bytes(payload(array)).hex() == "01000000020000000300000004000000"
    assert bytes(payload(array.T)).hex() == "01000000030000000200000004000000"


@pytest.mark.parametrize("dtype", ["f8", ">f4", "u1", "bool", "O", "U1"])
def test_other_types_are_not_sent(dtype: str) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        describe(np.zeros(1, dtype))


@pytest.mark.parametrize(
    "description",
    [None, 1, "1", [], {}, [None], [1, "2"], [1, 2.0], [1, True], [True], [0, 1], [5, 1], [-1], [1, -1], [1, None]],
)
def test_nonsense_is_refused(description: Any) -> None:
    with pytest.raises(ProtocolError):
        byte_length(description)


@pytest.mark.parametrize(
    "shape", [[1] * (MAX_TENSOR_RANK + 1), [MAX_TENSOR_BYTES // 4 + 1], [2**31, 2**31], [0, 2**63], [2**64, 0]]
)
def test_shapes_are_bounded(shape: list[int]) -> None:
    with pytest.raises(LimitError):
        byte_length([1, *shape])


def test_the_largest_tensor() -> None:
    assert byte_length([1, 1024, MAX_TENSOR_BYTES // 4096]) == MAX_TENSOR_BYTES


@given(st.lists(st.integers(-(2**70), 2**70), max_size=7))
def test_what_passes_can_be_rebuilt(description: list[int]) -> None:
    try:
        size = byte_length(description)
    except ProtocolError:
        return
    if size < 1_000_000:
        assert list(rebuild(description, bytes(size)).shape) == description[1:]
