"""Every family of models, small and random, through its own exporter: cut at every boundary, equal bit for bit.

Needs the extra `export`. Run with ``pytest -m export``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.model.tokenizer import TOKENIZER_IRS
from tests.engine.chains import assert_decodes_like, plain, published

pytestmark = [pytest.mark.export, pytest.mark.timeout(900)]

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


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)


FAMILIES = [
    Family("llama with scaled rotary positions", "LlamaConfig", {"rope_scaling": LLAMA3_ROPE}),
    Family("llama with a tied head", "LlamaConfig", {"tie_word_embeddings": True}),
    Family("qwen2", "Qwen2Config"),
    Family("qwen3", "Qwen3Config", {"head_dim": 64}),
    Family("mistral", "MistralConfig", {"sliding_window": None}),
    # The exporter takes the context it was first trained with.
    Family("phi3", "Phi3Config", {"pad_token_id": 0, "original_max_position_embeddings": 2048}),
    Family("gemma2", "Gemma2Config", GEMMA),
    Family("gemma3", "Gemma3TextConfig", GEMMA | {"num_hidden_layers": 6}),
]
PROMPT, TOKENS, KV_TOKENS = 90, 12, 512


def export(family: Family, folder: Path) -> Path:
    """A model with seeded random weights, as INT4 IR with files in the place of its tokenizer."""
    intel = pytest.importorskip("optimum.intel")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**(COMMON | family.settings))
    config.torch_dtype = "float32"
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder / "hf")
    quantization = intel.OVWeightQuantizationConfig(bits=4, sym=True, group_size=64, ratio=1.0)
    exported = intel.OVModelForCausalLM.from_pretrained(
        folder / "hf", export=True, quantization_config=quantization, compile=False
    )
    exported.save_pretrained(folder / "ir")
    for name in TOKENIZER_IRS:
        (folder / "ir" / name).write_bytes(b"")
    return folder / "ir"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_cut_at_every_boundary(family: Family, tmp_path: Path) -> None:
    model = published(export(family, tmp_path), tmp_path / "store")
    assert model.layers == (COMMON | family.settings)["num_hidden_layers"]
    assert model.manifest.context_tokens == COMMON["max_position_embeddings"]
    prompt = np.random.default_rng(0).integers(1, model.manifest.vocabulary, PROMPT).tolist()
    whole = plain(model.whole(KV_TOKENS), 1, prompt, TOKENS)
    for cuts in [[], *([boundary] for boundary in range(1, model.layers)), list(range(1, model.layers))]:
        chain = model.chain(cuts, KV_TOKENS)
        assert_decodes_like(chain, 1, whole, TOKENS, f"{family.name}, cut before {cuts}")
