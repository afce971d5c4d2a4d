"""Exported by ranges, on different nodes, a model is what one node would have exported, and what optimum-intel exports.

Needs the extra `export`. Run with ``pytest -m export``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino_genai
import pytest

from bench.export import export as export_watched
from bench.export import export_by_optimum, write_checkpoint
from bench.families import FAMILIES, write_family
from swarm.model.compress import Kind, compress
from swarm.model.convert import REFUSED
from swarm.model.export import main
from swarm.model.manifest import ABSENT, Manifest, join, merge
from swarm.model.store import Store
from swarm.model.tokenizer import TOKENIZER_IRS, unpack
from tests.engine.chains import Published, plain

pytestmark = [pytest.mark.export, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROMPT, TOKENS, KV_TOKENS = 90, 8, 512


@pytest.fixture(autouse=True, scope="module")
def _extra() -> None:
    for name in ("optimum.intel", "torch", "transformers", "nncf"):
        pytest.importorskip(name)


def export(checkpoint: Path, root: Path, span: str, format_: str = "int4") -> Manifest:
    """With the exporter's own arguments, but here, where torch is loaded already."""
    result = root.parent / f"{root.name}-{span.replace(':', '-')}"
    arguments = [checkpoint, root, result, "--layers", span, "--format", format_, "--name", "model"]
    assert main([str(argument) for argument in arguments]) == 0
    return Manifest.decode(result.read_bytes())


def export_apart(checkpoint: Path, root: Path, start: int, end: int) -> Manifest:
    """In a process of its own, as a node does it."""
    export_watched(checkpoint, root, start, end)
    return Manifest.decode((root.parent / f"{root.name}-{start}-{end}").read_bytes())


def test_another_process_makes_the_same_graph(tmp_path: Path) -> None:
    """As nodes do it, each slice in its own: what OpenVINO counts within a process is not in the graph."""
    checkpoint = write_family(FAMILIES[0], tmp_path / "hf")
    export(checkpoint, tmp_path / "here", "0:1")
    here = export(checkpoint, tmp_path / "here", "1:4")
    there = export_apart(checkpoint, tmp_path / "there", 1, 4)
    assert replace(there, name="model").encode() == here.encode()


def test_only_the_files_of_the_range_are_needed(tmp_path: Path) -> None:
    checkpoint = write_family(FAMILIES[0], tmp_path / "hf")
    whole = export(checkpoint, tmp_path / "whole", "0:")
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    needed = {file for name, file in index.items() if ".layers.2." in name}
    others = set(index.values()) - needed
    assert others
    for file in others:
        (checkpoint / file).unlink()
    part = export(checkpoint, tmp_path / "part", "2:3")
    assert part.unknown(0, 4) == [(0, 2), (3, 4)]
    assert (part.layers[2], part.graph, part.embedding.id) == (whole.layers[2], whole.graph, ABSENT)
    assert merge([part, whole]) == whole  # what is not known has its size all the same


@pytest.mark.parametrize("format_", ["int8", "fp16"])
def test_other_formats_of_a_bf16_checkpoint(format_: str, tmp_path: Path) -> None:
    """Ranges are the whole here too, and the logits are those of the checkpoint, about."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint = write_family(FAMILIES[2], tmp_path / "hf", "bfloat16")
    joined = join([export(checkpoint, tmp_path / "store", span, format_) for span in ("0:2", "2:")])
    assert joined.encode() == export(checkpoint, tmp_path / "whole", "0:4", format_).encode()
    model = Published(tmp_path, Store(tmp_path / "store"), joined)
    prompt = np.random.default_rng(0).integers(1, joined.vocabulary, PROMPT).tolist()
    found = plain(model.chain([2], KV_TOKENS), 1, prompt, 1).logits
    original = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        expected = original(torch.tensor([prompt])).logits[0].numpy()
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "columns"), [(Kind.INT4, 256), (Kind.INT4, 96), (Kind.INT8, 100)])
def test_bands_put_together_are_the_matrix_at_once(kind: Kind, columns: int) -> None:
    values = np.random.default_rng(0).standard_normal((96, columns)).astype(np.float32)
    whole = compress(kind, values)
    bands = [compress(kind, values[first : first + 40]) for first in range(0, 96, 40)]
    for array, pieces in zip(whole, zip(*bands, strict=True), strict=True):
        assert b"".join(pieces) == bytes(array)


@pytest.mark.parametrize(
    ("change", "span", "reason"),
    [
        ({"model_type": "opt"}, "0:", "family opt cannot be exported"),
        ({}, "0:5", "a range within 0:4"),
        ({}, "3:2", "a range within 0:4"),
        ({}, "1-2", "no range of layers"),
        ({"intermediate_size": 384}, "0:1", "does not fit its configuration"),
        ({"num_hidden_layers": 5}, "4:5", "without a tensor"),
    ],
)
def test_what_is_refused(
    change: dict[str, object], span: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_family(FAMILIES[0], tmp_path / "hf")
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | change), encoding="utf-8")
    arguments = [checkpoint, tmp_path / "store", tmp_path / "result", "--layers", span]
    assert main([str(argument) for argument in arguments]) == REFUSED
    assert reason in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "result").exists()


def test_the_checkpoints_own_tokenizer(tmp_path: Path) -> None:
    """Converted the same everywhere; it encodes as the original does, however long the text is."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    checkpoint = write_family(FAMILIES[3], tmp_path / "hf")
    for name in TOKENIZER_IRS:
        (checkpoint / name).unlink()
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([text], trainer)
    original = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>", model_max_length=2048
    )
    original.save_pretrained(checkpoint)

    # Ranges of different sizes, each in its own process: the converter's names count the nodes that a process makes.
    parts = [export_apart(checkpoint, tmp_path / "store", *span) for span in ((0, 1), (1, 4))]
    unpack(Store(tmp_path / "store").read(join(parts).tokenizer.id), tmp_path)
    tokenizer = openvino_genai.Tokenizer(str(tmp_path))
    for sample in ("Grüße, 2 €", 3 * text):
        ids = tokenizer.encode(sample, add_special_tokens=True).input_ids.data[0].tolist()
        assert ids == original(sample).input_ids
        assert tokenizer.decode(ids) == sample


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The peak of a quarter is far below the whole's by optimum-intel; ours of the whole is hardly above it."""
    layers = 8
    write_checkpoint(tmp_path / "hf", layers, 2048)
    quarter = export_watched(tmp_path / "hf", tmp_path / "quarter", layers // 4, layers // 2)
    whole = export_watched(tmp_path / "hf", tmp_path / "whole", 0, layers)
    optimum = export_by_optimum(tmp_path / "hf", tmp_path / "optimum")
    assert quarter.peak_mb <= 0.35 * optimum.peak_mb
    assert whole.peak_mb <= quarter.peak_mb + 100
