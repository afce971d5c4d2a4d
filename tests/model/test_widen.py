"""Q5_0 weights of a GGUF file as Q8_0: the same values, everything else as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.model import widen
from swarm.model.convert import convert
from swarm.model.gguf import read_header
from swarm.protocol.tensors import Array
from tests.model.gguf_files import F16, Q5_0, gguf, tensor, tiny_llama, tiny_metadata


def values_q5_0(block: bytes) -> list[float]:
    """By the format's description, weight by weight."""
    scale = float(np.frombuffer(block[:2], "<f2")[0])
    high = int.from_bytes(block[2:6], "little")
    nibbles = [byte & 0xF for byte in block[6:]] + [byte >> 4 for byte in block[6:]]
    return [scale * ((low | (high >> j & 1) << 4) - 16) for j, low in enumerate(nibbles)]


def values_q8_0(block: bytes) -> list[float]:
    scale = float(np.frombuffer(block[:2], "<f2")[0])
    return [scale * value for value in np.frombuffer(block[2:], "i1").tolist()]


@given(st.lists(st.binary(min_size=20, max_size=20), min_size=1, max_size=5), st.floats(-8, 8, width=16))
def test_values_stay(blocks: list[bytes], scale: float) -> None:
    data = [np.float16(scale).tobytes() + block for block in blocks]
    wide: Array = widen.q8_0_of(np.frombuffer(b"".join(data), widen._Q5_0))
    assert [values_q8_0(block.tobytes()) for block in wide] == [values_q5_0(block) for block in data]


def test_a_file_keeps_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widen, "_CHUNK", 22 * 3)
    tensors = [tensor("a", (64, 5), Q5_0, 1), tensor("b", (7,), F16, 2), tensor("c", (32, 3), Q5_0, 3)]
    source, target = tmp_path / "narrow.gguf", tmp_path / "wide.gguf"
    source.write_bytes(gguf(tiny_metadata(), tensors))
    header = read_header(source)
    assert widen.has_narrow(header)
    widen.widen(source, header, target)
    wide = read_header(target)
    assert not widen.has_narrow(wide)
    assert wide.metadata == header.metadata
    assert [(t.name, t.shape, t.type) for t in wide.tensors] == [
        ("a", (64, 5), "Q8_0"),
        ("b", (7,), "F16"),
        ("c", (32, 3), "Q8_0"),
    ]
    data = target.read_bytes()
    for found, (_, _, code, payload) in zip(wide.tensors, tensors, strict=True):
        stored = data[wide.data_start + found.offset :][: found.bytes]
        if code != Q5_0:
            assert stored == payload
            continue
        blocks = [values_q8_0(stored[i : i + 34]) for i in range(0, len(stored), 34)]
        assert blocks == [values_q5_0(payload[i : i + 22]) for i in range(0, len(payload), 22)]


@pytest.mark.parametrize("file_type", [8, 15])
def test_such_a_model_is_converted_as_its_q8_0_twin(file_type: int, tmp_path: Path) -> None:
    """Mostly Q5_0, or Q4_K_M of which Q5_0 is a part."""
    file = tiny_llama(Q5_0, **{"general.file_type": file_type})
    (tmp_path / "narrow.gguf").write_bytes(file)
    header = read_header(tmp_path / "narrow.gguf")
    widen.widen(tmp_path / "narrow.gguf", header, tmp_path / "wide.gguf")
    assert {t.type for t in read_header(tmp_path / "wide.gguf").tensors} <= {"Q8_0", "F32", "F16"}
    convert(tmp_path / "narrow.gguf", tmp_path / "one")
    convert(tmp_path / "wide.gguf", tmp_path / "other")
    one, other = (tmp_path / name / "openvino_model.bin" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()
    assert not list((tmp_path / "one").glob("*.gguf"))
