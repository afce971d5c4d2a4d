"""From an OpenVINO IR directory to a manifest and its blobs in the store.

Every large constant of the graph is replaced by a parameter that stands for it, and its bytes go to the blob of the
layer that uses them. What is left is the graph that everybody gets.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import cbor2
import openvino as ov
from openvino import opset13 as ops

from swarm.model.inventory import make_room
from swarm.model.layers import Graph, LayerMap, map_layers
from swarm.model.manifest import BlobRef, Manifest, TensorRef
from swarm.model.store import Store
from swarm.model.tokenizer import pack
from swarm.protocol.errors import ModelError
from swarm.protocol.ids import BlobId

WEIGHT_MIN_BYTES = 4096
"""Smaller constants stay in the graph: axes, scalars, norms of small models."""

ALIGNMENT = 64
"""Of each tensor in its blob, bytes: a cache line, so that it can be used in place."""

DEFAULT_CONTEXT_TOKENS = 4096
"""Where the model's configuration does not say."""

KV_BYTES = 2
"""The cache is f16 (see `engine.paged`)."""


def publish(
    ir: Path,
    store: Store,
    name: str,
    source: str,
    on_progress: Callable[[int, int], None],
    *,
    revision: str = "",
    quantization: str = "",
) -> BlobId:
    """Put the IR in directory `ir` into the store; the id of its manifest. Blocking; seconds per GB.

    `on_progress(done, total)` counts bytes of weights. Where `quantization` is not given, the manifest names the type
    that most bytes of the layers have. Raises `UnsupportedModelError` for a graph that cannot be cut
    and `StoreError` for a full disk.
    """
    model = ov.Core().read_model(ir / "openvino_model.xml")
    graph = Graph.of(model)
    layer_map = map_layers(graph)
    owners = _owners(graph, layer_map)
    total = sum(graph.nodes[i].get_byte_size() for i in owners)
    make_room(store, total)
    parts: dict[int, list[int]] = {part: [] for part in range(-1, layer_map.layers + 1)}
    for constant, part in sorted(owners.items()):
        parts[part].append(constant)
    done = 0
    blobs = []
    parameters: list[ov.Node] = []
    for constants in parts.values():
        blob, made = _write_blob(store, [graph.nodes[i] for i in constants], len(parameters))
        blobs.append(blob)
        parameters += made
        done += sum(graph.nodes[i].get_byte_size() for i in constants)
        on_progress(done, total)
    hidden = graph.nodes[layer_map.embedded].get_output_partial_shape(0)[2].get_length()
    vocabulary = graph.nodes[layer_map.result].get_output_partial_shape(0)[2].get_length()
    tied = _is_tied(graph, layer_map, owners)
    kv = kv_bytes_per_token(graph, layer_map)
    model.add_parameters(parameters)
    manifest = Manifest(
        name=name,
        source=source,
        hidden_size=hidden,
        vocabulary=vocabulary,
        context_tokens=context_tokens(ir),
        kv_bytes_per_token=kv,
        graph=write_graph(store, model),
        tokenizer=_put(store, pack(ir)),
        embedding=blobs[0],
        layers=tuple(blobs[1:-1]),
        head=blobs[-1],
        tied=tied,
        revision=revision,
        quantization=quantization or _main_type(blobs[1:-1]),
    )
    identity = store.put_bytes(manifest.encode())
    store.mark_manifest(identity, name, source)
    return identity


def _owners(graph: Graph, layer_map: LayerMap) -> dict[int, int]:
    """Which part each large constant belongs to: -1 embedding, 0… layers, `layers` the head.

    One that several layers use (a rotary table) stays in the graph; one that embedding and head share is the
    embedding's.
    """
    head_row = graph.inputs[layer_map.head]
    owners: dict[int, int] = {}
    shared: set[int] = set()
    spans: list[tuple[int, list[int], set[int]]] = [(-1, [layer_map.embedded], set())]
    for layer in range(layer_map.layers):
        caches = [i for i, owner in layer_map.cache_layer.items() if owner == layer and graph.types[i] == "Assign"]
        last = layer == layer_map.layers - 1
        end = head_row[0] if last else layer_map.boundaries[layer]
        fed = {cache.new for cache in layer_map.crossing(layer)}
        spans.append((layer, [end, *caches], {layer_map.entry(layer), *fed}))
    spans.append((layer_map.layers, [layer_map.result], {head_row[0]}))
    for part, ends, stops in spans:
        for constant in _constants_behind(graph, ends, stops):
            first = owners.setdefault(constant, part)
            if first != part and not (first == -1 and part == layer_map.layers):
                shared.add(constant)
    return {constant: part for constant, part in owners.items() if constant not in shared}


def _constants_behind(graph: Graph, ends: Iterable[int], stops: set[int]) -> Iterable[int]:
    seen = set(stops)
    stack = [end for end in ends if end not in seen]
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        if graph.types[i] == "Constant":
            if graph.nodes[i].get_byte_size() >= WEIGHT_MIN_BYTES:
                yield i
        elif graph.types[i] != "ShapeOf":
            stack.extend(graph.inputs[i])


def _is_tied(graph: Graph, layer_map: LayerMap, owners: dict[int, int]) -> bool:
    behind_head = _constants_behind(graph, [layer_map.result], {graph.inputs[layer_map.head][0]})
    return any(owners.get(constant) == -1 for constant in behind_head)


def _write_blob(store: Store, constants: list[ov.Node], first: int) -> tuple[BlobRef, list[ov.Node]]:
    """Write the constants one behind the other; in the graph a parameter takes the place of each."""
    tensors, parameters, offset = [], [], 0
    with store.writer() as writer:
        for number, constant in enumerate(constants, first):
            padding = -offset % ALIGNMENT
            writer.write(bytes(padding))
            offset += padding
            size = constant.get_byte_size()
            writer.write(memoryview(constant.get_tensor_view().data.reshape(-1)).cast("B")[:size])
            kind, shape = constant.get_output_element_type(0), constant.get_output_shape(0)
            name = f"weight.{number}"
            tensors.append(TensorRef(name, kind.get_type_name(), tuple(shape), offset, size))
            parameters.append(_stand_in(constant, name))
            offset += size
        if not constants:
            # An untied model's head always has weights, a tied one's may have none: its blob is one byte, not none.
            writer.write(b"\0")
            offset = 1
        identity = writer.commit()
    return BlobRef(identity, offset, tuple(tensors)), parameters


def _stand_in(constant: ov.Node, name: str) -> ov.Node:
    parameter = ops.parameter(constant.get_output_shape(0), constant.get_output_element_type(0), name=name)
    parameter.output(0).set_names({name})
    for target in list(constant.output(0).get_target_inputs()):
        target.replace_source_output(parameter.output(0))
    return parameter


def write_graph(store: Store, model: ov.Model) -> BlobRef:
    """The graph's blob: structure and small constants, without the weights that parameters stand for."""
    with tempfile.TemporaryDirectory() as folder:
        xml, weights = Path(folder, "graph.xml"), Path(folder, "graph.bin")
        ov.serialize(model, xml, weights)
        return _put(store, cbor2.dumps([xml.read_bytes(), weights.read_bytes()]))


def _put(store: Store, data: bytes) -> BlobRef:
    return BlobRef(store.put_bytes(data), len(data))


def _main_type(layers: Iterable[BlobRef]) -> str:
    """The element type of most bytes of weights; empty for layers without large weights."""
    sizes: Counter[str] = Counter()
    for layer in layers:
        for tensor in layer.tensors:
            sizes[tensor.type] += tensor.bytes
    return sizes.most_common(1)[0][0] if sizes else ""


def kv_bytes_per_token(graph: Graph, layer_map: LayerMap) -> tuple[int, ...]:
    """See `Manifest`. Raises `ModelError` for a cache without fixed heads and size.

    A cache that later layers read counts for each of them: a shard behind a boundary keeps a copy. A shard with several
    readers has one and is promised more than it takes, never less.
    """
    sizes = [0] * layer_map.layers
    for i, layer in layer_map.cache_layer.items():
        if graph.types[i] == "ReadValue":
            axes = [axis.get_length() for axis in graph.nodes[i].get_output_partial_shape(0) if axis.is_static]
            if len(axes) != 2:
                raise ModelError(
                    "a KV cache of unknown layout",
                    expected="[batch, heads, length, size] with fixed heads and size",
                    found=str(graph.nodes[i].get_output_partial_shape(0)),
                )
            size = axes[0] * axes[1] * KV_BYTES
            readers = next((range(c.first, c.last + 1) for c in layer_map.shared if c.read == i), range(0))
            for holder in (layer, *readers):
                sizes[holder] += size
    return tuple(sizes)


def context_tokens(ir: Path) -> int:
    """`max_position_embeddings` of the model's own configuration."""
    try:
        config = json.loads((ir / "config.json").read_text(encoding="utf-8"))
        value = config["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_CONTEXT_TOKENS
    return value if type(value) is int and value > 0 else DEFAULT_CONTEXT_TOKENS
