"""How a checkpoint's weights are stored: by NNCF, as optimum-intel does it for a whole model.

A matrix is compressed in bands of rows. No row's numbers depend on another row, so the bands of a matrix put together
are the matrix compressed at once, and memory stays at one band.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.protocol.errors import ModelError
from swarm.protocol.tensors import Array

GROUPS = (128, 64, 32)
"""Numbers of a row that share an INT4 scale: the first that divides the row. Rows that none divides become INT8."""

BAND_NUMBERS = 8 * 1024 * 1024
"""Of a matrix at a time; in f32 four times as many bytes."""


class Format(Enum):
    INT4 = "int4"
    INT8 = "int8"
    FP16 = "fp16"


class Kind(Enum):
    """How one tensor is stored."""

    INT4 = "int4"
    """Symmetric: ``i4 [rows, groups, group]`` and its scales in f16."""
    INT8 = "int8"
    """Asymmetric, one scale and zero point to a row: ``u8 [rows, columns]``."""
    FP16 = "fp16"
    FP32 = "fp32"
    """Norms and biases."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One array that a tensor is stored as."""

    type: str
    """OpenVINO's element type."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits: int = getattr(ov.Type, self.type).bitwidth
        return -(-math.prod(self.shape) * bits // 8)


def kind_of(shape: tuple[int, ...], format_: Format, outer: bool) -> Kind:
    """`outer` are embedding and head, which INT4 leaves in INT8: their error is not averaged away."""
    if len(shape) != 2:
        return Kind.FP32
    if format_ is Format.FP16:
        return Kind.FP16
    if format_ is Format.INT8 or outer or _group(shape[1]) == 0:
        return Kind.INT8
    return Kind.INT4


def layout(kind: Kind, shape: tuple[int, ...]) -> tuple[Stored, ...]:
    """The arrays a tensor of `shape` is stored as, the largest first."""
    if kind is Kind.FP32:
        return (Stored("f32", shape),)
    if kind is Kind.FP16:
        return (Stored("f16", shape),)
    rows, columns = shape
    if kind is Kind.INT8:
        return (Stored("u8", shape), Stored("u8", (rows, 1)), Stored("f16", (rows, 1)))
    group = _group(columns)
    return (Stored("i4", (rows, columns // group, group)), Stored("f16", (rows, columns // group, 1)))


def restore(kind: Kind, shape: tuple[int, ...], arrays: list[ov.Node]) -> ov.Node:
    """The nodes that make the f32 tensor of the `layout`'s arrays; the plugin fuses them into the matrix product."""
    if kind is Kind.FP32:
        return arrays[0]
    if kind is Kind.FP16:
        return ops.convert(arrays[0], ov.Type.f32)
    values = ops.convert(arrays[0], ov.Type.f16)
    if kind is Kind.INT8:
        values = ops.subtract(values, ops.convert(arrays[1], ov.Type.f16))
    values = ops.multiply(values, arrays[-1])
    if kind is Kind.INT4:
        values = ops.reshape(values, ops.constant(np.array(shape, np.int64)), False)
    return ops.convert(values, ov.Type.f32)


def compress(kind: Kind, values: Array) -> list[memoryview]:
    """The bytes of the `layout`'s arrays for a band of rows, f32."""
    if kind is Kind.FP32:
        return [_bytes(values)]
    if kind is Kind.FP16:
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if np.isinf(half).any():
            raise ModelError("a weight too large for FP16", expected="at most 65504", action="Take int8 or int4.")
        return [_bytes(half)]
    found = _compress(kind, values)
    wanted = layout(kind, values.shape)
    if [(node.get_element_type().get_type_name(), tuple(node.get_output_shape(0))) for node in found] != [
        (stored.type, stored.shape) for stored in wanted
    ]:
        raise ModelError("NNCF compresses in another form", expected=str(wanted)[:200], found=str(found)[:200])
    return [_bytes(node.get_tensor_view().data.copy()) for node in found]  # the views do not keep their nodes


def _compress(kind: Kind, values: Array) -> list[Any]:
    """The constants that NNCF makes of a matrix: values, zero points where there are some, scales."""
    import nncf

    nncf.set_log_level(logging.WARNING)  # otherwise a table for every matrix
    rows = ops.parameter([-1, values.shape[1]], ov.Type.f32)
    product = ops.matmul(rows, ops.constant(values, shared_memory=True), False, True)
    model = ov.Model([ops.result(product)], [rows], "matrix")
    settings: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
    if kind is Kind.INT4:
        group = _group(values.shape[1])
        mode = nncf.CompressWeightsMode.INT4_SYM
        settings = {"mode": mode, "ratio": 1.0, "group_size": group, "all_layers": True}
    with contextlib.redirect_stdout(io.StringIO()):  # progress bars
        model = nncf.compress_weights(model, **settings)
    constants = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    return [node for node in constants if node.get_element_type() != ov.Type.i64]


def _group(columns: int) -> int:
    return next((group for group in GROUPS if columns % group == 0), 0)


def _bytes(values: Array) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
