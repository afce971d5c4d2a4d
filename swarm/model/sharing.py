"""KV caches that later layers read too: what crosses a boundary beside the residual stream.

A cache itself never crosses: it grows. What it is fed with for new rows crosses, and the shard behind the boundary
keeps a cache of its own with it, equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import openvino as ov

from swarm.protocol.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class SharedCache:
    """Keys or values of a layer, read by later ones. Indices into a graph."""

    layer: int
    """That feeds it."""
    first: int
    last: int
    """The first and the last of the later layers that read it."""
    new: int
    """The node with what the cache is fed with: ``[batch, heads, rows, size]``."""
    read: int
    assign: int
    edges: frozenset[tuple[int, int]]
    """(from, to) where a later layer reads it."""


def find_shared(
    nodes: Sequence[ov.Node],
    types: Sequence[str],
    inputs: Sequence[Sequence[int]],
    cache_layer: Mapping[int, int],
    deepest: Sequence[int],
    flows: Sequence[bool],
) -> tuple[SharedCache, ...]:
    """In the order of their layers. `deepest` and `flows` of each node as `layers` finds them."""
    found = []
    for assign in sorted(i for i in cache_layer if types[i] == "Assign"):
        total, layer = inputs[assign][0], cache_layer[assign]
        derived, edges = {total}, set()
        for i in range(total + 1, len(nodes)):
            read = [p for p in inputs[i] if p in derived]
            if not read or types[i] in ("ShapeOf", "Assign"):
                continue
            if all(p in derived or not flows[p] for p in inputs[i]):
                derived.add(i)
            elif deepest[i] > layer:
                edges |= {(p, i) for p in read}
        if edges:
            new = _fed_with(nodes, inputs, total, flows)
            readers = [deepest[to] for _, to in edges]
            state = next(i for i in cache_layer if types[i] == "ReadValue" and _same_variable(nodes[i], nodes[assign]))
            found.append(SharedCache(layer, min(readers), max(readers), new, state, assign, frozenset(edges)))
    return tuple(sorted(found, key=lambda cache: (cache.layer, nodes[cache.assign].get_variable_id())))


def _same_variable(one: ov.Node, other: ov.Node) -> bool:
    return bool(one.get_variable_id() == other.get_variable_id())


def _fed_with(nodes: Sequence[ov.Node], inputs: Sequence[Sequence[int]], total: int, flows: Sequence[bool]) -> int:
    new = [p for p in inputs[total] if flows[p]]
    if nodes[total].get_type_name() != "Concat" or len(new) != 1 or nodes[new[0]].get_output_size() != 1:
        raise UnsupportedModelError(
            "a KV cache that later layers read is of unknown form",
            expected="a Concat of the past and one new tensor",
            found=f"{nodes[total].get_type_name()} {nodes[total].get_friendly_name()}"[:120],
        )
    shape = nodes[new[0]].get_output_partial_shape(0)
    if shape.rank.get_length() != 4 or not (shape[1].is_static and shape[3].is_static):
        raise UnsupportedModelError(
            "a KV cache that later layers read is of unknown form",
            expected="[batch, heads, rows, size] with fixed heads and size",
            found=str(shape),
        )
    return new[0]
