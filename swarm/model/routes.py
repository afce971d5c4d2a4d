"""The ways from a model's files to an IR: which one a directory or a repository allows, and which files it needs. Pure.

Tried in this order: an OpenVINO IR, a GGUF file, a checkpoint. What none of them can use is refused with all that they
can.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from swarm.model import gguf
from swarm.model.files import IR_FILES, IR_WEIGHTS, TOKENIZER_FILES
from swarm.protocol.errors import UsageError

Route: TypeAlias = Literal["ir", "gguf", "checkpoint"]

CHECKPOINT_ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text")
"""``model_type`` of the checkpoints whose export was tried and cut at every layer."""

GGUF_PREFERENCE = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16")
"""Of several GGUF files the first of these is taken: small first among those with good answers."""

WAYS = (
    "an OpenVINO IR with its tokenizers"
    f"; a .gguf file of {', '.join(gguf.ARCHITECTURES)} with {', '.join(gguf.MATRIX_TYPES)}"
    f"; safetensors of {', '.join(CHECKPOINT_ARCHITECTURES)}"
)

_HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95})"
    r"(?:@(?P<revision>refs/pr/\d{1,9}|[\w.-]{1,128}))?"
    r"(?:/(?P<file>[\w][^\\\0]{0,250}\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_LABEL = re.compile(r"(?:^|[.\-_])(I?Q\d\w*|BF16|F16|F32|FP16|FP32|MXFP4\w*|TQ\d\w*)\.gguf$", re.IGNORECASE)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_TOKENIZER = re.compile(
    r"tokenizer.*|.*\.jinja|(?:special_tokens_map|added_tokens|vocab|chat_template)\.json|merges\.txt"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """``org/name``, ``org/name@revision``, ``org/name/file.gguf``: a model on the Hugging Face hub."""

    repo: str
    revision: str = ""
    """A branch, a tag or a commit; empty for the hub's default branch."""
    file: str = ""

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f"/{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that is taken, and the files that it needs: small ones first."""

    route: Route
    files: tuple[str, ...]


def parse_hub_name(text: str) -> HubName | None:
    """None where `text` cannot be a name on the hub."""
    match = _HUB_NAME.fullmatch(text)
    if match is None or ".." in text or "//" in text:
        return None
    repo, file = match["repo"], match["file"] or ""
    if repo.lower().endswith(".gguf"):
        return None
    return HubName(repo, match["revision"] or "", file)


def choose(label: str, files: Collection[str], wanted: str = "") -> Choice:
    """The way for a model whose files are named `files`; `wanted` names one GGUF among them. Raises `UsageError`."""
    if wanted:
        if wanted not in files:
            ggufs = [name for name in files if name.lower().endswith(".gguf")]
            raise UsageError(
                f"no {wanted} in {label}", expected=_listed(ggufs) or WAYS, found="none", action="Check the name."
            )
        return Choice("gguf", (wanted,))
    here = {name for name in files if "/" not in name}
    if here & {"openvino_model.xml", IR_WEIGHTS}:
        missing = [name for name in IR_FILES if name not in here]
        if missing:
            raise UsageError(
                f"{label} is not an OpenVINO IR of a language model",
                expected="openvino_model, openvino_tokenizer and openvino_detokenizer, each .xml and .bin",
                found=f"no {', '.join(missing)}",
                action="Export it with its tokenizers: optimum-cli export openvino --task text-generation-with-past.",
            )
        needed = sorted({*IR_FILES, *(here & set(TOKENIZER_FILES))} - {IR_WEIGHTS})
        return Choice("ir", (*needed, IR_WEIGHTS))
    if ggufs := [name for name in files if name.lower().endswith(".gguf")]:
        return Choice("gguf", (_choose_gguf(label, ggufs),))
    weights = _safetensors(here)
    if weights and "config.json" in here:
        small = {name for name in here if _TOKENIZER.fullmatch(name)} | (here & {"generation_config.json"})
        index = here & {"model.safetensors.index.json"}
        return Choice("checkpoint", ("config.json", *sorted(small | index), *weights))
    raise UsageError(
        f"{label} holds no model that can be used", expected=WAYS, found=_listed(sorted(here)) or "no files"
    )


def check_checkpoint(label: str, config: Mapping[str, Any]) -> None:
    """Raises `UsageError` where a checkpoint with this ``config.json`` cannot be exported."""
    kind = config.get("model_type")
    classes = config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    if kind not in CHECKPOINT_ARCHITECTURES or not any(name.endswith("ForCausalLM") for name in names):
        raise UsageError(
            f"{label}: unsupported architecture",
            expected=f"a causal language model of {', '.join(CHECKPOINT_ARCHITECTURES)}",
            found=f"{str(kind or 'none')[:40]} ({_listed(names) or 'no architectures'})",
            action="Take another model, or an OpenVINO IR of this one.",
        )
    if "quantization_config" in config:
        raise UsageError(
            f"{label} is quantized already",
            expected="a checkpoint in its original precision",
            found="a quantization_config",
            action="Take the checkpoint that it was made from, a GGUF file, or an OpenVINO IR.",
        )


def _choose_gguf(label: str, names: list[str]) -> str:
    """The one file, or the first by `GGUF_PREFERENCE`."""
    whole = sorted(name for name in names if not _SPLIT.search(name) and "mmproj" not in name.lower())
    if len(whole) == 1:
        return whole[0]
    labels = {name: match[1].upper() for name in whole if (match := _LABEL.search(name))}
    for kind in GGUF_PREFERENCE:
        found = [name for name, own in labels.items() if own == kind]
        if len(found) == 1:
            return found[0]
        if found:
            raise _unclear(label, found)
    if whole:
        raise _unclear(label, whole)
    raise UsageError(
        f"{label} has its GGUF model in several parts",
        expected="a single file",
        found=_listed(sorted(names)),
        action="Join them first, llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf, and give the file.",
    )


def _unclear(label: str, names: list[str]) -> UsageError:
    return UsageError(
        f"{label} has several GGUF files",
        expected=f"one of {', '.join(GGUF_PREFERENCE)} in the name of exactly one",
        found=_listed(sorted(names)),
        action=f"Name one, such as {label}/{sorted(names)[0]}.",
    )


def _safetensors(names: Collection[str]) -> list[str]:
    """Weights in the hub's layout; Mistral's repositories hold a second copy, ``consolidated…``."""
    return sorted(name for name in names if name.endswith(".safetensors") and name.startswith("model"))


def _listed(names: Collection[str]) -> str:
    some = [name[:60] for name in names][:6]
    return ", ".join(some) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
