"""Draft pairs: which small model goes with a target, and whether two tokenizers are the same, token for token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from swarm.model.drafts import PAIRS, PROBES, DraftPair, draft_for, same_tokenizer
from swarm.model.sources import resolve
from swarm.model.tokenizer import Tokenizer

SPECIAL = frozenset({300, 301})


class Bytes:
    """A tokenizer that knows bytes, one merge and two special tokens; parts of it can differ."""

    def __init__(
        self, changes: Mapping[int, bytes | None] | None = None, special: frozenset[int] = SPECIAL, merge: bool = True
    ) -> None:
        whole = {byte: bytes([byte]) for byte in range(256)} | {256: b"th", 300: b"<s>", 301: b"</s>"}
        changed: dict[int, bytes | None] = {**whole, **(changes or {})}
        self._tokens = {token: text for token, text in changed.items() if text is not None}
        self._special = special
        self._merge = merge
        self.stop_tokens = frozenset({301})

    def tokens(self) -> dict[int, bytes]:
        return self._tokens

    def encode(self, text: str) -> list[int]:
        data = text.encode("utf-8", "replace")
        return [*data] if not self._merge else [*re.sub(b"th", b"\0", data)] + [256] * data.count(b"th")

    def is_hidden(self, token: int) -> bool:
        return token in self._special


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Bytes(), None),
        (Bytes({302: b"[PAD302]", 999: b"[PAD999]"}), None),
        (Bytes({256: b"he"}), "token 256 is 'th' here and 'he' there"),
        (Bytes({301: None}), "token 301 is '</s>' here and missing there"),
        (Bytes({302: b"new"}), "token 302 is missing here and 'new' there"),
        (Bytes({302: b"[PAD303]"}), "token 302 is missing here and '[PAD303]' there"),
        (Bytes({7: b"\xff"}), r"token 7 is '\x07' here and '\\xff' there"),
        (Bytes(special=frozenset({301})), "token 300, '<s>', is special here and plain text there"),
        (Bytes(merge=False), r"token \d+ of 'The quick brown fox jumps over' is '.*' here and '.*' there"),
    ],
)
def test_the_first_difference_is_named(other: Bytes, difference: str | None) -> None:
    found = same_tokenizer(Bytes(), other)
    if difference is None or found is None:
        assert found == difference
    else:
        assert found == difference or re.fullmatch(difference, found)
    assert (same_tokenizer(other, Bytes()) is None) == (difference is None)


def test_one_answer_that_is_the_beginning_of_the_other() -> None:
    class Short(Bytes):
        def encode(self, text: str) -> list[int]:
            return super().encode(text)[:2]

    assert (
        same_tokenizer(Bytes(), Short()) == "token 2 of 'The quick brown fox jumps over' is 'e' here and nothing there"
    )


def test_the_probes_are_different() -> None:
    assert len(set(PROBES)) == len(PROBES)
    assert any("\ufeff" in text for text in PROBES)
    assert any(ord(character) > 0xFFFF for text in PROBES for character in text)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen2.5-Coder-7B-Instruct", "OpenVINO/Qwen2.5-Coder-0.5B-Instruct-int4-ov"),
        ("Qwen2.5 Coder 1.5B Instruct", "OpenVINO/Qwen2.5-Coder-0.5B-Instruct-int4-ov"),
        ("qwen2.5-14b-instruct-q4_k_m", "Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q8_0.gguf"),
        ("Qwen3-8B-int4-ov", "OpenVINO/Qwen3-0.6B-int4-ov"),
        ("Meta-Llama-3.1-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("Llama-2-13b-chat-hf", "OpenVINO/TinyLlama-1.1B-Chat-v1.0-int4-ov"),
        ("SmolLM2-1.7B-Instruct", "default"),
        ("gemma-2-27b-it", "google/gemma-2-2b-it"),
        ("gemma-3-12b-it", "google/gemma-3-1b-it"),
    ],
)
def test_pairs(target: str, draft: str) -> None:
    pair = draft_for(target)
    assert pair is not None
    assert pair.draft == draft


@pytest.mark.parametrize(
    "name",
    ["Meta-Llama-3-8B", "Phi-3-mini-4k-instruct", "Mistral-7B", "GPT-2", "", "Qwen2-7B"]
    + [pair.draft.rpartition("/")[2] for pair in PAIRS],
)
def test_no_pair(name: str) -> None:
    assert draft_for(name) is None


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.family)
def test_a_draft_is_something_that_a_node_can_get(pair: DraftPair) -> None:
    assert resolve(pair.draft).kind in ("hub", "default")


@pytest.mark.model
def test_a_real_tokenizer_is_the_same_as_itself(smollm2_ir: Path) -> None:
    assert same_tokenizer(Tokenizer.load(smollm2_ir), Tokenizer.load(smollm2_ir)) is None


@pytest.mark.large
def test_real_tokenizers_that_differ(smollm2_ir: Path, qwen_ir: Path) -> None:
    smol, qwen = Tokenizer.load(smollm2_ir), Tokenizer.load(qwen_ir)
    assert same_tokenizer(smol, qwen) == "token 0 is '<|endoftext|>' here and '!' there"
    assert same_tokenizer(qwen, smol) == "token 0 is '!' here and '<|endoftext|>' there"
    assert same_tokenizer(qwen, qwen) is None
    assert len(qwen.tokens()) == qwen.vocabulary_size
