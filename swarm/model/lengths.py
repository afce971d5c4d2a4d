"""Lengths in a graph: which of batch, rows, past and total a dynamic dimension of a tensor is.

Exporters share equal ``ShapeOf`` reads, so a graph reads a length wherever it first stood. Who takes a graph apart
replaces such a read by a shape of the same value made from something else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.protocol.errors import UnsupportedModelError

# Marks that OpenVINO carries through the graph to tell dynamic dimensions apart. Any two different values that no axis
# of a model has would do: static axes are told by being static.
_BATCH, _ROWS, _TOTAL, _PAST = 1_000_003, 1_000_033, 1_000_037, 1_000_081

Marks = dict[str, list[ov.PartialShape]]
"""For each node, by its friendly name, the marked shapes of its outputs."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Nodes ``[1]`` i64 with the lengths that a dynamic dimension can have."""

    batch: ov.Node
    rows: ov.Node
    past: ov.Node
    total: ov.Node

    def shape_like(self, shape_of: ov.Node, marks: Marks) -> ov.Node:
        """What `shape_of` reads, made from these lengths and static sizes. Raises `UnsupportedModelError`."""
        source = shape_of.input_value(0)
        node = source.get_node()
        parts: list[ov.Node] = []
        marked = marks[node.get_friendly_name()][source.get_index()]
        for dimension, mark in zip(source.get_partial_shape(), marked, strict=True):
            if dimension.is_static:
                parts.append(ops.constant(np.array([dimension.get_length()], np.int64)))
            else:
                parts.append(getattr(self, _meaning(mark, node)))
        shape: ov.Node = ops.concat(parts, 0)
        wanted = shape_of.get_output_element_type(0)
        return shape if wanted == ov.Type.i64 else ops.convert(shape, wanted)


def dimension_marks(model: ov.Model) -> Marks:
    """The shape of every tensor when the inputs' dynamic axes carry marks.

    Bounds, not fixed lengths: exporters leave reshapes to length 0 in branches that the plugin fuses away, and a fixed
    length contradicts those.
    """
    marked = model.clone()
    rows, total = ov.Dimension(0, _ROWS), ov.Dimension(0, _TOTAL)
    shapes = {}
    for value in marked.inputs:
        name = value.get_any_name()
        shape = value.get_partial_shape()
        axes = [ov.Dimension(_BATCH), total if name == "attention_mask" else rows]
        dynamic = [axis for axis in shape if axis.is_dynamic]
        if len(dynamic) <= 2 and dynamic == list(shape)[: len(dynamic)]:
            shapes[name] = ov.PartialShape([*axes[: len(dynamic)], *list(shape)[len(dynamic) :]])
    caches = {
        node.get_variable_id(): _marked_cache(node.get_output_partial_shape(0))
        for node in marked.get_ordered_ops()
        if node.get_type_name() == "ReadValue"
    }
    marked.reshape(shapes, caches)
    return {
        node.get_friendly_name(): [node.get_output_partial_shape(k) for k in range(node.get_output_size())]
        for node in marked.get_ordered_ops()
    }


def _marked_cache(shape: ov.PartialShape) -> ov.PartialShape:
    """``[batch, heads, length, size]``, whichever axis the length is."""
    axes = [ov.Dimension(0, _PAST) if axis.is_dynamic else axis for axis in shape]
    return ov.PartialShape([ov.Dimension(_BATCH), *axes[1:]])


def _meaning(mark: ov.Dimension, node: ov.Node) -> str:
    """Which of the lengths a marked dimension of `node` is.

    Attention loses the mark of its rows, because those of its mask are not known; a cache's marks do not get lost.
    """
    if mark.is_static:
        meaning = "batch" if mark.get_length() == _BATCH else None
    else:
        meanings = {_ROWS: "rows", -1: "rows", _TOTAL: "total", _PAST + _ROWS: "total", _PAST: "past"}
        meaning = meanings.get(mark.get_max_length())
    if meaning is not None:
        return meaning
    raise UnsupportedModelError(
        "a length that a layer reads from an earlier one cannot be told",
        expected="batch, rows, past or total length",
        found=f"{mark} of {node.get_type_name()} {node.get_friendly_name()}"[:120],
    )
