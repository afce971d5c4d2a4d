"""Q5_0 weights of a GGUF file as Q8_0, which the converter reads: the same values, exactly.

A Q5_0 weight is ``d * (q - 16)`` with 5 bits of q, a Q8_0 one ``d * q`` with 8 bits: the scale stays, the integers
get wider. llama.cpp's "K" files of models whose rows do not divide by 256 are full of Q5_0.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from swarm.model.gguf import TENSOR_TYPES, Header, Tensor
from swarm.protocol.tensors import Array

NARROW, WIDE = "Q5_0", "Q8_0"

_CODES = {name: code for code, (name, _, _) in TENSOR_TYPES.items()}
_Q5_0 = np.dtype([("scale", "<u2"), ("high", "<u4"), ("low", "u1", 16)])
_Q8_0 = np.dtype([("scale", "<u2"), ("values", "i1", 32)])
_FILE_TYPE = struct.pack("<Q17sI", 17, b"general.file_type", 4)
_MOSTLY_NARROW, _MOSTLY_WIDE = (_FILE_TYPE + struct.pack("<I", code) for code in (8, 7))
"""The converter goes by what a file says that it mostly is."""

_CHUNK = 22 * 2**18  # bytes in memory at once: whole blocks


def has_narrow(header: Header) -> bool:
    """Whether the file has weights that `widen` changes."""
    return any(tensor.type == NARROW for tensor in header.tensors)


def widen(source: Path, header: Header, target: Path) -> None:
    """Write `target`, the GGUF file `source` with its Q5_0 tensors as Q8_0. All else is copied byte by byte."""
    alignment = int(header.metadata.get("general.alignment", 32))
    with source.open("rb") as old, target.open("wb") as new:
        new.write(old.read(header.tensors_start).replace(_MOSTLY_NARROW, _MOSTLY_WIDE))
        offset = 0
        for tensor in header.tensors:
            new.write(_description(tensor, offset))
            offset += -(-_wide_bytes(tensor) // alignment) * alignment
        for tensor in header.tensors:
            new.write(bytes(-new.tell() % alignment))
            old.seek(header.data_start + tensor.offset)
            _copy(old, tensor, new)


def q8_0_of(blocks: Array) -> Array:
    """Q5_0 blocks ``[n]`` as Q8_0 blocks ``[n]`` of the same values."""
    low = blocks["low"]
    quants = np.concatenate([low & 0xF, low >> 4], axis=1)
    high = (blocks["high"][:, None] >> np.arange(32, dtype=np.uint32)) & 1
    wide = np.empty(len(blocks), _Q8_0)
    wide["scale"] = blocks["scale"]
    wide["values"] = (quants | high.astype(np.uint8) << 4).astype(np.int8) - 16
    return wide


def _wide_bytes(tensor: Tensor) -> int:
    return tensor.bytes // _Q5_0.itemsize * _Q8_0.itemsize if tensor.type == NARROW else tensor.bytes


def _description(tensor: Tensor, offset: int) -> bytes:
    name = tensor.name.encode("utf-8")
    code = _CODES[WIDE if tensor.type == NARROW else tensor.type]
    rank = len(tensor.shape)
    return struct.pack(f"<Q{len(name)}sI{rank}QIQ", len(name), name, rank, *tensor.shape, code, offset)


def _copy(old: BinaryIO, tensor: Tensor, new: BinaryIO) -> None:
    left = tensor.bytes
    while left:
        data = old.read(min(left, _CHUNK))
        new.write(q8_0_of(np.frombuffer(data, _Q5_0)).tobytes() if tensor.type == NARROW else data)
        left -= len(data)
