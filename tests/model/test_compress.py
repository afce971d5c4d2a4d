"""How a tensor is stored, and that the graph's nodes make it again. NNCF itself is tried in `test_export`."""

from __future__ import annotations

import math

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from swarm.model.compress import Format, Kind, Stored, compress, kind_of, layout, restore
from swarm.protocol.errors import ModelError
from swarm.protocol.tensors import Array


@pytest.mark.parametrize(
    ("shape", "format_", "outer", "kind"),
    [
        ((256, 256), Format.INT4, False, Kind.INT4),
        ((256, 96), Format.INT4, False, Kind.INT4),
        ((256, 100), Format.INT4, False, Kind.INT8),  # no group divides it
        ((256, 256), Format.INT4, True, Kind.INT8),
        ((256, 256), Format.INT8, False, Kind.INT8),
        ((256, 256), Format.INT8, True, Kind.INT8),
        ((256, 256), Format.FP16, False, Kind.FP16),
        ((256, 256), Format.FP16, True, Kind.FP16),
        ((256,), Format.INT4, False, Kind.FP32),
        ((256,), Format.FP16, True, Kind.FP32),
    ],
)
def test_kinds(shape: tuple[int, ...], format_: Format, outer: bool, kind: Kind) -> None:
    assert kind_of(shape, format_, outer) is kind


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (96, 32), (4096, 128)])
def test_groups_fall_back(columns: int, group: int) -> None:
    values, scales = layout(Kind.INT4, (8, columns))
    assert values == Stored("i4", (8, columns // group, group))
    assert scales == Stored("f16", (8, columns // group, 1))
    assert values.bytes == 4 * columns


def evaluate(kind: Kind, shape: tuple[int, ...], data: list[bytes]) -> Array:
    constants = [
        ops.constant(ov.Tensor(np.frombuffer(part, np.uint8).copy(), ov.Shape(list(stored.shape)), _type(stored)))
        for part, stored in zip(data, layout(kind, shape), strict=True)
    ]
    model = ov.Model([ops.result(restore(kind, shape, constants))], [], "restored")
    properties = {"INFERENCE_PRECISION_HINT": "f32"}
    found: Array = ov.Core().compile_model(model, "CPU", properties)({})[0]
    return found


def _type(stored: Stored) -> ov.Type:
    found: ov.Type = getattr(ov.Type, stored.type)
    return found


def test_int8_is_restored() -> None:
    values = np.array([[0, 7, 255, 128], [3, 3, 3, 3]], np.uint8)
    zeros, scales = np.array([[128], [3]], np.uint8), np.array([[0.5], [2]], np.float16)
    found = evaluate(Kind.INT8, (2, 4), [values.tobytes(), zeros.tobytes(), scales.tobytes()])
    np.testing.assert_array_equal(found, [[-64, -60.5, 63.5, 0], [0, 0, 0, 0]])


def test_int4_is_restored() -> None:
    values = np.full(32, 0x8F, np.uint8)  # low half first: -1, -8, …
    scales = np.array([[[0.5]], [[2]]], np.float16)
    found = evaluate(Kind.INT4, (2, 32), [values.tobytes(), scales.tobytes()])
    np.testing.assert_array_equal(found, [[-0.5, -4] * 16, [-2, -16] * 16])


@pytest.mark.parametrize("kind", [Kind.FP16, Kind.FP32])
def test_plain_numbers(kind: Kind) -> None:
    values = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float16).astype(np.float32)
    data = [bytes(part) for part in compress(kind, values)]
    assert [len(part) for part in data] == [stored.bytes for stored in layout(kind, (4, 8))]
    assert math.prod(values.shape) * (2 if kind is Kind.FP16 else 4) == len(data[0])
    np.testing.assert_array_equal(evaluate(kind, (4, 8), data), values)


def test_fp16_does_not_overflow_silently() -> None:
    with pytest.raises(ModelError, match="too large for FP16"):
        compress(Kind.FP16, np.array([[70_000.0]], np.float32))
