"""From blobs in the store to a shard that an engine can compile. Weights are memory-mapped, not read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cbor2
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.model.cut import cut
from swarm.model.grouping import weight_group, weights_of_manifest
from swarm.model.manifest import Manifest, TensorRef
from swarm.model.store import Store
from swarm.protocol.errors import ModelError
from swarm.protocol.tensors import Array


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of layers. OpenVINO does not hold on to `weights`: they must outlive what is compiled from `model`."""

    model: ov.Model
    weights: tuple[Array, ...] = ()
    group: int = 0
    """As `grouping.weight_group` of the whole model, so that all its shards compute alike; 0: that of `model`."""


def load_shard(manifest: Manifest, store: Store, start: int, end: int) -> Shard:
    """Layers ``[start, end)`` with their weights. Blocking, about half a second.

    Raises `StoreError` where a blob is missing and `UnsupportedModelError` where the graph cannot be cut there.
    """
    model = cut(_read_graph(store.read(manifest.graph.id)), start, end)
    tensors = {
        tensor.name: (store.path(blob.id), tensor) for blob in manifest.weights(start, end) for tensor in blob.tensors
    }
    weights: list[Array] = []
    for parameter in list(model.get_parameters()):
        name = parameter.get_friendly_name()
        if not name.startswith("weight."):
            continue
        if name not in tensors:
            raise ModelError("a graph that does not fit its manifest", expected=f"weights of {name}", found="none")
        path, tensor = tensors[name]
        data = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.bytes,))
        weights.append(data)
        constant = _constant(data, tensor)
        for target in list(parameter.output(0).get_target_inputs()):
            target.replace_source_output(constant.output(0))
        model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    return Shard(model, tuple(weights), weight_group(weights_of_manifest(manifest)))


def _read_graph(packed: bytes) -> ov.Model:
    try:
        xml, weights = cbor2.loads(packed)
        if not (isinstance(xml, bytes) and isinstance(weights, bytes)):
            raise ModelError("the model's graph cannot be read", expected="its XML and its small constants")
        return ov.Core().read_model(xml, weights)
    except (cbor2.CBORError, ValueError, TypeError, RuntimeError) as error:
        raise ModelError("the model's graph cannot be read", found=str(error).strip()[:200]) from None


def _constant(data: Array, tensor: TensorRef) -> ov.Node:
    kind = getattr(ov.Type, tensor.type, None)
    if not isinstance(kind, ov.Type):
        raise ModelError("unknown element type in a manifest", found=tensor.type[:40])
    expected = -(-math.prod(tensor.shape) * kind.bitwidth // 8)
    if expected != tensor.bytes:
        # OpenVINO would read on behind the mapped bytes.
        raise ModelError("a tensor of the wrong size", expected=f"{expected} bytes", found=f"{tensor.bytes} bytes")
    return ops.constant(ov.Tensor(data, ov.Shape(list(tensor.shape)), kind), shared_memory=True)
