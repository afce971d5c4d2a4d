"""A second head over the tokens that a draft needs most: it then reads a third less of its weights for each token.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856). Byte-pair encodings number tokens in the order of their merges, the most
frequent first, so the first ids are the shortlist and no text has to be counted. Beside them come the ids that are in
the text already: names, and all that an answer repeats, whose rows are looked up for each forward. Where a text goes on
to use others, as in other scripts, the whole head is used: it stays, and costs nothing while no row goes to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.protocol.tensors import Array

SHORT_ROWS_INPUT = "short_head_rows"
EXTRA_IDS_INPUT = "short_head_extra_ids"

FIRST = 32_768
"""Ids from 0 on that are listed."""

LAST = 2048
"""Ids at the end of a vocabulary that are listed: added tokens, such as those that end a turn."""

CONTEXT = 1024
"""The last ids of a session, which are listed for it."""

RECENT = 64
"""Ids of a session that tell whether the shortlist suits it."""

MISSED = RECENT // 8
"""So many of them may have been missing when they came. One that is missing costs the rest of a window, the whole head
costs each token a third more: they break even at about an eighth."""

Node: TypeAlias = Any
"""openvino.Node; its operators are not typed."""

_BY_ELEMENT: dict[str, Callable[[Node, list[Node]], Node]] = {
    "Convert": lambda node, inputs: ops.convert(inputs[0], node.get_element_type()),
    "Subtract": lambda node, inputs: ops.subtract(*inputs),
    "Multiply": lambda node, inputs: ops.multiply(*inputs),
}
"""What decompresses weights."""


class Shortlist:
    """The ids that the short head always has, and those that a batch needs beside them."""

    def __init__(self, ids: Iterable[int], vocabulary: int) -> None:
        """Ids lie in ``[0, vocabulary)``."""
        self._listed = np.zeros(vocabulary, bool)
        self._listed[list(ids)] = True
        self.ids: Array = np.flatnonzero(self._listed)

    def missing(self, sessions: Iterable[Sequence[int]]) -> Array | None:
        """What these sessions' ids so far have beyond the shortlist; None where it does not suit all of them."""
        found = [np.empty(0, np.int64)]
        for tokens in sessions:
            context = np.array(tokens[-CONTEXT:], np.int64)
            places = np.flatnonzero(~self._listed[context])
            ids, first = np.unique(context[places], return_index=True)
            if np.count_nonzero(places[first] >= len(context) - RECENT) > MISSED:
                return None
            found.append(ids)
        return np.unique(np.concatenate(found))


def most_needed(tokens: Mapping[int, bytes], stops: Iterable[int], vocabulary: int) -> Shortlist | None:
    """The shortlist of a vocabulary (id to its bytes); None where it would be most of it.

    Single bytes are listed too: SentencePiece numbers them, digits and punctuation among them, behind all merges.
    """
    if vocabulary < 2 * (FIRST + LAST):
        return None
    single = (token for token, text in tokens.items() if len(text) == 1)
    known = range(min(vocabulary, 1 + max(tokens, default=0)))
    ids = {*known[:FIRST], *known[-LAST:], *single, *stops}
    return Shortlist((token for token in ids if token < vocabulary), vocabulary)


def add_short_head(model: ov.Model, ids: Array) -> bool:
    """Add an output with the logits of `ids` and, behind them, of those listed in a new input ``short_head_extra_ids
    [m]`` i64, for the rows listed in a new input ``short_head_rows [n]`` i64.

    For a paged model, before its head's rows are gathered. False, and `model` as it was, where the head is not a plain
    product of rows and weights.
    """
    product: Node = model.get_results()[0].input_value(0).get_node()
    if product.get_type_name() != "MatMul" or product.get_attributes() != {"transpose_a": False, "transpose_b": True}:
        return False
    weight = product.input_value(1).get_node()
    short = _rows_of(weight, ids, weight.get_output_shape(0)[0])
    if short is None:
        return False
    rows, extra = (ops.parameter([-1], ov.Type.i64, name=name) for name in (SHORT_ROWS_INPUT, EXTRA_IDS_INPUT))
    for parameter in (rows, extra):
        parameter.output(0).set_names({parameter.get_friendly_name()})
    axis = ops.constant(np.int64(0))
    hidden = ops.gather(product.input_value(0), rows, axis)
    looked_up = ops.matmul(hidden, ops.gather(weight, extra, axis), False, True)
    model.add_parameters([rows, extra])
    model.add_results([ops.result(ops.concat([ops.matmul(hidden, short, False, True), looked_up], -1))])
    return True


def _rows_of(node: Node, ids: Array, rows: int) -> Node | None:
    """What gives only the rows `ids` of a weight that has `rows`; None where `node` is not known to keep rows apart."""
    kind, shape = node.get_type_name(), list(node.get_output_shape(0))
    by_row = len(shape) > 1 and shape[0] == rows
    if kind == "Constant":
        return _taken(node, ids) if by_row else node
    if kind == "Reshape" and by_row and node.get_input_shape(0)[0] == rows:
        inner = _rows_of(node.input_value(0).get_node(), ids, rows)
        return inner and ops.reshape(inner, np.array([len(ids), *shape[1:]], np.int64), False)
    if kind not in _BY_ELEMENT:
        return None
    inputs = [_rows_of(value.get_node(), ids, rows) for value in node.input_values()]
    return None if None in inputs else _BY_ELEMENT[kind](node, inputs)


def _taken(constant: Node, ids: Array) -> Node:
    """The rows `ids` of a constant of any element type."""
    shape = constant.get_output_shape(0)
    kind = constant.get_element_type()
    bits = math.prod(shape[1:]) * kind.bitwidth
    data = constant.data.reshape(-1).view(np.uint8)
    if bits % 8 == 0:
        rows = data.reshape(shape[0], -1)[ids]
    else:  # rows end within a byte: zero points of 4 bits
        apart = np.unpackbits(data, count=shape[0] * bits, bitorder="little").reshape(shape[0], bits)
        rows = np.packbits(apart[ids], bitorder="little")
    # A tensor of its own memory: a constant made from one over a numpy array does not keep the array alive.
    taken = ov.Tensor(kind, ov.Shape([len(ids), *shape[1:]]))
    taken.data.reshape(-1).view(np.uint8)[:] = rows.reshape(-1)
    return ops.constant(taken)
