"""Text to token ids and back, chat templates, and text that grows token by token.

`openvino_genai.Tokenizer` does the work, on the tokenizer IRs beside the model; it needs no torch. Tokenizers that
`transformers` saves from a GGUF decode wrongly and are not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cbor2
import openvino_genai

from swarm.model.files import DETOKENIZER_IR, TOKENIZER_FILES, TOKENIZER_IRS
from swarm.protocol.errors import ModelError, UsageError
from swarm.protocol.limits import MAX_CONTEXT_TOKENS

MAX_PACKED_BYTES = 512 * 1024 * 1024
"""All files of one tokenizer. The largest known, of 262,144 tokens, takes 40 MB."""

_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Special tokens that end a turn or a text, whatever the configuration says."""


class Tokenizer:
    """One model's tokenizer. Its methods block for as long as the text is (about 1 µs a character) and may be called
    from several threads."""

    def __init__(
        self,
        tokenizer: Any,
        stop_tokens: frozenset[int],
        vocabulary_size: int,
        texts: dict[int, bytes] | None = None,
    ) -> None:
        """`texts`: what each id stands for, where a text is no more than these, one behind the other."""
        self._tokenizer = tokenizer
        self._texts = texts
        self.stop_tokens = stop_tokens
        """An answer ends with any of these."""
        self.vocabulary_size = vocabulary_size
        """Token ids lie in [0, this)."""
        self._hidden: dict[int, bool] = {}

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads `TOKENIZER_FILES` from an IR directory; 0.1 s. Raises `ModelError`."""
        missing = [name for name in TOKENIZER_IRS if not (directory / name).is_file()]
        if missing:
            raise ModelError("the tokenizer is not complete", expected=", ".join(missing), found=f"none in {directory}")
        try:
            tokenizer = openvino_genai.Tokenizer(str(directory))
            vocabulary = tokenizer.get_vocab()
            size = 1 + max(vocabulary.values())
        except Exception as error:  # openvino raises RuntimeError and others for damaged files
            raise ModelError("the tokenizer cannot be loaded", found=_reason(error)) from error
        texts = {token: text for text, token in vocabulary.items()} if _only_joins(directory / DETOKENIZER_IR) else None
        self = cls(tokenizer, frozenset(), size, texts)
        configured = {tokenizer.get_eos_token_id(), *_configured_stops(directory)}
        named = {vocabulary.get(text.encode()) for text in _TURN_ENDS}
        stops = {token for token in named if token is not None and self.is_hidden(token)}
        self.stop_tokens = frozenset(stops | {token for token in configured if 0 <= token < size})
        return self

    def tokens(self) -> dict[int, bytes]:
        """Every id of the vocabulary and what stands for it: its bytes, or the name of a special token. 0.1 s."""
        return {token: text for text, token in self._tokenizer.get_vocab().items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Adds no special tokens: a chat template already has them. Special tokens written out
        in the text become themselves."""
        if not text:
            return []
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no bytes
        encoded = self._tokenizer.encode(text, add_special_tokens=False, max_length=MAX_CONTEXT_TOKENS)
        return [int(token) for token in encoded.input_ids.data[0]]

    def count(self, text: str) -> int:
        """How many tokens `text` has."""
        return len(self.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without special tokens. Ids outside the vocabulary have no text."""
        known = [token for token in tokens if not self.is_hidden(token)]
        if self._texts is not None:
            # A forward of the detokenizer's graph takes longer than all else that is done for a token.
            return b"".join([self._texts.get(token, b"") for token in known]).decode("utf-8", "ignore")
        return str(self._tokenizer.decode(known)) if known else ""

    def is_hidden(self, token: int) -> bool:
        """True for a special token, or one outside the vocabulary: it has no text of its own."""
        if not 0 <= token < self.vocabulary_size:
            return True
        hidden = self._hidden.get(token)
        if hidden is None:
            hidden = not self._tokenizer.decode([token]) and bool(
                self._tokenizer.decode([token], skip_special_tokens=False)
            )
            self._hidden[token] = hidden
        return hidden

    def stream(self) -> TextStream:
        """A new answer's growing text."""
        return TextStream(self.decode, self.is_hidden)

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt for (role, content) messages: the model's chat template, with the start of the answer.

        A model without a template gets ``User: …`` and ``Assistant: …`` paragraphs, the system message first as it is.
        Raises `UsageError` where the template refuses the messages (some know no system role).
        """
        if not self._tokenizer.chat_template:
            return self._beginning() + _plain_chat(messages)
        history = [{"role": role, "content": content} for role, content in messages]
        try:
            return str(self._tokenizer.apply_chat_template(history, add_generation_prompt=True))
        except Exception as error:  # whatever the template raises
            raise UsageError(
                "the model's chat template refuses these messages",
                expected="system, user and assistant messages as the model knows them",
                found=_reason(error),
            ) from error

    def _beginning(self) -> str:
        """The text of the token that the model wants at the start of every text; empty for most."""
        first = self._tokenizer.encode("a", add_special_tokens=True).input_ids.data[0]
        begins = len(first) > 1 and int(first[0]) == self._tokenizer.get_bos_token_id()
        return str(self._tokenizer.get_bos_token()) if begins else ""


class TextStream:
    """Token ids in, text out, a character never in halves. The pieces together are ``decode(all ids)``.

    `decode` turns ids into text. `is_hidden` tells which ids never have text.

    Ids are decoded again in a window that slides along, because a token's text depends on its neighbours: a character
    may span tokens, and the first word of a text may lose its space. The window slides only to where its own text is
    the end of the text before, so the cost of a token does not grow with the answer.
    """

    _WINDOW = 48
    """Ids after which the window is tried to be slid."""

    _KEPT = 16
    """Ids that stay in it."""

    _OVERLAP = 8
    """Characters that must be shown already within the ids that stay: enough to be in step with UTF-8 again."""

    _LIMIT = 256
    """Ids after which no overlap is asked for: this many ids without text are bytes that are no characters."""

    _UNSETTLED = re.compile(r"(?: (?:n'?|'[vr]?)?|\ufffd{1,3})\Z")
    """An end that the next token may change: the replacement of a character that is not complete yet, and a space that
    detokenizers with clean-up drop before punctuation and ``n't``."""

    def __init__(self, decode: Callable[[Sequence[int]], str], is_hidden: Callable[[int], bool] = lambda _: False):
        self._decode = decode
        self._is_hidden = is_hidden
        self._ids: list[int] = []
        self._text = ""
        self._shown = 0
        """Characters of `_text` that were returned."""

    def push(self, token: int) -> str:
        """The text that is certain after `token`; often empty."""
        if self._is_hidden(token):
            return ""
        self._ids.append(token)
        self._text = self._decode(self._ids)
        unsettled = self._UNSETTLED.search(self._text, max(0, len(self._text) - 4))
        piece = self._take(unsettled.start() if unsettled else len(self._text))
        if len(self._ids) > self._WINDOW:
            self._slide()
        return piece

    def flush(self) -> str:
        """What was held back, at the end of an answer. The stream can be used anew after it."""
        piece = self._take(len(self._text))
        self._ids, self._text, self._shown = [], "", 0
        return piece

    def _take(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self._text[start:end]

    def _slide(self) -> None:
        ids = self._ids[-self._KEPT :]
        text = self._decode(ids)
        overlap = len(text) - (len(self._text) - self._shown)
        needed = self._OVERLAP if len(self._ids) <= self._LIMIT else 0
        if overlap >= needed and self._text.endswith(text):
            self._ids, self._text, self._shown = ids, text, overlap


def pack(directory: Path) -> bytes:
    """The tokenizer's files as one blob, the same bytes for the same files. Raises `ModelError`."""
    files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    _check_files(files)
    return cbor2.dumps(files, canonical=True)


def unpack(blob: bytes, directory: Path) -> None:
    """Writes the files of a packed tokenizer into an existing directory. Raises `ModelError` on anything else."""
    if len(blob) > MAX_PACKED_BYTES:
        raise ModelError("the tokenizer is too large", expected=f"at most {MAX_PACKED_BYTES}", found=str(len(blob)))
    try:
        files = cbor2.loads(blob, max_depth=2)
    except Exception as error:  # cbor2 raises its own errors and, for crafted input, ValueError and others
        raise ModelError("a packed tokenizer is damaged", found=_reason(error)) from None
    _check_files(files)
    for name, data in files.items():
        (directory / name).write_bytes(data)


def _check_files(files: Any) -> None:
    if not isinstance(files, dict) or not all(
        isinstance(name, str) and name in TOKENIZER_FILES and isinstance(data, bytes) for name, data in files.items()
    ):
        raise ModelError("a packed tokenizer is damaged", expected="the files of a tokenizer", found="something else")
    missing = [name for name in TOKENIZER_IRS if name not in files]
    if missing:
        raise ModelError("the tokenizer is not complete", expected=", ".join(missing), found="none")
    if (size := sum(map(len, files.values()))) > MAX_PACKED_BYTES:
        raise ModelError("the tokenizer is too large", expected=f"at most {MAX_PACKED_BYTES}", found=str(size))


_JOINING = {"Parameter", "Const", "Slice", "VocabDecoder", "FuzeRagged", "UTF8Validate", "StringTensorPack", "Result"}


def _only_joins(detokenizer: Path) -> bool:
    """Whether the graph puts the bytes of its ids together, drops what is no UTF-8, and does nothing else."""
    try:
        graph = detokenizer.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    layers = re.findall(r'<layer id="\d+" name="[^"]*" type="(\w+)"', graph)
    drops = '<data replace_mode="false" />' in graph
    return drops and set(layers) <= _JOINING and len(layers) == graph.count("<layer ")


def _configured_stops(directory: Path) -> set[int]:
    """The ``eos_token_id`` of the model's configuration files; a damaged file counts as absent."""
    stops: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            ids = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        stops.update(token for token in (ids if isinstance(ids, list) else [ids]) if type(token) is int)
    return stops


def _plain_chat(messages: Sequence[tuple[str, str]]) -> str:
    titles = {"user": "User: ", "assistant": "Assistant: "}
    return "".join(f"{titles.get(role, '')}{content}\n\n" for role, content in messages) + "Assistant:"


def _reason(error: Exception) -> str:
    """The line that says something; openvino puts the place in its own source before it, and advice around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Exception from ", "Check '"))]
    template = [line.removeprefix("Minja's error: ") for line in said if line.startswith("Minja's error: ")]
    return next(iter(template or said or lines), type(error).__name__)[:300]
