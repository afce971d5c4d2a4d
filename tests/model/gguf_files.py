"""Writes small GGUF files for tests: a whole Llama with a byte-level tokenizer in a few hundred kilobytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, BF16 = 0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30
BLOCKS = {F32: (1, 4), F16: (1, 2), BF16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24)}
BLOCKS |= {Q8_0: (32, 34), Q2_K: (256, 84), Q3_K: (256, 110), Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210)}
FILE_TYPES = {F32: 0, F16: 1, Q4_0: 2, Q4_1: 3, Q8_0: 7, Q4_K: 15, Q6_K: 18}

HIDDEN, HEADS, FEED_FORWARD, LAYERS = 256, 4, 256, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value with its GGUF type code where Python's type does not say it."""

    code: int
    value: bytes


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Type code and value. Lists are arrays of strings, of 32-bit integers or of floats."""
    if isinstance(item, Typed):
        return struct.pack("<I", item.code) + item.value
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(string(text) for text in item)
    return struct.pack("<IIQ", 9, 5, len(item)) + struct.pack(f"<{len(item)}i", *item)


def gguf(
    metadata: dict[str, Any],
    tensors: Sequence[tuple[str, Sequence[int], int, bytes]],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    """A whole file; `tensors` are (name, dimensions innermost first, type code, bytes)."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    offset, data = 0, b""
    for name, dimensions, code, payload in tensors:
        head += string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", code, offset)
        data += payload + bytes(-len(payload) % 32)
        offset = len(data)
    return head + bytes(-len(head) % 32) + data


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def tiny_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    symbols = byte_symbols()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *symbols, "th", "the"]
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": "Tiny",
        "general.file_type": 1,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": FEED_FORWARD,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    metadata.update(changes)
    return {key: item for key, item in metadata.items() if item is not None}


def tensor(name: str, dimensions: Sequence[int], code: int, seed: int) -> tuple[str, Sequence[int], int, bytes]:
    count = int(np.prod(dimensions))
    random = np.random.default_rng(seed)
    if code == F32:
        return name, dimensions, code, random.normal(0, 0.05, count).astype("<f4").tobytes()
    if code == F16:
        return name, dimensions, code, random.normal(0, 0.05, count).astype("<f2").tobytes()
    weights, size = BLOCKS[code]
    # Any bytes below 0x3c are weights and scales of a sane size in every block layout.
    return name, dimensions, code, random.integers(0, 0x2C, count // weights * size, dtype=np.uint8).tobytes()


def tiny_llama(code: int = F16, architecture: str = "llama", **changes: Any) -> bytes:
    """A Llama of two layers that converts and runs; `code` is the type of its matrices."""
    file_type = FILE_TYPES.get(code, 1)
    metadata = tiny_metadata(architecture, **({"general.file_type": file_type} | changes))
    vocabulary = len(metadata.get("tokenizer.ggml.tokens", ())) or 261
    shapes: list[tuple[str, Sequence[int], int]] = [("token_embd.weight", (HIDDEN, vocabulary), code)]
    for i in range(LAYERS):
        shapes.append((f"blk.{i}.attn_norm.weight", (HIDDEN,), F32))
        shapes.append((f"blk.{i}.ffn_norm.weight", (HIDDEN,), F32))
        shapes.extend((f"blk.{i}.attn_{part}.weight", (HIDDEN, HIDDEN), code) for part in ("q", "k", "v", "output"))
        shapes.extend((f"blk.{i}.ffn_{part}.weight", (HIDDEN, FEED_FORWARD), code) for part in ("gate", "up", "down"))
    shapes.append(("output_norm.weight", (HIDDEN,), F32))
    return gguf(metadata, [tensor(name, dims, kind, seed) for seed, (name, dims, kind) in enumerate(shapes)])
