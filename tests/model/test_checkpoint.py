"""A checkpoint is read by name and by rows, and only where it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from swarm.model.checkpoint import open_checkpoint
from swarm.protocol.errors import ModelError, UsageError
from swarm.protocol.tensors import Array
from tests.model.checkpoints import write_safetensors, write_sharded

MATRIX = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
VECTOR = np.arange(5, dtype=np.float16)


def upper_halves(values: Array) -> Array:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_rows_of_every_type(tmp_path: Path) -> None:
    brief = (MATRIX.view(np.uint32) & 0xFFFF0000).view(np.float32)
    tensors = {"a": MATRIX, "b": VECTOR, "c": upper_halves(MATRIX)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shape("a") == (6, 4)
    for first, end in ((0, 6), (2, 3), (4, 6)):
        np.testing.assert_array_equal(checkpoint.rows("a", first, end), MATRIX[first:end])
        np.testing.assert_array_equal(checkpoint.rows("c", first, end), brief[first:end])
    found = checkpoint.rows("b", 1, 5)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, VECTOR[1:5].astype(np.float32))


def test_only_the_files_of_the_tensors_asked_for(tmp_path: Path) -> None:
    """A node needs to have fetched only the files of its own layers."""
    write_sharded(tmp_path, {"one.safetensors": {"a": MATRIX}, "two.safetensors": {"b": VECTOR}})
    (tmp_path / "two.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.rows("a", 0, 6), MATRIX)
    with pytest.raises(ModelError, match="expected b; found no two"):
        checkpoint.shape("b")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
    write_sharded(tmp_path, {"one.safetensors": {"a": MATRIX}})
    for name in ("b", "", "../a"):
        with pytest.raises(ModelError, match="without a tensor"):
            open_checkpoint(tmp_path).shape(name)


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": np.ones((2, 2), np.int8)})
    with pytest.raises(ModelError, match="found I8"):
        open_checkpoint(tmp_path).rows("a", 0, 2)


def test_an_index_does_not_lead_out_of_the_directory(tmp_path: Path) -> None:
    for file in ("../model.safetensors", "/model.safetensors", "a/b", "", 7):
        index = json.dumps({"weight_map": {"a": file}})
        (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
        if file == "":
            with pytest.raises(ModelError, match="without a tensor"):
                open_checkpoint(tmp_path).shape("a")
        else:
            with pytest.raises(ModelError, match="outside the directory"):
                open_checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 7}', "{"])
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(ModelError, match="damaged"):
        open_checkpoint(tmp_path)


def test_a_cut_or_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": MATRIX})
    whole = path.read_bytes()
    beginning = len(whole) - MATRIX.nbytes
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="damaged"):
            open_checkpoint(tmp_path).rows("a", 0, 6)
    assert beginning > 8
    for header in (b"[]", b"{}x", b'{"a": 1}', b'{"a": {}}', b'{"a":{"dtype":"F32","shape":[6,4],"data_offsets":[]}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(96))
        with pytest.raises(ModelError, match="damaged"):
            open_checkpoint(tmp_path).rows("a", 0, 6)
    path.write_bytes((2**63).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ModelError, match="header of"):
        open_checkpoint(tmp_path).rows("a", 0, 6)
