"""A shard made ready for the stateful engine: attention over *cells* of the cache, apart from the rows that are fed.

In the graph of an exporter a row fed is a cell appended to the cache, and the attention mask is made from the cache's
length. An engine that leaves rejected cells in the cache needs the two apart:

- new inputs ``cells [n]`` (for each cell that is appended, the row it is made from) and ``rows [m]`` (for each row, the
  cell whose attention it goes on with);
- each attention mask becomes an input ``mask.{k}``, and a small model of its own makes it in *logical* positions, so
  that sliding windows and whatever else an exporter builds into it stay right;
- each cache is read through ``Gather(…, beam_idx, axis=0)``. Without it the plugin does not fuse attention with the
  cache; where an IR lacks it, it is put in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.model.cut import HIDDEN_INPUT
from swarm.model.layers import TOKENS_INPUT, Graph
from swarm.model.lengths import Lengths, dimension_marks
from swarm.protocol.errors import UnsupportedModelError

BEAM_INPUT = "beam_idx"
CELLS_INPUT, ROWS_INPUT = "cells", "rows"
LENGTHS_INPUT = "lengths"
"""Of the mask model, ``[2]`` i64: rows fed, and positions in all, those rows included."""

_LENGTH_AXIS = 2
"""Of queries, keys and values at the attention: ``[batch, heads, length, size]``."""


@dataclass(frozen=True, slots=True)
class CellShard:
    """`model` attends over cells; `masks` makes its masks."""

    model: ov.Model
    masks: ov.Model
    """``lengths`` (and, where the exporter reads them, ``attention_mask``, ``position_ids``) to one mask
    ``[1, 1, rows, total]`` for each input ``mask.{k}`` of `model`, f32 to be added or boolean, in that order."""


def mask_input(number: int) -> str:
    return f"mask.{number}"


def attend_over_cells(model: ov.Model) -> CellShard:
    """Rewrite a stateful shard, which is used up. Raises `UnsupportedModelError` where its attention is another."""
    gather_beams(model)
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    appended = [_appended(node) for node in model.get_ordered_ops() if node.get_type_name() == "Assign"]
    if not attentions or any(node.get_input_size() < 4 for node in attentions):
        raise UnsupportedModelError(
            "the stateful engine cannot place its mask",
            expected="attention with a mask as an input",
            found="another kind" if attentions else "none",
            action="Use --engine paged.",
        )
    sources = list({_key(node.input_value(3)): node.input_value(3) for node in attentions}.values())
    masks = _mask_model(model, sources)
    cells, rows = _parameter(CELLS_INPUT, [-1], ov.Type.i64), _parameter(ROWS_INPUT, [-1], ov.Type.i64)
    inputs = [_parameter(mask_input(k), [-1, 1, -1, -1], source.get_element_type()) for k, source in enumerate(sources)]
    for source, mask in zip(sources, inputs, strict=True):
        for node in attentions:
            if _key(node.input_value(3)) == _key(source):
                node.input(3).replace_source_output(mask.output(0))
    for concat in appended:
        concat.input(1).replace_source_output(_pick(concat.input_value(1), cells).output(0))
    for node in attentions:
        node.input(0).replace_source_output(_pick(node.input_value(0), cells).output(0))
        targets = list(node.output(0).get_target_inputs())
        picked = _pick(node.output(0), rows)
        for target in targets:
            target.replace_source_output(picked.output(0))
    used = [p for p in model.get_parameters() if p.output(0).get_target_inputs() and _reaches(p, model)]
    whole = ov.Model(model.get_results(), model.get_sinks(), [*used, cells, rows, *inputs], model.get_friendly_name())
    whole.validate_nodes_and_infer_types()
    return CellShard(whole, masks)


def gather_beams(model: ov.Model) -> int:
    """Let each cache flow through ``Gather(…, beam_idx, axis=0)`` where it does not; how many were put in."""
    beams: Any = next((p for p in model.get_parameters() if BEAM_INPUT in p.output(0).get_names()), None)
    added = 0
    for read in [node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue"]:
        targets = list(read.output(0).get_target_inputs())
        if any(target.get_node().get_type_name() == "Gather" for target in targets):
            continue
        if beams is None:
            beams = _parameter(BEAM_INPUT, [-1], ov.Type.i32)
            model.add_parameters([beams])
        gathered = ops.gather(read, beams, ops.constant(np.int64(0)))
        for target in targets:
            target.replace_source_output(gathered.output(0))
        added += 1
    if added:
        model.validate_nodes_and_infer_types()
    return added


def _appended(assign: ov.Node) -> ov.Node:
    concat = assign.input_value(0).get_node()
    if concat.get_type_name() == "Concat" and concat.get_input_size() == 2:
        return concat
    raise UnsupportedModelError(
        "a KV cache that does not grow by appending",
        expected="Concat(cache, new)",
        found=f"{concat.get_type_name()} {concat.get_friendly_name()}"[:120],
        action="Use --engine paged.",
    )


def _mask_model(model: ov.Model, sources: Sequence[ov.Output]) -> ov.Model:
    """The graph behind the masks on its own, every length that it reads from data made from ``lengths``."""
    names = [(source.get_node().get_friendly_name(), source.get_index()) for source in sources]
    marks = dimension_marks(model)
    graph = Graph.of(model.clone())
    by_name = {node.get_friendly_name(): node for node in graph.nodes}
    results = [ops.result(by_name[name].output(index)) for name, index in names]
    lengths = _parameter(LENGTHS_INPUT, [2], ov.Type.i64)
    rows, total = (ops.gather(lengths, _list(i), ops.constant(np.int64(0))) for i in (0, 1))
    known = Lengths(batch=_list(1), rows=rows, past=ops.subtract(total, rows), total=total)
    data = _data(graph)
    for node in list(_behind(results)):
        index = graph.index.get(node.get_name())
        if index is not None and graph.types[index] == "ShapeOf" and data[graph.inputs[index][0]]:
            shape = known.shape_like(node, marks)
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(shape.output(0))
    reached = list(_behind(results))
    left = [n for n in reached if n.get_name() in graph.index and data[graph.index[n.get_name()]]]
    if left:
        raise UnsupportedModelError(
            "an attention mask that depends on more than positions",
            expected="lengths, attention_mask and position_ids",
            found=f"{left[0].get_type_name()} {left[0].get_friendly_name()}"[:120],
            action="Use --engine paged.",
        )
    parameters = [node for node in reached if node.get_type_name() == "Parameter"]
    masks = ov.Model(results, parameters if lengths in parameters else [*parameters, lengths], "masks")
    masks.validate_nodes_and_infer_types()
    return masks


def _data(graph: Graph) -> list[bool]:
    """Which nodes hold ids, hidden rows or caches, or come from them other than by their shape."""
    held = [False] * len(graph.nodes)
    for i, kind in enumerate(graph.types):
        if kind == "ReadValue":
            held[i] = True
        elif kind == "Parameter":
            held[i] = bool(graph.nodes[i].output(0).get_names() & {TOKENS_INPUT, HIDDEN_INPUT, BEAM_INPUT})
        elif kind != "ShapeOf":
            held[i] = any(held[p] for p in graph.inputs[i])
    return held


def _behind(ends: Sequence[ov.Node]) -> Iterator[ov.Node]:
    seen: set[str] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node.get_name() not in seen:
            seen.add(node.get_name())
            yield node
            stack.extend(value.get_node() for value in node.input_values())


def _reaches(parameter: ov.Node, model: ov.Model) -> bool:
    name = parameter.get_name()
    return any(node.get_name() == name for node in _behind([*model.get_results(), *model.get_sinks()]))


def _pick(source: ov.Output, places: ov.Node) -> ov.Node:
    return ops.gather(source, places, ops.constant(np.int64(_LENGTH_AXIS)))


def _parameter(name: str, shape: list[int], kind: ov.Type) -> ov.Node:
    parameter = ops.parameter(shape, kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _list(*values: int) -> ov.Node:
    return ops.constant(np.array(values, np.int64))


def _key(output: ov.Output) -> tuple[str, int]:
    return output.get_node().get_name(), output.get_index()
