"""The GGUF header: whole files are read, everything else ends in a `UsageError`."""

from __future__ import annotations

import contextlib
import io
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.model import gguf
from swarm.model.gguf import Header, check_convertible, parse_header, read_header
from swarm.protocol.errors import UsageError
from tests.model import gguf_files
from tests.model.gguf_files import F16, F32, Q5_0, Typed, tiny_llama, tiny_metadata

WHOLE = tiny_llama()
HEADER_BYTES = parse_header(io.BytesIO(WHOLE)).data_start
VECTOR = ("output_norm.weight", (32,), F32, bytes(128))


def parse(data: bytes) -> Header:
    return parse_header(io.BytesIO(data))


def refuse(data: bytes) -> str:
    with pytest.raises(UsageError) as caught:
        parse(data)
    assert caught.value.expected
    assert caught.value.action
    return str(caught.value)


def test_reads_a_whole_header() -> None:
    header = parse(WHOLE)
    assert (header.version, header.architecture, header.name) == (3, "llama", "Tiny")
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    embedding = header.tensors[0]
    assert (embedding.name, embedding.type, embedding.shape) == ("token_embd.weight", "F16", (256, 261))
    assert embedding.bytes == 256 * 261 * 2
    last = header.tensors[-1]
    assert header.data_start + last.offset + last.bytes == len(WHOLE)
    check_convertible(header, "tiny.gguf")


def test_every_scalar_type_is_read() -> None:
    values: dict[int, tuple[str, float]] = {
        0: ("B", 200),
        1: ("b", -3),
        2: ("H", 60_000),
        3: ("h", -300),
        4: ("I", 2**32 - 1),
        5: ("i", -(2**31)),
    }
    values |= {6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 0.1)}
    metadata = {f"k.{code}": Typed(code, struct.pack(f"<{f}", value)) for code, (f, value) in values.items()}
    header = parse(gguf_files.gguf(metadata, []))
    assert header.metadata == {f"k.{code}": value for code, (_, value) in values.items()}


@given(st.integers(0, len(WHOLE) - 1))
def test_a_cut_file_is_refused(length: int) -> None:
    refuse(WHOLE[:length])


@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_headers_end_in_a_header_or_a_usage_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, byte in changes:
        data[place] = byte
    with contextlib.suppress(UsageError):
        check_convertible(parse(bytes(data)), "damaged.gguf")


@given(st.binary(max_size=400), st.integers(0, 40), st.integers(0, 40))
def test_noise_behind_the_magic(noise: bytes, tensors: int, keys: int) -> None:
    with contextlib.suppress(UsageError):
        parse(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + noise)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut short"),
        (b"GGML" + WHOLE[4:], "not a GGUF file"),
        (gguf_files.gguf({}, [VECTOR], version=1), "unknown GGUF version"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "unknown GGUF version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "tensor count is out of range"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "metadata count is out of range"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "out of range"),
        (gguf_files.gguf({"k": Typed(8, struct.pack("<Q", 2**40))}, []), "out of range"),
        (gguf_files.gguf({"k": Typed(9, struct.pack("<IQ", 4, 2**60))}, []), "out of range"),
        (gguf_files.gguf({"k": Typed(9, struct.pack("<IQ", 12, 2**23))}, []), "cut short"),
        (gguf_files.gguf({"k": Typed(9, struct.pack("<IQ", 9, 1))}, []), "bad item type"),
        (gguf_files.gguf({"k": Typed(99, b"")}, []), "bad type of k"),
        (gguf_files.gguf({"a\nb": 1}, []), "unreadable"),
        (gguf_files.gguf({"general.alignment": 12}, []), "bad alignment"),
        (gguf_files.gguf({"general.alignment": 0}, []), "bad alignment"),
        (gguf_files.gguf({}, [VECTOR, VECTOR]), "occurs 2 times"),
        (gguf_files.gguf({}, [("t", (), F32, b"")]), "bad shape"),
        (gguf_files.gguf({}, [("t", (0,), F32, b"")]), "bad shape"),
        (gguf_files.gguf({}, [("t", (2**40, 2**40), F32, b"")]), "bad shape"),
        (gguf_files.gguf({}, [("t", (1, 1, 1, 1, 1), F32, bytes(4))]), "rank of t is out of range"),
        (gguf_files.gguf({}, [("t", (33,), Q5_0, bytes(22))]), "a multiple of 32 for Q5_0"),
        (gguf_files.gguf({}, [("t", (32,), 4, bytes(22))]), "unknown type of t"),
        (gguf_files.gguf({}, [("t", (64,), F32, bytes(128))]), "cut short"),
    ],
)
def test_each_kind_of_damage_is_named(data: bytes, words: str) -> None:
    assert words in refuse(data)


def test_offsets_keep_the_alignment() -> None:
    data = bytearray(gguf_files.gguf({}, [VECTOR]))
    rank_shape_type = 4 + 8 + 4
    data[data.index(b"output_norm.weight") + len("output_norm.weight") + rank_shape_type] = 1
    assert "bad offset" in refuse(bytes(data))


def test_read_header_names_the_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(WHOLE[:100])
    with pytest.raises(UsageError, match=r"^broken\.gguf: .*cut short"):
        read_header(broken)
    with pytest.raises(UsageError, match="cannot read the model file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(UsageError):
        read_header(tmp_path)


@pytest.mark.parametrize("code", [gguf_files.BF16, gguf_files.Q5_1, gguf_files.Q2_K, gguf_files.Q5_K, F32])
def test_tensor_types_that_the_converter_cannot_read(code: int) -> None:
    name = gguf.TENSOR_TYPES[code][0]
    with pytest.raises(UsageError, match=rf"unsupported tensor type; expected one of F16, .*; found {name} ") as caught:
        check_convertible(parse(tiny_llama(code)), "x.gguf")
    assert "llama-quantize --allow-requantize" in caught.value.action


@pytest.mark.parametrize("name", gguf.MATRIX_TYPES)
def test_tensor_types_that_it_can(name: str) -> None:
    code = next(code for code, kind in gguf.TENSOR_TYPES.items() if kind[0] == name)
    check_convertible(parse(tiny_llama(code)), "x.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"general.architecture": "gemma2"},
            "unsupported architecture; expected one of llama, qwen2, qwen3; found",
        ),
        ({"general.architecture": None}, "unsupported architecture"),
        ({"tokenizer.ggml.model": "llama"}, "unsupported tokenizer"),
        ({"tokenizer.ggml.model": None}, "unsupported tokenizer"),
        ({"split.count": 3}, "llama-gguf-split"),
        ({"llama.rope.scaling.type": "yarn"}, "unsupported position encoding"),
    ],
)
def test_models_that_the_converter_would_get_wrong(changes: dict[str, Any], words: str) -> None:
    metadata = {key: value for key, value in (tiny_metadata() | changes).items() if value is not None}
    with pytest.raises(UsageError, match=words):
        check_convertible(parse(gguf_files.gguf(metadata, [VECTOR])), "x.gguf")


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight"])
def test_tensors_that_the_converter_would_drop(name: str) -> None:
    tensors = [VECTOR, (name, (32,), F16, bytes(64))]
    with pytest.raises(UsageError, match=f"unsupported .*{name}"):
        check_convertible(parse(gguf_files.gguf(tiny_metadata(), tensors)), "x.gguf")


@pytest.mark.model
def test_the_embedded_default(smollm2_gguf: Path) -> None:
    header = read_header(smollm2_gguf)
    check_convertible(header, smollm2_gguf.name)
    assert header.architecture == "llama"
    assert {tensor.type for tensor in header.tensors} == {"F32", "Q4_1", "Q8_0"}
