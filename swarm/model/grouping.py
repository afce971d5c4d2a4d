"""In what groups a model's weights share a scale, which is how many activations are best quantized together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import openvino as ov

from swarm.model.manifest import Manifest

MIN_GROUP, MAX_GROUP = 32, 128
"""Of activations that are quantized together; the CPU plugin's kernels take 32, 64 and 128."""

Weight: TypeAlias = tuple[str, Sequence[int], int]
"""(element type, shape, bytes)"""


def weight_group(weights: Iterable[Weight]) -> int:
    """How many activations the CPU plugin should quantize together: as many as most 4-bit weights share a scale.

    With larger groups than the weights have, the plugin falls back to a kernel that takes 1.6 to 1.9 times as long
    (SmolLM2 and a 1.5B model from GGUFs, groups of 32); with smaller ones it rescales more often than it needs to.
    """
    sizes: Counter[int] = Counter()
    for kind, shape, size in weights:
        if kind in ("u4", "i4") and len(shape) == 3 and shape[2] > 1:
            sizes[shape[2]] += size
    group = sizes.most_common(1)[0][0] if sizes else MAX_GROUP
    return min(max(group, MIN_GROUP), MAX_GROUP)


def weights_of_manifest(manifest: Manifest) -> Iterator[Weight]:
    """All large weights of a model, those of layers that are not here too: every shard of it finds the same group."""
    for blob in manifest.blobs():
        for tensor in blob.tensors:
            yield tensor.type, tensor.shape, tensor.bytes


def weights_of_graph(model: ov.Model) -> Iterator[Weight]:
    for node in model.get_ops():
        if node.get_type_name() == "Constant":
            kind = node.get_output_element_type(0).get_type_name()
            yield kind, list(node.get_output_shape(0)), node.get_byte_size()
