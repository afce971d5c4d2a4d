"""The head for the wanted rows only, and the draw after each of them. Every engine's last shard has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.engine.base import Output
from swarm.engine.sampling import draw, draw_with_margin
from swarm.protocol.messages import Segment
from swarm.protocol.tensors import Array

HEAD_ROWS_INPUT = "head_rows"

MIN_ROWS = 2
"""Of a forward and of the head's rows in it: the matrix kernels for one row and for several differ in the last bits."""

_NO_HISTORY = np.empty(0, np.int64)


def gather_head_rows(model: ov.Model, axis: int) -> None:
    """Compute the head only for the rows listed in a new input ``head_rows [n]`` i64; `axis` is that of the rows."""
    node: Any = model.get_results()[0]
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    rows = ops.parameter([-1], ov.Type.i64, name=HEAD_ROWS_INPUT)
    rows.output(0).set_names({HEAD_ROWS_INPUT})
    wanted = ops.gather(node.input_value(0), rows, ops.constant(np.int64(axis)))
    node.input(0).replace_source_output(wanted.output(0))
    model.add_parameters([rows])


def head_rows(wanted: Sequence[int]) -> Array:
    """The wanted rows, padded to `MIN_ROWS`."""
    return np.array([*wanted, *[0] * (MIN_ROWS - len(wanted))], np.int64)


def draw_wanted(
    segment: Segment, logits: Array, tokens: Sequence[int], listed: Array | None = None, *, margins: bool = False
) -> Output:
    """A token after each wanted row, with its margin or not. `logits` are theirs, ``[wanted, vocabulary]`` or only
    those of the ids `listed`; `tokens` the session's so far."""
    end = segment.start + len(segment.tokens)
    history = np.array(tokens, np.int64) if segment.sampling.repetition_penalty != 1.0 else _NO_HISTORY
    positions = range(end - segment.wanted + 1, end + 1)
    rows = [
        (row, segment.sampling, position, history[:position], listed)
        for row, position in zip(logits, positions, strict=True)
    ]
    if not margins:
        return Output(drawn=tuple(draw(*row) for row in rows))
    found = [draw_with_margin(*row) for row in rows]
    return Output(drawn=tuple(token for token, _ in found), margins=tuple(margin for _, margin in found))
