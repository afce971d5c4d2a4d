"""Checkpoints written by hand, to the format's description and not by its library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from swarm.protocol.tensors import Array

NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int8": "I8"}
"""A BF16 tensor is given as the upper halves of its f32 numbers."""


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, values in tensors.items():
        span = [offset, offset + values.nbytes]
        header[name] = {"dtype": NAMES[values.dtype.name], "shape": values.shape, "data_offsets": span}  # type: ignore[dict-item]
        offset += values.nbytes
    packed = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(values).tobytes() for values in tensors.values())
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + data)


def write_sharded(directory: Path, shards: Mapping[str, Mapping[str, Array]]) -> None:
    for file, tensors in shards.items():
        write_safetensors(directory / file, tensors)
    names = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
