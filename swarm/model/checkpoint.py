"""A Hugging Face checkpoint read by name and by rows: whatever is not asked for is neither read nor mapped.

One ``model.safetensors``, or several files with ``model.safetensors.index.json``. A file is opened only for a tensor
that is in it, so those of other layers need not be here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarm.model.manifest import EMBEDDING
from swarm.protocol.errors import ModelError, UsageError
from swarm.protocol.tensors import Array

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    """In the file, bytes."""


@dataclass(slots=True)
class Checkpoint:
    """The tensors of a checkpoint; made by `open_checkpoint`."""

    directory: Path
    files: Mapping[str, str] | None
    """From a tensor's name to its file; None where there is only one."""
    _places: dict[Path, dict[str, _Place]] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises `ModelError` where the checkpoint has no such tensor, or its file is not here."""
        return self._find(name).shape

    def rows(self, name: str, first: int, end: int) -> Array:
        """Rows ``[first, end)`` of a tensor in f32, its first axis cut; 16-bit numbers are widened without loss."""
        place = self._find(name)
        row = math.prod(place.shape[1:])
        kind = _TYPES[place.type]
        count = (end - first) * row
        with place.file.open("rb") as file:
            file.seek(place.offset + first * row * kind.itemsize)
            values: Array = np.fromfile(file, kind, count)
        if values.size != count:
            raise _damaged(place.file, f"the end inside {name}")
        if place.type == "BF16":
            values = (values.astype("<u4") << 16).view("<f4")
        return values.astype(np.float32, copy=False).reshape(end - first, *place.shape[1:])

    def _find(self, name: str) -> _Place:
        file = self.directory / (SINGLE if self.files is None else self.files.get(name, ""))
        if not file.is_file():
            raise ModelError(
                "a checkpoint without a tensor that the layers need",
                expected=name,
                found=f"no {file.name}" if file != self.directory else "not in its index",
            )
        places = self._places.get(file)
        if places is None:
            places = self._places[file] = _read_header(file)
        if name not in places:
            raise ModelError("a checkpoint without a tensor that the layers need", expected=name, found=file.name)
        place = places[name]
        if place.type not in _TYPES:
            raise ModelError("a tensor of a type that is not read", expected=", ".join(_TYPES), found=place.type[:20])
        return place


def open_checkpoint(directory: Path) -> Checkpoint:
    """Reads the index, no tensor. Raises `UsageError` where `directory` holds no checkpoint in safetensors."""
    if (directory / INDEX).is_file():
        try:
            files = dict(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(directory / INDEX, f"{type(error).__name__}: {error}"[:200]) from None
        # A file's name comes from the checkpoint: it must not lead out of the directory.
        if not all(isinstance(name, str) and Path(name).name == name for name in files.values()):
            raise _damaged(directory / INDEX, "a file outside the directory")
        return Checkpoint(directory, files)
    if (directory / SINGLE).is_file():
        return Checkpoint(directory, None)
    raise UsageError(
        f"{directory} holds no checkpoint",
        expected=f"{SINGLE}, or {INDEX} with its files",
        action="Give a directory with config.json and safetensors.",
    )


def is_weights(file: str) -> bool:
    return file.endswith(".safetensors")


def part_of(tensor: str, layers: int) -> int:
    """Which part of a model of so many layers a tensor belongs to; see `manifest.EMBEDDING`."""
    match = _LAYER.search(tensor)
    if match is not None:
        return int(match.group(1))
    return EMBEDDING if "embed_tokens" in tensor else layers


def in_range(tensor: str, start: int, end: int, layers: int) -> bool:
    """Whether a tensor is exported with the layers ``[start, end)``; see `Manifest.part`."""
    return start <= max(0, min(part_of(tensor, layers), layers - 1)) < end


def files_of(directory: Path, start: int, end: int, layers: int) -> frozenset[str] | None:
    """The files with the tensors of a range, told by the index; None where there is none: a single file has all."""
    if not (directory / INDEX).is_file():
        return None
    files = open_checkpoint(directory).files or {}
    return frozenset(file for tensor, file in files.items() if in_range(tensor, start, end, layers))


def header_bytes(file: Path, beginning: bytes) -> int:
    """The size of a file's header, of its first 8 bytes. Raises `ModelError`."""
    size = int.from_bytes(beginning, "little")
    if size > _MAX_HEADER_BYTES:
        raise _damaged(file, f"a header of {size} bytes")
    return size


def _read_header(file: Path) -> dict[str, _Place]:
    with file.open("rb") as opened:
        size = header_bytes(file, opened.read(8))
        data = opened.read(size)
    try:
        header: dict[str, Any] = json.loads(data)
        return {
            name: _Place(
                file, str(entry["dtype"]), tuple(map(int, entry["shape"])), 8 + size + int(entry["data_offsets"][0])
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}"[:200]) from None


def _damaged(file: Path, found: str) -> ModelError:
    return ModelError(f"{file.name} is damaged", expected="safetensors", found=found, action="Fetch it again.")
