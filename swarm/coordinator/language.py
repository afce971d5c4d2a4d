"""What the coordinator needs of a model: its tokenizer, its context, and which manifest they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.protocol.ids import BlobId


class TextPieces(Protocol):
    """As `model.tokenizer.TextStream`: tokens to text as they come; a character of several tokens never shows half."""

    def push(self, token: int, /) -> str:
        """The text that is certain after `token`."""

    def flush(self) -> str:
        """What was held back, at the end."""


class TextCodec(Protocol):
    """Of `model.tokenizer.Tokenizer`, what is used here. `render_chat` and `encode` run in a worker thread."""

    stop_tokens: frozenset[int]
    """Tokens that end an answer."""

    def render_chat(self, messages: Sequence[tuple[str, str]], /) -> str:
        """(role, content) by the model's chat template, up to where the answer begins."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Ids of `text`, nothing added."""

    def stream(self) -> TextPieces:
        """For a new answer."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    manifest: BlobId | None
    """As in the plan; sessions run where the two are equal."""
    tokenizer: TextCodec
    context_tokens: int
