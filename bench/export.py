"""Peak memory and time of exporting a checkpoint's layers: whole, half and quarter, beside optimum-intel's own export.

``python -m bench.export [--layers 8] [--hidden 2048] [--quick]``. Needs the extra `export`; about 3 GB of disk for the
checkpoint of random weights, f32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.report import report
from swarm.model.tokenizer import TOKENIZER_IRS

VOCABULARY = 8192
_POLL_S = 0.02

OPTIMUM = """
import sys
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
settings = OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0)
model = OVModelForCausalLM.from_pretrained(sys.argv[1], export=True, quantization_config=settings, compile=False)
model.save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class Cost:
    peak_mb: float
    """Largest resident memory of the process, in units of 2**20 bytes; libraries and mapped files count."""
    seconds: float


def write_checkpoint(directory: Path, layers: int, hidden: int) -> int:
    """A Llama checkpoint of random weights; its size in bytes. Never more than one tensor in memory."""
    heads, inner = hidden // 128, 4 * hidden
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
    }
    cached = 128 * max(1, heads // 2)
    matrices = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    matrices |= {"self_attn.k_proj": (cached, hidden), "self_attn.v_proj": (cached, hidden)}
    matrices |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(layers):
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = (hidden,)
    tensors |= {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    random = np.random.default_rng(0)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in TOKENIZER_IRS:  # there is no text here: files in the place of a tokenizer
        (directory / name).write_bytes(b"")
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        for shape in tensors.values():
            file.write((0.02 * random.standard_normal(shape, np.float32)).data)
    return offset


def watch(command: list[str]) -> Cost:
    """Runs a command to its end. Raises `RuntimeError` with its last words where it fails."""
    begin, peak = time.monotonic(), 0
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=words)
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, watched.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(_POLL_S)
        if process.wait():
            words.seek(0)
            raise RuntimeError(words.read()[-2000:].decode(errors="replace"))
    return Cost(peak / 2**20, time.monotonic() - begin)


def export(checkpoint: Path, store: Path, start: int, end: int) -> Cost:
    """Ours, of layers ``[start, end)``; the manifest lies beside the store."""
    result = store.parent / f"{store.name}-{start}-{end}"
    command = [sys.executable, "-m", "swarm.model.export", str(checkpoint), str(store), str(result)]
    return watch([*command, "--layers", f"{start}:{end}", "--name", "bench"])


def export_by_optimum(checkpoint: Path, target: Path) -> Cost:
    """optimum-intel's, of the whole model."""
    return watch([sys.executable, "-c", OPTIMUM, str(checkpoint), str(target)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.export", description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--quick", action="store_true", help="a small model, nothing kept")
    arguments = parser.parse_args()
    layers, hidden = (4, 256) if arguments.quick else (arguments.layers, arguments.hidden)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = write_checkpoint(root / "checkpoint", layers, hidden)
        ranges = {"whole": (0, layers), "half": (0, layers // 2), "quarter": (layers // 4, layers // 2)}
        costs = {name: export(root / "checkpoint", root / name, *span) for name, span in ranges.items()}
        costs["optimum_whole"] = export_by_optimum(root / "checkpoint", root / "optimum")
    figures = {f"{name}_peak_mb": cost.peak_mb for name, cost in costs.items()}
    figures |= {f"{name}_s": cost.seconds for name, cost in costs.items()}
    for name in ranges:
        figures[f"{name}_to_optimum_whole"] = costs[name].peak_mb / costs["optimum_whole"].peak_mb
    settings = {"layers": layers, "hidden": hidden, "checkpoint_mb": round(size / 2**20), "format": "int4, group 128"}
    report("export", figures, settings, keep=not arguments.quick)


if __name__ == "__main__":
    main()
