"""The layer map: where the layers of a language model's graph begin and end.

Found by walking the graph, never by node names: exporters name nodes differently, but every one of them names the KV
variables ``past_key_values.{i}…``. Layer i's boundary is the last tensor before layer i+1's cache through which
everything flows: the residual stream. Caches that later layers read too go past it (see `sharing`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import openvino as ov

from swarm.model.sharing import SharedCache, find_shared
from swarm.protocol.errors import UnsupportedModelError
from swarm.protocol.limits import MAX_LAYERS

_KV_VARIABLE = re.compile(r"past_key_values\.(\d+)\D")

TOKENS_INPUT = "input_ids"


@dataclass(frozen=True, slots=True)
class Graph:
    """An OpenVINO model as plain lists: nodes in topological order, and for each the nodes that feed it."""

    nodes: Sequence[ov.Node]
    types: Sequence[str]
    inputs: Sequence[Sequence[int]]
    """For each node, the index of the node behind each of its inputs."""
    index: dict[str, int]
    """From a node's unique name to its index."""

    @staticmethod
    def of(model: ov.Model) -> Graph:
        nodes = model.get_ordered_ops()
        index = {node.get_name(): i for i, node in enumerate(nodes)}
        inputs = [[index[value.get_node().get_name()] for value in node.input_values()] for node in nodes]
        return Graph(nodes, [node.get_type_name() for node in nodes], inputs, index)

    def position(self, node: ov.Node) -> int:
        return self.index[node.get_name()]


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Indices into a `Graph`."""

    layers: int
    tokens: int
    """The parameter `input_ids`."""
    embedded: int
    """The node whose output is what layer 0 reads: ``[batch, rows, hidden]``."""
    boundaries: tuple[int, ...]
    """For each layer but the last, the node whose output is what the next layer reads."""
    head: int
    """The matrix product whose output are the logits, give or take operations on single elements."""
    result: int
    cache_layer: dict[int, int]
    """From each KV ReadValue and Assign to its layer."""
    shared: tuple[SharedCache, ...] = ()
    """Caches that later layers read too."""

    def entry(self, layer: int) -> int:
        """The node whose output `layer` reads."""
        return self.embedded if layer == 0 else self.boundaries[layer - 1]

    def crossing(self, layer: int) -> tuple[SharedCache, ...]:
        """The caches that earlier layers feed and `layer` or a later one reads."""
        return tuple(cache for cache in self.shared if cache.layer < layer <= cache.last)


def map_layers(graph: Graph) -> LayerMap:
    """Find the layers. Raises `UnsupportedModelError` where the graph is no decoder that can be cut."""
    cache_layer = _cache_layers(graph)
    layers = _count_layers(cache_layer)
    tokens = _single(graph, "Parameter", TOKENS_INPUT)
    result = _single(graph, "Result", None)
    deepest, flows = _depths(graph, cache_layer, tokens)
    shared = find_shared(graph.nodes, graph.types, graph.inputs, cache_layer, deepest, flows)
    crossings = _crossings(graph, flows, result, frozenset().union(*(cache.edges for cache in shared)))
    last: dict[int, int] = {}
    for node in crossings:
        last[deepest[node]] = node
    missing = [layer for layer in range(-1, layers - 1) if layer not in last]
    if missing:
        raise UnsupportedModelError(
            "the layers cannot be told apart",
            expected="one tensor that carries everything from each layer to the next",
            found=f"none after layer {missing[0]}" if missing[0] >= 0 else "none before layer 0",
        )
    head = _head(graph, result)
    boundaries = tuple(last[i] for i in range(layers - 1))
    return LayerMap(layers, tokens, last[-1], boundaries, head, result, cache_layer, shared)


def _cache_layers(graph: Graph) -> dict[int, int]:
    found = {}
    for i, kind in enumerate(graph.types):
        if kind in ("ReadValue", "Assign"):
            match = _KV_VARIABLE.match(graph.nodes[i].get_variable_id())
            if match is None:
                raise UnsupportedModelError(
                    "a state that is no KV cache",
                    expected="variables named past_key_values.{layer}…",
                    found=graph.nodes[i].get_variable_id(),
                )
            found[i] = int(match.group(1))
    return found


def _count_layers(cache_layer: dict[int, int]) -> int:
    numbers = sorted(set(cache_layer.values()))
    if not numbers:
        raise UnsupportedModelError(
            "the model keeps no KV cache",
            expected="a stateful text-generation IR (optimum-cli export openvino --task text-generation-with-past)",
        )
    if numbers != list(range(len(numbers))) or len(numbers) > MAX_LAYERS:
        raise UnsupportedModelError(
            "the layers are not numbered without gaps", expected=f"0 to n-1, at most {MAX_LAYERS}", found=str(numbers)
        )
    return len(numbers)


def _single(graph: Graph, kind: str, tensor: str | None) -> int:
    found = [
        i
        for i, node in enumerate(graph.nodes)
        if graph.types[i] == kind and (tensor is None or tensor in node.output(0).get_names())
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            "not a plain text model", expected=f"one {tensor or 'output (logits)'}", found=str(len(found))
        )
    return found[0]


def _depths(graph: Graph, cache_layer: dict[int, int], tokens: int) -> tuple[list[int], list[bool]]:
    """For each node the deepest layer whose cache it descends from (-1: none), and whether it descends from tokens.

    Shapes carry no data: a ``ShapeOf`` descends from nothing.
    """
    deepest = [-1] * len(graph.nodes)
    flows = [False] * len(graph.nodes)
    for i, kind in enumerate(graph.types):
        if kind == "ReadValue":
            deepest[i] = cache_layer[i]
        elif i == tokens:
            flows[i] = True
        elif kind != "ShapeOf":
            deepest[i] = max((deepest[p] for p in graph.inputs[i]), default=-1)
            flows[i] = any(flows[p] for p in graph.inputs[i])
    return deepest, flows


def _crossings(graph: Graph, flows: list[bool], result: int, aside: frozenset[tuple[int, int]]) -> list[int]:
    """The nodes through which every path from tokens to logits goes, in order; the edges `aside` are no paths."""
    reaches = [False] * len(graph.nodes)
    reaches[result] = True
    for i in range(len(graph.nodes) - 1, -1, -1):
        if reaches[i] and graph.types[i] != "ShapeOf":
            for p in graph.inputs[i]:
                reaches[p] = True
    path = [i for i in range(len(graph.nodes)) if flows[i] and reaches[i]]
    last_use = dict.fromkeys(path, -1)
    for i in path:
        if graph.types[i] != "ShapeOf":
            for p in graph.inputs[i]:
                if p in last_use and (p, i) not in aside:
                    last_use[p] = i
    found, farthest = [], -1
    for i in path:
        if farthest <= i:
            found.append(i)
        farthest = max(farthest, last_use[i])
    return found


def _head(graph: Graph, result: int) -> int:
    """The last matrix product before the logits (behind it some models scale or cap single elements)."""
    node = graph.inputs[result][0]
    while graph.types[node] != "MatMul":
        ahead = [p for p in graph.inputs[node] if graph.types[p] not in ("Constant", "Parameter")]
        if len(ahead) != 1:
            raise UnsupportedModelError("no head before the logits", expected="a MatMul", found=graph.types[node])
        node = ahead[0]
    return node
