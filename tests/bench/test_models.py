"""The weights that benchmarks are made with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from bench.models import GROUP, int4_symmetric, int8_asymmetric, requantize


def test_int4_puts_the_largest_magnitude_at_minus_8() -> None:
    weight = np.zeros((2, GROUP), np.float32)
    weight[0, :2] = -4.0, 3.0
    weight[1, :2] = -3.0, 4.0
    values, scale = int4_symmetric(weight)
    assert values[:, 0, 0].tolist() == [-8, 6]
    assert scale[:, 0, 0].tolist() == [0.5, -0.5]
    np.testing.assert_array_equal((values * scale).reshape(2, -1), weight)


def test_int8_keeps_zero_and_stays_within_half_a_step() -> None:
    weight = np.random.default_rng(0).normal(0.3, 1, (8, 64)).astype(np.float32)
    weight[0, 0] = 0.0
    values, zero, scale = int8_asymmetric(weight)
    restored = (values.astype(np.float32) - zero) * scale
    assert restored[0, 0] == 0.0
    assert np.abs(restored - weight).max() <= scale.max() * 0.501


@pytest.fixture
def grouped_ir(tmp_path: Path) -> Path:
    """Embedding (u4), one product (u8) and head (u4), compressed as openvino_genai does from a GGUF."""

    def weight(seed: int, rows: int, kind: ov.Type, group: int) -> ov.Node:
        random = np.random.default_rng(seed)
        shape = [rows, 256 // group, group]
        values, zeros = ov.Tensor(kind, ov.Shape(shape)), ov.Tensor(kind, ov.Shape([*shape[:2], 1]))
        for tensor in (values, zeros):
            raw = tensor.data.reshape(-1).view(np.uint8)
            raw[:] = random.integers(0, 256, raw.shape)
        difference = ops.subtract(ops.convert(ops.constant(values), "f16"), ops.convert(ops.constant(zeros), "f16"))
        scale = random.uniform(0.001, 0.01, (*shape[:2], 1)).astype(np.float16)
        scaled = ops.multiply(difference, ops.constant(scale))
        return ops.convert(ops.reshape(scaled, np.array([rows, 256]), special_zero=False), "f32")

    ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    rows = ops.gather(weight(1, 64, ov.Type.u4, 32), ids, ops.constant(np.int64(0)))
    inner = ops.matmul(rows, weight(2, 256, ov.Type.u8, 16), False, True)
    logits = ops.matmul(inner, weight(3, 64, ov.Type.u4, 32), False, True)
    path = tmp_path / "source"
    path.mkdir()
    ov.serialize(ov.Model([ops.result(logits)], [ids]), path / "openvino_model.xml")
    (path / "config.json").write_text("{}", encoding="utf-8")
    return path


def test_requantized_model_answers_nearly_the_same(grouped_ir: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    requantize(grouped_ir, target)
    assert (target / "config.json").read_text(encoding="utf-8") == "{}"
    ids = np.arange(64, dtype=np.int64)[None]
    before, after = (
        ov.Core().compile_model(path / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(ids)[0]
        for path in (grouped_ir, target)
    )
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.99
    kinds = [
        node.get_output_element_type(0)
        for node in ov.Core().read_model(target / "openvino_model.xml").get_ordered_ops()
        if node.get_type_name() == "Constant" and node.get_byte_size() >= 16 * 1024
    ]
    assert sorted(str(kind) for kind in kinds) == sorted(map(str, [ov.Type.u8, ov.Type.i4, ov.Type.u8]))
