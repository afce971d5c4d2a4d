"""Reads the header of a GGUF file: metadata and tensor descriptions, never weights. Strict and bounded.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What the converter (openvino_genai) can turn into
an IR was tried type by type and architecture by architecture with openvino_genai 2026.4; see `docs/models.md`.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from swarm.protocol.errors import UsageError

MAX_METADATA = 4096
"""Keys; the longest honest header has about 60."""

MAX_TENSORS = 65_536
"""Tensors; a model of 1,024 layers has about 12,000."""

MAX_STRING_BYTES = 16 * 1024 * 1024
"""One string; chat templates are the longest and stay under 100 KB."""

MAX_ARRAY_ITEMS = 16 * 1024 * 1024
"""One array; vocabularies and merges stay under a million."""

MAX_NAME_BYTES = 65_535
"""A key or a tensor's name (the format's own bound for keys)."""

MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**40

Value: TypeAlias = int | float | bool | str

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Type code to name, weights in a block, bytes of a block."""

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""What the converter builds a graph for."""

MATRIX_TYPES = ("F16", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q6_K", "Q8_0")
"""What it reads for matrices, Q5_0 after `widen`; norms and biases may be F32 too."""

_KNOWN_TENSOR = re.compile(
    r"token_embd\.weight|output_norm\.weight|output\.(weight|bias)"
    r"|blk\.\d+\.(attn_norm|ffn_norm|attn_q_norm|attn_k_norm)\.weight"
    r"|blk\.\d+\.(attn_q|attn_k|attn_v|attn_output|ffn_gate|ffn_up|ffn_down)\.(weight|bias)"
)
_OTHER_WAY = "Take another quantization of the model, or an OpenVINO IR directory of it."
_OTHER_TYPE = (
    "Take the model's Q4_K_M, Q4_0 or Q8_0 file, or make one with llama.cpp: "
    "llama-quantize --allow-requantize THIS.gguf NEW.gguf Q8_0"
)


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    type: str
    shape: tuple[int, ...]
    """Innermost axis first, as GGUF has it."""
    offset: int
    """From the start of the data section."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    metadata: dict[str, Value]
    """Scalars and strings; arrays are skipped."""
    tensors: tuple[Tensor, ...]
    tensors_start: int
    """Of the tensors' descriptions, from the start of the file."""
    data_start: int
    """Of the data section, from the start of the file."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def name(self) -> str:
        return str(self.metadata.get("general.name", ""))


def read_header(path: Path) -> Header:
    """The checked header of the file at `path`. Raises `UsageError` where it is not a whole GGUF file."""
    try:
        with path.open("rb") as file:
            return parse_header(file)
    except OSError as error:
        raise UsageError(
            "cannot read the model file", expected=f"a GGUF file at {path}", found=error.strerror or str(error)
        ) from None
    except UsageError as error:
        error.problem = f"{path.name}: {error.problem}"
        raise


def parse_header(file: BinaryIO) -> Header:
    """As `read_header`, for an open seekable file at its start."""
    reader = _Reader(file)
    if (magic := reader.take(4, "the magic")) != b"GGUF":
        raise _broken("not a GGUF file", "the letters GGUF at its start", repr(magic))
    version = reader.number("I", "the version")
    if version not in (2, 3):
        raise _broken("unknown GGUF version", "2 or 3", str(version))
    tensor_count = reader.count("Q", "the tensor count", MAX_TENSORS)
    metadata_count = reader.count("Q", "the metadata count", MAX_METADATA)
    metadata = _read_metadata(reader, metadata_count)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65_536 or alignment % 8:
        raise _broken("bad alignment", "a multiple of 8 up to 65536", repr(alignment))
    tensors_start = reader.position
    tensors = tuple(_read_tensor(reader, alignment) for _ in range(tensor_count))
    _refuse_twins([tensor.name for tensor in tensors], "tensor")
    data_start = -(-reader.position // alignment) * alignment
    needed = data_start + max((tensor.offset + tensor.bytes for tensor in tensors), default=0)
    if reader.size < needed:
        raise _broken("the file is cut short", f"at least {needed} bytes", f"{reader.size} bytes")
    return Header(version, metadata, tensors, tensors_start, data_start)


def check_convertible(header: Header, label: str) -> None:
    """Raises `UsageError` where the converter would refuse the file, or silently build another model from it."""
    if header.architecture not in ARCHITECTURES:
        found = header.architecture or "none"
        raise _unsupported(label, "architecture", f"one of {', '.join(ARCHITECTURES)}", found)
    if (tokenizer := header.metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise _unsupported(label, "tokenizer", "a byte-level BPE tokenizer (gpt2)", str(tokenizer or "none")[:80])
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise UsageError(
            f"{label} is one part of a split model",
            expected="a single file",
            found=f"{header.metadata['split.count']} parts",
            action="Join them first: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf",
        )
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(tensor.name == "rope_freqs.weight" for tensor in header.tensors):
        found = str(scaling) if scaling != "none" else "rope_freqs.weight"
        raise _unsupported(label, "position encoding", "plain rotary positions; the converter drops scaled ones", found)
    for tensor in header.tensors:
        if _KNOWN_TENSOR.fullmatch(tensor.name) is None:
            raise _unsupported(label, "tensor", "those of a plain decoder", tensor.name[:80])
        if tensor.type not in MATRIX_TYPES and not (tensor.type == "F32" and len(tensor.shape) == 1):
            expected, found = f"one of {', '.join(MATRIX_TYPES)}", f"{tensor.type} ({tensor.name})"
            raise _unsupported(label, "tensor type", expected, found, _OTHER_TYPE)


def quantization(header: Header) -> str:
    """The type that most bytes of the weights have."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        sizes[tensor.type] += tensor.bytes
    return sizes.most_common(1)[0][0] if sizes else ""


class _Reader:
    """Takes bytes in order and never past the end of the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, io.SEEK_END)
        self.position = file.seek(0)

    def take(self, length: int, what: str) -> bytes:
        data = self._file.read(length)
        self.position += len(data)
        if len(data) < length:
            raise self._short(what)
        return data

    def skip(self, length: int, what: str) -> None:
        if length > self.size - self.position:
            raise self._short(what)
        self.position = self._file.seek(length, io.SEEK_CUR)

    def number(self, code: str, what: str) -> int:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))
        return int(value)

    def count(self, code: str, what: str, limit: int) -> int:
        value = self.number(code, what)
        if value > limit:
            raise _broken(f"{what} is out of range", f"at most {limit}", str(value))
        return value

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        data = self.take(self.count("Q", f"the length of {what}", limit), what)
        return data.decode("utf-8", "replace")

    def name(self, what: str) -> str:
        text = self.string(what, MAX_NAME_BYTES)
        if not text or "\ufffd" in text or not text.isprintable():
            raise _broken(f"{what} is unreadable", "printable text", repr(text)[:80])
        return text

    def _short(self, what: str) -> UsageError:
        return _broken("the file is cut short", f"{what} at byte {self.position}", f"{self.size} bytes in all")


def _read_metadata(reader: _Reader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    keys = []
    for _ in range(count):
        key = reader.name("a metadata key")
        keys.append(key)
        code = reader.number("I", f"the type of {key}")
        if code == _ARRAY:
            _skip_array(reader, key)
        elif code == _STRING:
            metadata[key] = reader.string(key)
        elif code in _SCALARS:
            layout = f"<{_SCALARS[code]}"
            (metadata[key],) = struct.unpack(layout, reader.take(struct.calcsize(layout), key))
        else:
            raise _broken(f"bad type of {key}", "a code of 0 to 12", str(code))
    _refuse_twins(keys, "metadata key")
    return metadata


def _skip_array(reader: _Reader, key: str) -> None:
    code = reader.number("I", f"the item type of {key}")
    count = reader.count("Q", f"the length of {key}", MAX_ARRAY_ITEMS)
    if code in _SCALARS:
        reader.skip(count * struct.calcsize(f"<{_SCALARS[code]}"), key)
    elif code == _STRING:
        for _ in range(count):
            reader.skip(reader.count("Q", f"a length in {key}", MAX_STRING_BYTES), key)
    else:
        raise _broken(f"bad item type of {key}", "numbers or strings", str(code))


def _read_tensor(reader: _Reader, alignment: int) -> Tensor:
    name = reader.name("a tensor's name")
    rank = reader.count("I", f"the rank of {name}", MAX_DIMENSIONS)
    shape = tuple(reader.number("Q", f"the shape of {name}") for _ in range(rank))
    elements = math.prod(shape)
    if not shape or not 0 < elements <= MAX_ELEMENTS:
        raise _broken(f"bad shape of {name}", f"1 to {MAX_ELEMENTS} elements", str(shape))
    code = reader.number("I", f"the type of {name}")
    offset = reader.number("Q", f"the offset of {name}")
    if code not in TENSOR_TYPES:
        raise _broken(f"unknown type of {name}", f"a code of {sorted(TENSOR_TYPES)}", str(code))
    kind, weights, size = TENSOR_TYPES[code]
    if shape[0] % weights:
        raise _broken(f"bad shape of {name}", f"rows of a multiple of {weights} for {kind}", str(shape))
    if offset % alignment:
        raise _broken(f"bad offset of {name}", f"a multiple of {alignment}", str(offset))
    return Tensor(name, kind, shape, offset, elements // weights * size)


def _refuse_twins(names: list[str], what: str) -> None:
    (name, times), *_ = Counter(names).most_common(1) or [("", 0)]
    if times > 1:
        raise _broken(f"a {what} occurs {times} times", "once", name[:80])


def _broken(problem: str, expected: str, found: str) -> UsageError:
    return UsageError(problem, expected=expected, found=found, action="Fetch the file again: it is damaged.")


def _unsupported(label: str, what: str, expected: str, found: str, action: str = _OTHER_WAY) -> UsageError:
    return UsageError(f"{label}: unsupported {what}", expected=expected, found=found, action=action)
