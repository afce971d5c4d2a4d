"""In the place of ``swarm.model.export``, without torch: "exports" a model that lies finished in another store.

A checkpoint made by `write_checkpoint` looks real from outside: a configuration, an index, files with tensors. Its
layers are those of a model in a *mold*, a layer store. Run as a program it takes the exporter's own arguments, and
refuses where a tensor of the range is not there.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.model import exporting, sources
from swarm.model.checkpoint import in_range, open_checkpoint
from swarm.model.manifest import Manifest
from swarm.model.store import Store
from tests.model.checkpoints import write_sharded

ROWS = 256
"""Of each tensor."""


def write_checkpoint(directory: Path, mold: Store, manifest: Manifest) -> Path:
    """Two files of tensors; a layer in the middle is in both."""
    directory.mkdir(parents=True)
    layers = len(manifest.layers)
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in ("attention", "mlp")]
    names = ["model.embed_tokens.weight", *names, "model.norm.weight"]
    tensors = {name: np.full((ROWS, 4), number, np.float32) for number, name in enumerate(names)}
    middle = layers // 2 * 2
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:middle]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[middle:]},
    }
    write_sharded(directory, shards)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "mold": str(mold.root),
        "manifest": mold.manifests()[0].blob,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, __file__]
    monkeypatch.setattr(exporting, "module_command", lambda _module, *arguments: [*command, *arguments])
    monkeypatch.setattr(sources, "require_exporter", lambda _label: None)


def main(arguments: list[str]) -> None:
    checkpoint, root, result, *flags = arguments
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    config = json.loads(Path(checkpoint, "config.json").read_text(encoding="utf-8"))
    mold, store = Store(Path(config["mold"])), Store(Path(root))
    whole = Manifest.decode(mold.read(config["manifest"]))
    start, end = map(int, options["--layers"].split(":"))
    layers = len(whole.layers)
    if start < end:
        tensors = open_checkpoint(Path(checkpoint))
        for number in range(layers):
            name = f"model.layers.{number}.mlp.weight"
            if in_range(name, start, end, layers):
                expected = float(2 * number + 2)
                assert (tensors.rows(name, 0, ROWS) == expected).all(), name
    made = [whole.graph, whole.tokenizer, *whole.part(start, end)]
    for blob in made:
        temporary = store.temporary()
        shutil.copyfile(mold.path(blob.id), temporary)
        store.adopt(temporary)
    unknown = {blob.id for blob in whole.weights(0, layers)} - {blob.id for blob in made}
    part = replace(whole.without(unknown), name=options["--name"], source=options["--source"], quantization="")
    Path(result).write_bytes(part.encode())


if __name__ == "__main__":
    main(sys.argv[1:])
