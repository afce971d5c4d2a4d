"""Every family of models, exported by ranges and cut at every layer: the largest difference from the whole model.

``python -m bench.families [--quick] [--only TEXT]``. Needs the extra `export`. Each family is a small model with seeded
random weights of its real ``transformers`` configuration. ``--real`` takes models with real weights instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bench.models import qwen, qwen_int4, smollm2
from bench.report import report
from swarm.model.compress import Format
from swarm.model.export import OFFLINE
from swarm.model.export import export as export_layers
from swarm.model.manifest import Manifest, join
from swarm.model.store import Store
from swarm.model.tokenizer import TOKENIZER_IRS
from tests.engine.chains import Plain, Published, plain, published, replay

COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
# Two kinds of layers, with the sliding one shorter than the prompt.
GEMMA = {"head_dim": 64, "sliding_window": 64, "query_pre_attn_scalar": 64}
PROMPT, TOKENS, KV_TOKENS = 90, 8, 512


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    config: str
    """The class of ``transformers``."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return int((COMMON | self.settings)["num_hidden_layers"])


FAMILIES = (
    Family("llama", "LlamaConfig"),
    Family("llama with scaled rotary positions", "LlamaConfig", {"rope_scaling": LLAMA3_ROPE}),
    Family("llama with a tied head", "LlamaConfig", {"tie_word_embeddings": True}),
    Family("qwen2", "Qwen2Config"),
    Family("qwen2.5 with biases, tied", "Qwen2Config", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    Family("qwen3", "Qwen3Config", {"head_dim": 64}),
    Family("mistral", "MistralConfig", {"sliding_window": None}),
    Family("mistral with a sliding window", "MistralConfig", {"sliding_window": 64}),
    # The exporter takes the context it was first trained with.
    Family("phi3", "Phi3Config", {"pad_token_id": 0, "original_max_position_embeddings": 2048}),
    Family("gemma2", "Gemma2Config", GEMMA),
    Family("gemma3", "Gemma3TextConfig", GEMMA | {"num_hidden_layers": 6}),
)


Show: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    exported: str
    cuts: int
    difference: float
    """The largest of any logit, of every row of the prompt and the answer, over all cuts."""
    same_blobs: bool | None
    """A range exported alone is the range of the whole export; None where nothing is exported by ranges."""


Work: TypeAlias = Callable[[Path, Show], Row]


def write_family(family: Family, folder: Path, dtype: str = "float32") -> Path:
    """A checkpoint with seeded random weights, and files in the place of its tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**(COMMON | family.settings))
    config.dtype = dtype
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # as they are made, norms are all ones or zeros and biases zeros: they tell nothing
            parameter.data += 0.1 * torch.randn_like(parameter)
        assert torch.isfinite(parameter).all(), name
    model.save_pretrained(folder, max_shard_size="4MB")
    for name in TOKENIZER_IRS:
        (folder / name).write_bytes(b"")
    return folder


def export(checkpoint: Path, root: Path, start: int, end: int | None) -> Manifest:
    """Layers of a checkpoint into the store at `root`, INT4; here in this process, where torch is loaded already."""
    os.environ |= OFFLINE
    store = Store(root)
    store.open()
    return export_layers(checkpoint, store, "model", "", start, end, Format.INT4)


def by_optimum(checkpoint: Path, target: Path) -> Path:
    """The whole model by optimum-intel's own way: IR directory, with files in the place of its tokenizer."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    os.environ |= OFFLINE
    settings = OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0)
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, quantization_config=settings, compile=False)
    model.save_pretrained(target)
    for name in TOKENIZER_IRS:
        (target / name).touch()
    return target


def cuts_of(layers: int) -> Iterator[list[int]]:
    """None, each boundary alone, and all of them."""
    yield []
    for boundary in range(1, layers):
        yield [boundary]
    if layers > 2:
        yield list(range(1, layers))


def difference(model: Published, cuts: Sequence[Sequence[int]], show: Show) -> float:
    """The largest between the whole IR and chains out of the store, following the same tokens."""
    prompt = np.random.default_rng(0).integers(1, model.manifest.vocabulary, PROMPT).tolist()
    whole: Plain = plain(model.whole(KV_TOKENS), 1, prompt, TOKENS)
    largest = 0.0
    for number, cut in enumerate(cuts):
        show(f"cut {number + 1} of {len(cuts)}")
        found = replay(model.chain(cut, KV_TOKENS), 1, whole)
        largest = max(largest, float(np.abs(found - whole.logits).max()))
    return largest


def of_checkpoint(name: str, checkpoint: Path, folder: Path, show: Show) -> Row:
    """Exported whole and by ranges, then cut everywhere, against optimum-intel's export of the whole."""
    show("export")
    whole = export(checkpoint, folder / "whole", 0, None)
    layers = len(whole.layers)
    parts = [export(checkpoint, folder / "parts", *span) for span in ((0, 1), (1, layers))]
    show("export by optimum-intel")
    model = Published(by_optimum(checkpoint, folder / "optimum"), Store(folder / "parts"), join(parts))
    cuts = list(cuts_of(layers))
    return Row(
        name, "INT4, by ranges", len(cuts), difference(model, cuts, show), join(parts).encode() == whole.encode()
    )


def of_ir(name: str, exported: str, ir: Path, folder: Path, show: Show) -> Row:
    model = published(ir, folder / "store")
    cuts = list(cuts_of(model.layers))
    return Row(name, exported, len(cuts), difference(model, cuts, show), None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="those with TEXT in their name")
    parser.add_argument("--real", action="store_true", help="models with real weights")
    parser.add_argument("--quick", action="store_true", help="the first one, nothing kept")
    arguments = parser.parse_args()
    work = _real() if arguments.real else _random()
    chosen = [name for name in work if arguments.only in name][: 1 if arguments.quick else None]
    rows = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(work[name](Path(folder), partial(_show, name)))
    _show()
    print("| family | exported | cuts | max difference | a range alone is the whole's |\n" + "| --- " * 5 + "|")
    for row in rows:
        same = {None: "", True: "yes", False: "NO"}[row.same_blobs]
        print(f"| {row.name} | {row.exported} | {row.cuts} | {row.difference:g} | {same} |")
    figures = {f"{row.name}: max_difference": row.difference for row in rows}
    figures |= {f"{row.name}: cuts": row.cuts for row in rows}
    figures |= {f"{row.name}: same_blobs": float(row.same_blobs) for row in rows if row.same_blobs is not None}
    settings = {"prompt": PROMPT, "tokens": TOKENS, "weights": "real" if arguments.real else "random, seeded"}
    report("families_real" if arguments.real else "families", figures, settings, keep=not arguments.quick)


def _random() -> dict[str, Work]:
    def work(family: Family, folder: Path, show: Show) -> Row:
        return of_checkpoint(family.name, write_family(family, folder / "hf"), folder, show)

    return {family.name: partial(work, family) for family in FAMILIES}


def _real() -> dict[str, Work]:
    def work(name: str, exported: str, ir: Callable[[], Path], folder: Path, show: Show) -> Row:
        return of_ir(name, exported, ir(), folder, show)

    models = {
        "SmolLM2-135M-Instruct": ("GGUF, Q4_1", smollm2),
        "Qwen2.5-Coder-1.5B-Instruct": ("GGUF, Q4_K_M", qwen),
        "Qwen2.5-Coder-1.5B-Instruct, INT4": ("IR, INT4 symmetric in groups of 128", qwen_int4),
    }
    return {name: partial(work, name, *how) for name, how in models.items()}


def _show(*words: str) -> None:
    print("\r\x1b[K" + ": ".join(words), end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
