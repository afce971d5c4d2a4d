"""Gives the 8-bit weights of an IR made from a GGUF a form that CPUs run at full speed.

openvino_genai writes Q6_K as u8 in groups of 16 and Q8_0 as u8 in groups of 32, each group with a scale and a zero
point. INT8 without zero points in groups of 128 is smaller, takes half the time of the first, and is as good (see
docs/log.md). The 4-bit types become u4 in groups of 32, which is fast as it is: they are left alone, bit for bit.

Everything is done element by element in f32, so the same IR gives the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.protocol.tensors import Array

Node: TypeAlias = Any
"""openvino.Node; its operators are not typed."""

GROUPS = (128, 64, 32)
"""Sizes of the new groups, the first that fits."""

SLOW_GROUP = 32
"""Weights that share a scale; 8-bit ones in groups of up to as many are written anew."""

_BLOCK_BYTES = 32 * 1024 * 1024
"""Of a weight in memory as f32 at once."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """A compressed weight in the graph: ``(values - zeros) * scales``, as f32 ``[out, in]``."""

    node: Node
    """Gives the f32 weight."""
    values: Node
    """u8 constant ``[out, groups, group]``."""
    zeros: Node
    """u8 constant ``[out, groups, 1]``."""
    scales: Node
    """f16 constant ``[out, groups, 1]``."""


def requantize(source: Path, target: Path) -> int:
    """Writes the model in the directory `source` to `target`: how many weights of it were changed.

    With none nothing is written. Working memory is that of the new weights and one block.
    """
    model = ov.Core().read_model(source / "openvino_model.xml")
    found = [weight for node in model.get_ordered_ops() if (weight := slow_weight(node)) is not None]
    for weight in found:
        made = _int8(weight)
        for use in list(weight.node.output(0).get_target_inputs()):
            use.replace_source_output(made.output(0))
    if found:
        model.validate_nodes_and_infer_types()
        ov.serialize(model, target / "openvino_model.xml")
    return len(found)


def slow_weight(node: Node) -> Grouped | None:
    """The weight that `node` gives, where it is 8-bit in small groups, as openvino_genai builds it from Q6_K."""
    chain = [node]
    for kind in ("Convert", "Reshape", "Multiply", "Subtract", "Convert", "Constant"):
        if chain[-1].get_type_name() != kind:
            return None
        if kind != "Constant":
            chain.append(chain[-1].input_value(0).get_node())
    _, _, multiply, subtract, _, values = chain
    zeros = subtract.input_value(1).get_node()
    zeros = zeros.input_value(0).get_node() if zeros.get_type_name() == "Convert" else zeros
    scales = multiply.input_value(1).get_node()
    constants = zeros.get_type_name() == scales.get_type_name() == "Constant"
    shape = list(values.get_output_shape(0))
    if not constants or values.get_output_element_type(0) != ov.Type.u8 or len(shape) != 3 or shape[2] > SLOW_GROUP:
        return None
    return Grouped(node, values, zeros, scales)


def int8_symmetric(weight: Array, group: int) -> tuple[Array, Array]:
    """f32 ``[out, in]`` to i8 ``[out, groups, group]`` and f16 scales ``[out, groups, 1]``."""
    grouped = weight.reshape(len(weight), -1, group)
    scale = (np.abs(grouped).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
    scale[scale == 0] = np.finfo(np.float16).tiny  # a group of zeros
    # The rounded scale may be a little too small for the largest value.
    return np.clip(np.rint(grouped / scale.astype(np.float32)), -127, 127).astype(np.int8), scale


def group_of(columns: int) -> int:
    """The largest of `GROUPS` that divides a row, or the row itself."""
    return next((group for group in GROUPS if columns % group == 0), columns)


def _int8(weight: Grouped) -> Node:
    rows, groups, old_group = weight.values.get_output_shape(0)
    columns = groups * old_group
    group = group_of(columns)
    # Tensors of their own memory: a constant made from one over a numpy array does not keep the array alive.
    values = ov.Tensor(ov.Type.i8, ov.Shape([rows, columns // group, group]))
    scales = ov.Tensor(ov.Type.f16, ov.Shape([rows, columns // group, 1]))
    for span, block in _blocks(weight):
        values.data[span], scales.data[span] = int8_symmetric(block, group)
    name = weight.node.get_friendly_name()
    # Names are given here: those that OpenVINO gives count on through a process, and the bytes of the IR with them.
    integers = ops.constant(values, name=f"{name}/int8")
    factors = ops.constant(scales, name=f"{name}/scale")
    scaled = ops.multiply(ops.convert(integers, "f16", name=f"{name}/f16"), factors, name=f"{name}/scaled")
    shape = ops.constant(np.array([rows, columns], np.int64), name=f"{name}/shape")
    return ops.convert(ops.reshape(scaled, shape, False, name=f"{name}/rows"), "f32", name=name)


def _blocks(weight: Grouped) -> Iterator[tuple[slice, Array]]:
    """The weight in f32 ``[rows, in]``, some rows at a time."""
    values, zeros, scales = (constant.data for constant in (weight.values, weight.zeros, weight.scales))
    rows = max(1, _BLOCK_BYTES // (4 * values[0].size))
    for first in range(0, len(values), rows):
        span = slice(first, first + rows)
        centred = values[span].astype(np.float32) - zeros[span].astype(np.float32)
        yield span, (centred * scales[span].astype(np.float32)).reshape(len(centred), -1)
