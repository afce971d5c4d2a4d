"""Draft models: which small model goes with a target, and whether the two have the same tokenizer, token for token.

A draft proposes token ids, which the target verifies (Leviathan et al., 2023, "Fast inference from transformers via
speculative decoding"): an id has to mean the same text to both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol


class Tokens(Protocol):
    """What is compared of a `tokenizer.Tokenizer`."""

    @property
    def stop_tokens(self) -> Set[int]: ...

    def tokens(self) -> Mapping[int, bytes]: ...

    def encode(self, text: str) -> Sequence[int]: ...

    def is_hidden(self, token: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class DraftPair:
    """A family of targets and the small model that goes with it."""

    family: str
    """For people."""
    target: str
    """A regular expression that a target's name matches, whatever stands before and after it."""
    draft: str
    """As ``--model`` takes it."""

    def fits(self, name: str) -> bool:
        """Whether `name` is a target of this family; the draft itself is none."""
        return re.search(self.target, _plain(name)) is not None


PAIRS = (
    DraftPair("Qwen2.5-Coder", r"qwen2\.5-coder-(1\.5|3|7|14|32)b", "OpenVINO/Qwen2.5-Coder-0.5B-Instruct-int4-ov"),
    DraftPair(
        "Qwen2.5",
        r"qwen2\.5-(1\.5|3|7|14|32|72)b",
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q8_0.gguf",
    ),
    DraftPair("Qwen3", r"qwen3-(1\.7|4|8|14|32)b", "OpenVINO/Qwen3-0.6B-int4-ov"),
    DraftPair("Llama 3.1 to 3.3", r"llama-3\.[123]-(3|8|70)b", "meta-llama/Llama-3.2-1B-Instruct"),
    DraftPair("Llama 2", r"llama-2-(7|13|70)b", "OpenVINO/TinyLlama-1.1B-Chat-v1.0-int4-ov"),
    DraftPair("SmolLM2", r"smollm2-(360m|1\.7b)", "default"),
    DraftPair("Gemma 2", r"gemma-2-(9|27)b", "google/gemma-2-2b-it"),
    DraftPair("Gemma 3", r"gemma-3-(4|12|27)b", "google/gemma-3-1b-it"),
)
"""By the same people with the same vocabulary, but for TinyLlama, which took Llama 2's; ready IRs or GGUF files where
there are any, so that no PC has to export one. The first that fits counts; `same_tokenizer` has the last word."""

PROBES = (
    "The quick brown fox jumps over the lazy dog, isn't it? They've said: 3.14159 * 2 = 6.28318!",
    "def f(x):\n\tif x > 0:\n\t    return {'a': [1, 22, 333, 4444], \"b\": None}  # 100%\n\n\n",
    "Größe, façade, naïve, coöperate; Straße — “quoted”… €5 £7 ¥9",
    "Съешь же ещё этих мягких французских булок",
    "我能吞下玻璃而不伤身体。日本語のテキスト、한국어 텍스트",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff \x00\x1f\r\n  \t ",
    "https://example.org/a?b=c&d=e#f user@example.org C:\\dir\\file.txt",
    "<|im_start|>user\n<|im_end|><|endoftext|><s></s><bos><eos><|eot_id|><start_of_turn>",
    " leading   spaces     and trailing   ",
)
"""Texts that split differently where normalization, pre-tokenization, merges or special tokens differ."""


_FIRST, _LAST = 512, 2048
"""Of a vocabulary, where special tokens are looked for."""


def draft_for(name: str) -> DraftPair | None:
    """The pair for a target of this name; None where no small model of its kind is known."""
    return next((pair for pair in PAIRS if pair.fits(name)), None)


def same_tokenizer(a: Tokens, b: Tokens) -> str | None:
    """None where both mean the same by every id and split every probe alike; else the first difference, for people.

    Compares the vocabularies id by id, which ids are special, and the ids of `PROBES`. A second for 150,000 tokens.
    Padding at the end of a vocabulary, which only rounds its size up, counts as absent.
    """
    one, other = _meant(a.tokens()), _meant(b.tokens())
    for token in sorted(one.keys() | other.keys()):
        if one.get(token) != other.get(token):
            return f"token {token} is {_shown(one.get(token))} here and {_shown(other.get(token))} there"
    return _specials(a, b, one) or _splits(a, b, one)


def _meant(tokens: Mapping[int, bytes]) -> dict[int, bytes]:
    """Without padding: GGUF files name it ``[PAD151935]``."""
    return {token: text for token, text in tokens.items() if text != f"[PAD{token}]".encode()}


def _specials(a: Tokens, b: Tokens, tokens: Mapping[int, bytes]) -> str | None:
    """Special tokens lie at the ends of a vocabulary, or are named as what ends an answer."""
    order = sorted(tokens)
    for token in sorted({*order[:_FIRST], *order[-_LAST:], *(tokens.keys() & (a.stop_tokens | b.stop_tokens))}):
        if a.is_hidden(token) != b.is_hidden(token):
            here, there = ("special" if either.is_hidden(token) else "plain text" for either in (a, b))
            return f"token {token}, {_shown(tokens[token])}, is {here} here and {there} there"
    return None


def _splits(a: Tokens, b: Tokens, tokens: Mapping[int, bytes]) -> str | None:
    for text in PROBES:
        one, other = (list(either.encode(text)) for either in (a, b))
        if one != other:
            place = next(i for i in range(len(one) + len(other)) if one[i : i + 1] != other[i : i + 1])
            here, there = (_shown(tokens.get(ids[place])) if place < len(ids) else "nothing" for ids in (one, other))
            return f"token {place} of {text[:30]!r} is {here} here and {there} there"
    return None


def _shown(token: bytes | None) -> str:
    return "missing" if token is None else repr(token.decode("utf-8", "backslashreplace"))[:60]


def _plain(name: str) -> str:
    """Names as GGUF files, repositories and people write them."""
    return re.sub(r"[\s_]+", "-", name.casefold())
