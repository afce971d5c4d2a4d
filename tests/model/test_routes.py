"""The ways to an IR: names on the hub, which files are taken, and what is refused with all that could be used."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.model.files import IR_FILES
from swarm.model.routes import (
    CHECKPOINT_ARCHITECTURES,
    GGUF_PREFERENCE,
    HubName,
    check_checkpoint,
    choose,
    parse_hub_name,
)
from swarm.protocol.errors import UsageError

CHECKPOINT = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("Qwen/Qwen2.5-0.5B", HubName("Qwen/Qwen2.5-0.5B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/12", HubName("org/name", "refs/pr/12")),
        ("org/name/a-Q4_0.gguf", HubName("org/name", file="a-Q4_0.gguf")),
        ("org/name@main/sub/a.gguf", HubName("org/name", "main", "sub/a.gguf")),
    ],
)
def test_names_on_the_hub(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("name", "a/b/c", "/a/b", "a/b/", "a/b@", "./a", "../a", "a/..", "a/b.gguf", "a/b/../c.gguf", "a/b//c.gguf"),
        *("a b/c", "a/b/c\\d.gguf", "C:\\a/b", "a/b@x/y", "org/n\u00e4me", "https://huggingface.co/a/b"),
    ],
)
def test_what_is_no_name(text: str) -> None:
    assert parse_hub_name(text) is None


@given(st.text("ab/@.\\:-", max_size=20))
def test_a_name_never_leads_out(text: str) -> None:
    name = parse_hub_name(text)
    if name is not None:
        assert str(name) == text
        assert ".." not in name.repo.split("/") + name.file.split("/")


def test_an_ir_and_only_what_it_needs() -> None:
    files = [*IR_FILES, "config.json", "chat_template.jinja", "README.md", "model.safetensors", "a-Q4_0.gguf"]
    choice = choose("m", [*files, "onnx/openvino_model.xml"])
    assert choice.route == "ir"
    assert set(choice.files) == {*IR_FILES, "config.json", "chat_template.jinja"}
    assert choice.files[-1] == "openvino_model.bin"  # the large one, once the others are known to be good


def test_an_ir_without_its_tokenizers() -> None:
    with pytest.raises(UsageError, match=r"not an OpenVINO IR .*found no openvino_tokenizer\.xml"):
        choose("m", ["openvino_model.xml", "openvino_model.bin", "model.safetensors", "config.json"])


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        (["only.gguf", "README.md"], "only.gguf"),
        (["a-Q5_K_M.gguf", "a-Q4_K_M.gguf", "a-Q4_0.gguf", "a-Q8_0.gguf"], "a-Q4_K_M.gguf"),
        (["a.q8_0.gguf", "a.q4_0.gguf", "a.fp16.gguf"], "a.q4_0.gguf"),
        (["gguf/a-Q4_0.gguf", "gguf/a-Q6_K.gguf"], "gguf/a-Q4_0.gguf"),
        (["a-Q8_0.gguf", "mmproj-a-Q4_0.gguf", "a-Q4_K_M-00001-of-00002.gguf"], "a-Q8_0.gguf"),
        (["a-Q8_0.gguf", *CHECKPOINT], "a-Q8_0.gguf"),
    ],
)
def test_which_gguf(files: list[str], taken: str) -> None:
    choice = choose("m", files)
    assert (choice.route, choice.files) == ("gguf", (taken,))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["a-Q5_0.gguf", "a-IQ2_XS.gguf"], r"several GGUF files; .*Q4_K_M.*; found a-IQ2_XS\.gguf, a-Q5_0\.gguf"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], r"Name one, such as org/m/a-Q4_0\.gguf"),
        (["a-Q4_0-00001-of-00002.gguf", "a-Q4_0-00002-of-00002.gguf"], "in several parts; .*llama-gguf-split"),
    ],
)
def test_no_single_gguf(files: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose("org/m", files)


def test_a_named_gguf() -> None:
    files = ["a-Q4_K_M.gguf", "sub/b-Q5_0.gguf"]
    assert choose("m", files, "sub/b-Q5_0.gguf").files == ("sub/b-Q5_0.gguf",)
    with pytest.raises(UsageError, match=r"no c\.gguf in m; expected a-Q4_K_M\.gguf, sub/b-Q5_0\.gguf"):
        choose("m", files, "c.gguf")


def test_the_preference_is_what_the_converter_reads() -> None:
    from swarm.model.gguf import MATRIX_TYPES

    assert all(kind.removesuffix("_M").removesuffix("_S") in MATRIX_TYPES for kind in GGUF_PREFERENCE)


def test_a_checkpoint_and_only_what_it_needs() -> None:
    extra = ["pytorch_model.bin", "consolidated.safetensors", "original/x.safetensors", "generation_config.json"]
    choice = choose("m", [*CHECKPOINT, *extra])
    assert choice.route == "checkpoint"
    assert set(choice.files) == {*CHECKPOINT, "generation_config.json"} - {"README.md"}
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert set(choose("m", ["config.json", *parts]).files) == {"config.json", *parts}


@pytest.mark.parametrize("files", [[], ["README.md"], ["pytorch_model.bin", "config.json"], ["model.safetensors"]])
def test_nothing_that_can_be_used_says_what_can(files: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        choose("org/m", files)
    text = str(caught.value)
    for part in (
        "OpenVINO IR",
        ".gguf file of llama, qwen2, qwen3",
        "Q4_K",
        "safetensors of",
        *CHECKPOINT_ARCHITECTURES,
    ):
        assert part in text
    assert all(name in text for name in files)


@pytest.mark.parametrize("kind", CHECKPOINT_ARCHITECTURES)
def test_these_architectures(kind: str) -> None:
    check_checkpoint("m", {"model_type": kind, "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "found none"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, r"found bert \(BertForMaskedLM\)"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "expected .*gemma3_text"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "causal language model"),
        ({"model_type": "llama", "architectures": 5}, "no architectures"),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": {}},
            "quantized already",
        ),
    ],
)
def test_checkpoints_that_cannot_be_exported(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_checkpoint("org/m", config)
