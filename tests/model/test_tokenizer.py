"""Tokenizers, and text that grows: never half a character, and in the end the whole text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import cbor2
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from swarm.model import tokenizer as module
from swarm.model.tokenizer import TOKENIZER_FILES, TOKENIZER_IRS, TextStream, Tokenizer, pack, unpack
from swarm.protocol.errors import ModelError, UsageError

TEXTS = [
    "Hello, world!",
    "  leading, and trailing  ",
    "\n\n\ttabs\r\nand lines\n",
    "日本語のテキスト、漢字とカナ",
    "😀👩‍👩‍👧🏳️‍🌈 and text",
    "don't I'm WE'LL",
    "3.14159 12345",
    "é e\u0301 ﬁ \ufffd",
    "def f(x):\n    return {x: [1, 2]}\n",
    "a < b > c | d",
    "x" * 300,
    "<|im_start|>user\nhi<|im_end|>\n",
]


NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


@pytest.fixture(
    scope="module",
    params=[
        "tiny_ir",
        pytest.param("smollm2_ir", marks=pytest.mark.model),
        pytest.param("qwen_ir", marks=[pytest.mark.model, pytest.mark.large]),
    ],
)
def directory(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def tiny(tiny_ir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_ir)


# --- the real ones ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocabulary_size for token in ids)
    assert tokenizer.count(text) == len(ids)
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokenizer.decode(ids) == plain


def test_nothing_and_the_impossible(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode(tokenizer.encode("a \ud800 b")) == "a ? b"
    outside = [-1, tokenizer.vocabulary_size, 2**40]
    assert tokenizer.decode([*outside, *tokenizer.encode("ok")]) == "ok"
    assert all(tokenizer.is_hidden(token) for token in outside)


@pytest.fixture(scope="module")
def halves(tokenizer: Tokenizer) -> list[int]:
    """Ids that are only a part of a character."""
    assert tokenizer._texts is not None
    texts = {token: text for token, text in tokenizer._texts.items() if not set(text) & NEVER_IN_UTF8}
    return [token for token, text in sorted(texts.items()) if text.decode("utf-8", "ignore") == ""]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_joining_the_bytes_gives_what_the_graph_gives(
    tokenizer: Tokenizer, halves: list[int], data: st.DataObject
) -> None:
    any_id = st.integers(0, tokenizer.vocabulary_size - 1)
    ids = data.draw(st.lists(st.sampled_from(halves) | any_id, min_size=1, max_size=12))
    assume(not set(b"".join(tokenizer._texts[token] for token in ids)) & NEVER_IN_UTF8)
    # Three bytes of a character of four, at the very end, are let through by the graph and shown as three U+FFFD.
    joined, graph = (text.replace("\ufffd", "") for text in (tokenizer.decode(ids), tokenizer._tokenizer.decode(ids)))
    assert joined == graph


@pytest.mark.parametrize(
    ("written", "instead"),
    [('type="FuzeRagged"', 'type="RegexNormalization"'), ('replace_mode="false"', 'replace_mode="true"')],
)
def test_another_detokenizer_is_run_as_it_is(tiny_ir: Path, tmp_path: Path, written: str, instead: str) -> None:
    graph = (tiny_ir / "openvino_detokenizer.xml").read_text(encoding="utf-8")
    assert written in graph
    changed = tmp_path / "openvino_detokenizer.xml"
    changed.write_text(graph, encoding="utf-8")
    assert module._only_joins(changed)
    changed.write_text(graph.replace(written, instead), encoding="utf-8")
    assert not module._only_joins(changed)
    assert not module._only_joins(tmp_path / "none.xml")


def test_stop_tokens(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode("<|im_end|>")
    (text_end,) = tokenizer.encode("<|endoftext|>")
    assert tokenizer.stop_tokens == {end, text_end}
    assert tokenizer.is_hidden(end)
    assert not any(tokenizer.is_hidden(token) for token in tokenizer.encode("plain text"))


def test_a_chat_ends_with_the_beginning_of_the_answer(tokenizer: Tokenizer) -> None:
    content = "a \" {{ x }} \\n {% raw %} ' <b>\n\n 世界  end"
    chat = tokenizer.render_chat([("system", "Be brief."), ("user", content), ("assistant", "ok"), ("user", "more")])
    assert chat.endswith("<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n" in chat
    (start,) = tokenizer.encode("<|im_start|>")
    assert tokenizer.encode(chat)[0] == start
    assert tokenizer.encode(chat).count(start) == 5


def test_long_texts_are_not_cut(tokenizer: Tokenizer) -> None:
    text = " ".join(str(number) for number in range(12_000))
    ids = tokenizer.encode(text)
    assert len(ids) > 12_000
    assert tokenizer.decode(ids) == text


def stream_all(stream: TextStream, ids: Sequence[int]) -> str:
    return "".join([stream.push(token) for token in ids] + [stream.flush()])


@pytest.mark.parametrize("text", [*TEXTS, " ".join(TEXTS) * 5])
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert stream_all(tokenizer.stream(), ids) == tokenizer.decode(ids)


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ids_stream_to_their_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(id_lists(st.integers(0, tokenizer.vocabulary_size + 2)))
    assert stream_all(tokenizer.stream(), ids) == tokenizer.decode(ids)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_streams_without_halves(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer.decode(tokenizer.encode(text))
    stream, shown = tokenizer.stream(), ""
    for token in tokenizer.encode(text):
        shown += stream.push(token)
        assert whole.startswith(shown)
    assert shown + stream.flush() == whole


def test_a_packed_tokenizer_works_elsewhere(tokenizer: Tokenizer, directory: Path, tmp_path: Path) -> None:
    blob = pack(directory)
    unpack(blob, tmp_path)
    assert pack(tmp_path) == blob
    assert {path.name for path in tmp_path.iterdir()} <= set(TOKENIZER_FILES)
    other = Tokenizer.load(tmp_path)
    assert other.stop_tokens == tokenizer.stop_tokens
    assert other.render_chat([("user", "hi")]) == tokenizer.render_chat([("user", "hi")])
    assert other.encode("Hello 世界") == tokenizer.encode("Hello 世界")


# --- configurations and damage ----------------------------------------------------------------------------------------


def copy_of(directory: Path, target: Path) -> Path:
    for name in TOKENIZER_IRS:
        shutil.copy(directory / name, target / name)
    return target


def test_stop_tokens_of_the_configuration(tiny_ir: Path, tmp_path: Path) -> None:
    copy_of(tiny_ir, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}), encoding="utf-8")
    assert Tokenizer.load(tmp_path).stop_tokens == {0, 2, 7, 8, 9}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [null, true, 99999]}'])
def test_a_configuration_without_use_is_passed_over(tiny_ir: Path, tmp_path: Path, text: str) -> None:
    copy_of(tiny_ir, tmp_path)
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    assert Tokenizer.load(tmp_path).stop_tokens == {0, 2}


def test_a_model_without_a_template(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        chat_template = ""
        encode = tiny._tokenizer.encode
        get_bos_token_id = tiny._tokenizer.get_bos_token_id

    plain = Tokenizer(Plain(), tiny.stop_tokens, tiny.vocabulary_size)
    chat = plain.render_chat([("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")])
    assert chat == "Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Bye\n\nAssistant:"


def test_a_template_that_refuses(tiny_ir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_ir)
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user begins') }}{% endif %}ok"
    tokenizer._tokenizer.set_chat_template(strict)
    assert tokenizer.render_chat([("user", "hi")]) == "ok"
    with pytest.raises(UsageError, match=r"refuses these messages; .*a user begins") as caught:
        tokenizer.render_chat([("assistant", "hi")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TOKENIZER_IRS)
def test_a_missing_file(tiny_ir: Path, tmp_path: Path, name: str) -> None:
    copy_of(tiny_ir, tmp_path)
    (tmp_path / name).unlink()
    for call in (Tokenizer.load, pack):
        with pytest.raises(ModelError, match=f"not complete; expected {name}"):
            call(tmp_path)


def test_a_damaged_file(tiny_ir: Path, tmp_path: Path) -> None:
    copy_of(tiny_ir, tmp_path)
    (tmp_path / "openvino_tokenizer.xml").write_text("<net", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)


GOOD = dict.fromkeys(TOKENIZER_IRS, b"")


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"openvino_tokenizer.xml": b""},
        GOOD | {"../../evil": b""},
        GOOD | {"openvino_model.xml": b""},
        GOOD | {"config.json": "text"},
        GOOD | {1: b""},
        GOOD | {"config.json": [[[b""]]]},
    ],
)
def test_unpack_takes_only_a_tokenizer(content: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        unpack(cbor2.dumps(content), tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=300))
def test_unpack_survives_noise(noise: bytes) -> None:
    with pytest.raises(ModelError):
        unpack(noise, Path("nowhere"))


def test_packed_tokenizers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOKENIZER_IRS:
        (tmp_path / name).write_bytes(bytes(100))
    blob = pack(tmp_path)
    monkeypatch.setattr(module, "MAX_PACKED_BYTES", 300)
    with pytest.raises(ModelError, match="too large"):
        pack(tmp_path)
    with pytest.raises(ModelError, match="too large"):
        unpack(blob, tmp_path)


# --- the stream alone, over decoders of every habit -------------------------------------------------------------------

VOCABULARY = [bytes([byte]) for byte in range(256)]
VOCABULARY += [
    b" ",
    b" the",
    b"the",
    b" .",
    b" n't",
    b" '",
    b"s",
    b"  ",
    "世".encode(),
    " 界".encode(),
    b"\xe4\xb8",
    b"",
]


def dropping(ids: Sequence[int]) -> str:
    """As tokenizers from GGUF files: what is no character is left out."""
    return b"".join(VOCABULARY[token] for token in ids).decode("utf-8", "ignore")


def replacing(ids: Sequence[int]) -> str:
    """As most Hugging Face tokenizers: what is no character is U+FFFD."""
    return b"".join(VOCABULARY[token] for token in ids).decode("utf-8", "replace")


def stripping(ids: Sequence[int]) -> str:
    """As SentencePiece: a text loses its first space."""
    return replacing(ids).removeprefix(" ")


def cleaning(ids: Sequence[int]) -> str:
    """With ``clean_up_tokenization_spaces``."""
    text = replacing(ids)
    for mark in (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {mark}", mark)
    return text


DECODERS = [dropping, replacing, stripping, cleaning]
TOKENS = st.integers(0, len(VOCABULARY) - 2)  # the last one has no bytes: see is_hidden
CONTINUATIONS = st.integers(0x80, 0xBF)
WORDS = st.integers(256, len(VOCABULARY) - 2)


def id_lists(tokens: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    """Short ones, and ones long enough for the window to slide several times."""
    short = st.lists(tokens, max_size=20)
    return st.tuples(short, st.integers(1, 40), short).map(lambda parts: parts[0] * parts[1] + parts[2])


@pytest.mark.parametrize("decode", DECODERS)
@given(id_lists(TOKENS | CONTINUATIONS | WORDS))
def test_the_pieces_are_the_whole(decode: Callable[[Sequence[int]], str], ids: list[int]) -> None:
    assert stream_all(TextStream(decode), ids) == decode(ids)


@pytest.mark.parametrize("decode", [dropping, replacing])
@pytest.mark.parametrize("ids", [[0x80] * 2000, [0xE4] * 2000, [0xE4, 0xB8] * 1000, [0xF0, 0x9F, 0x98] * 700 + [0x80]])
def test_endless_bytes_that_are_no_characters(decode: Callable[[Sequence[int]], str], ids: list[int]) -> None:
    assert stream_all(TextStream(decode), ids) == decode(ids)


@pytest.mark.parametrize("decode", DECODERS)
@given(st.text(st.characters(codec="utf-8"), max_size=100))
def test_no_half_characters(decode: Callable[[Sequence[int]], str], text: str) -> None:
    ids = list(text.encode())
    stream, shown = TextStream(decode), ""
    for token in ids:
        shown += stream.push(token)
        assert decode(ids).startswith(shown)
    assert shown + stream.flush() == decode(ids)


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    stream = TextStream(replacing)
    assert [stream.push(byte) for byte in "aé😀b".encode()] == ["a", "", "é", "", "", "", "😀", "b"]
    assert stream.flush() == ""
    assert [stream.push(byte) for byte in b"a b"] == ["a", "", " b"]
    assert [stream.push(byte) for byte in b" "] == [""]
    assert stream.flush() == " "
    assert stream.push(0xE4) == ""
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("pattern", [b"word ", "世界".encode(), b"\x80", b"\xe4\xb8", b"\n", b"  "])
def test_a_long_answer_costs_as_much_a_token_as_a_short_one(pattern: bytes) -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return dropping(ids)

    ids = list(pattern * (4000 // len(pattern)))
    assert stream_all(TextStream(decode), ids) == dropping(ids)
    assert decoded < 300 * len(ids)


def test_hidden_tokens_cost_nothing() -> None:
    calls = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        return dropping(ids)

    hidden = len(VOCABULARY) - 1
    stream = TextStream(decode, lambda token: token == hidden)
    text = stream.push(0xE4) + "".join(stream.push(hidden) for _ in range(4000)) + stream.push(0xB8) + stream.push(0xAD)
    assert text == "中"
    assert calls == 3
