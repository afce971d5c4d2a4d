"""``python -m swarm.model.export CHECKPOINT STORE RESULT``: layers of a Hugging Face checkpoint into a layer store.

The graph comes from the configuration (see `skeleton`), the blobs of the layers ``[start, end)`` from the tensors of
those layers, one band of a matrix at a time: memory does not grow with the model, nor with the range. Nothing but the
layer itself goes into its blob, so nodes that export different ranges make the blobs that one node would make of
the whole. `RESULT` is a manifest in which the blobs that were not exported have their sizes but no ids; no layers at
all, ``0:0``, make the *outline* of a model, for which the tensors need not be here. `join` makes one of several.

Run as a process of its own, which gives the memory of torch back. Needs the extra `export`.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.compress import BAND_NUMBERS, Format, Kind, Stored, compress, kind_of, layout, restore
from swarm.model.convert import REFUSED
from swarm.model.files import TOKENIZER_FILES, TOKENIZER_IRS
from swarm.model.layers import Graph, map_layers
from swarm.model.manifest import ABSENT, EMBEDDING, BlobRef, Manifest, TensorRef
from swarm.model.publish import ALIGNMENT, context_tokens, kv_bytes_per_token, write_graph
from swarm.model.skeleton import Weight, trace
from swarm.model.store import Store
from swarm.model.tokenizer import pack
from swarm.protocol.errors import ModelError, SwarmError, UsageError

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NNCF_CI": "1", "CI": "true"}
"""All of it is on this disk, and nobody else's business: with CI set, these packages send no figures home."""

_COUNTED = re.compile(r"[A-Za-z0-9]+_\d+")


@dataclass(frozen=True, slots=True)
class _Entry:
    """How a weight is stored in the blob of its part."""

    weight: Weight
    kind: Kind
    arrays: tuple[Stored, ...]
    names: tuple[str, ...]
    """Of the graph's parameters that stand for `arrays`."""


def export(
    checkpoint: Path, store: Store, name: str, source: str, start: int, end: int | None, format_: Format
) -> Manifest:
    """Put layers ``[start, end)`` into the store, to the last layer where `end` is None.

    The embedding comes with layer 0, the head with the last one. Blocking. Raises `UsageError`, `ModelError` and
    `StoreError`.
    """
    skeleton = trace(checkpoint)
    gc.collect()  # what the tracer leaves behind
    layers = skeleton.layers
    end = layers if end is None else end
    if not (0 <= start < end <= layers or start == end == 0):
        raise UsageError("no such layers", expected=f"a range within 0:{layers}", found=f"{start}:{end}")
    # Before any blob: the converter's names count the nodes that this process has made, and those depend on the range.
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(checkpoint, Path(folder), skeleton.settings)
        tokenizer = pack(Path(folder))
        context = context_tokens(Path(folder))
    entries = _replace_weights(skeleton.model, skeleton.weights, format_, layers)
    tied = not any(entry.weight.part == layers and len(entry.weight.shape) == 2 for entry in entries)
    tensors = open_checkpoint(checkpoint) if end else None
    blobs = {}
    for part in range(EMBEDDING, layers + 1):
        own = [entry for entry in entries if entry.weight.part == part]
        blobs[part] = _lay_out(own)
        if tensors is not None and start <= max(0, min(part, layers - 1)) < end:
            blobs[part] = _write_part(store, tensors, own, blobs[part])
    _name_by_place(skeleton.model)
    graph = Graph.of(skeleton.model)
    layer_map = map_layers(graph)
    return Manifest(
        name=name,
        source=source,
        hidden_size=graph.nodes[layer_map.embedded].get_output_partial_shape(0)[2].get_length(),
        vocabulary=graph.nodes[layer_map.result].get_output_partial_shape(0)[2].get_length(),
        context_tokens=context,
        kv_bytes_per_token=kv_bytes_per_token(graph, layer_map),
        graph=write_graph(store, skeleton.model),
        tokenizer=BlobRef(store.put_bytes(tokenizer), len(tokenizer)),
        embedding=blobs[EMBEDDING],
        layers=tuple(blobs[layer] for layer in range(layers)),
        head=blobs[layers],
        tied=tied,
    )


def _replace_weights(model: ov.Model, weights: Sequence[Weight], format_: Format, layers: int) -> list[_Entry]:
    """Parameters in the place of the weights, in the form that they are stored in."""
    entries: list[_Entry] = []
    parameters: list[ov.Node] = []
    for weight in weights:
        kind = kind_of(weight.shape, format_, weight.part in (EMBEDDING, layers))
        shape = weight.shape if len(weight.shape) == 2 else tuple(weight.node.get_output_shape(0))
        arrays = layout(kind, shape)
        made = [_stand_in(array, f"weight.{len(parameters) + i}") for i, array in enumerate(arrays)]
        parameters += made
        value = restore(kind, shape, made)
        for target in list(weight.node.output(0).get_target_inputs()):
            consumer = target.get_node()
            if len(weight.shape) == 2 and consumer.get_type_name() == "Convert":  # the tracer's own, to f32
                for behind in list(consumer.output(0).get_target_inputs()):
                    behind.replace_source_output(value.output(0))
            else:
                target.replace_source_output(value.output(0))
        entries.append(_Entry(weight, kind, arrays, tuple(node.get_friendly_name() for node in made)))
    model.add_parameters(parameters)
    model.validate_nodes_and_infer_types()
    return entries


def _name_by_place(model: ov.Model) -> None:
    """OpenVINO counts the nodes and models of a process in their names: count those of the graph, so that its blob is
    the same everywhere."""
    model.set_friendly_name("exported")
    for place, node in enumerate(model.get_ordered_ops()):
        if _COUNTED.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_{place}")


def _stand_in(array: Stored, name: str) -> ov.Node:
    parameter = ops.parameter(list(array.shape), getattr(ov.Type, array.type), name=name)
    parameter.output(0).set_names({name})
    return parameter


def _lay_out(entries: Sequence[_Entry]) -> BlobRef:
    """The blob of an embedding, a layer or a head before it is made; a tied head without weights is one byte."""
    tensors: list[TensorRef] = []
    end = 0
    for entry in entries:
        for array, name in zip(entry.arrays, entry.names, strict=True):
            offset = end + -end % ALIGNMENT
            tensors.append(TensorRef(name, array.type, array.shape, offset, array.bytes))
            end = offset + array.bytes
    return BlobRef(ABSENT, max(1, end), tuple(tensors))


def _write_part(store: Store, checkpoint: Checkpoint, entries: Sequence[_Entry], planned: BlobRef) -> BlobRef:
    places = iter(planned.tensors)
    end = 0
    with store.writer() as writer:
        for entry in entries:
            # Scales come behind the values they belong to: they wait, the values are written as they are made.
            waiting: list[list[memoryview]] = [[] for _ in entry.arrays]
            for array, pieces in zip(entry.arrays, waiting, strict=True):
                place = next(places)
                writer.write(bytes(place.offset - end))
                if array is entry.arrays[0]:
                    for band in _bands(checkpoint, entry):
                        writer.write(band[0])
                        for later, piece in zip(waiting[1:], band[1:], strict=True):
                            later.append(piece)
                for piece in pieces:
                    writer.write(piece)
                end = place.offset + place.bytes
        writer.write(bytes(planned.bytes - end))
        return replace(planned, id=writer.commit())


def _bands(checkpoint: Checkpoint, entry: _Entry) -> Iterator[list[memoryview]]:
    """A tensor as it is stored, some rows at a time."""
    weight = entry.weight
    shape = checkpoint.shape(weight.tensor)
    if shape != weight.shape:
        raise ModelError(
            "the checkpoint does not fit its configuration",
            expected=f"{weight.tensor} of {weight.shape}",
            found=str(shape),
        )
    rows = max(2, BAND_NUMBERS // math.prod(shape[1:])) if len(shape) == 2 else shape[0]
    for first in range(0, shape[0], rows):
        values = checkpoint.rows(weight.tensor, first, min(first + rows, shape[0]))
        yield compress(entry.kind, np.float32(1) + values if weight.plus_one else values)


def _write_tokenizer(checkpoint: Path, folder: Path, settings: str) -> None:
    """The tokenizer's files into `folder`: converted, unless the checkpoint brings them as IR already."""
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    (folder / "config.json").write_text(settings, encoding="utf-8")
    if all((folder / name).is_file() for name in TOKENIZER_IRS):
        return
    from optimum.exporters.openvino.convert import export_tokenizer
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds where files are missing or damaged
        raise UsageError(
            "the checkpoint has no tokenizer that can be read", expected="tokenizer.json", found=str(error)[:200]
        ) from error
    export_tokenizer(tokenizer, folder, task="text-generation-with-past")


def main(arguments: Sequence[str]) -> int:
    """Exit status 0, or `REFUSED` with the reason as the last line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m swarm.model.export", description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="directory with config.json and safetensors")
    parser.add_argument("store", type=Path, help="root of the layer store")
    parser.add_argument("result", type=Path, help="file for the manifest")
    parser.add_argument("--layers", default="0:", metavar="START:END", help="default: 0:, all; 0:0: the outline")
    parser.add_argument("--format", choices=[value.value for value in Format], default=Format.INT4.value)
    parser.add_argument("--name", default="", help="of the model (default: the directory's)")
    parser.add_argument("--source", default="", help="what the manifest names as its source")
    options = parser.parse_args(arguments)
    os.environ |= OFFLINE
    try:
        start, end = _read_range(options.layers)
        store = Store(options.store)
        store.open()
        name = options.name or options.checkpoint.resolve().name
        made = export(options.checkpoint, store, name, options.source, start, end, Format(options.format))
        options.result.write_bytes(made.encode())
    except ImportError as error:
        print(f"{error.name} is missing. Install the extra: pip install swarm-inference[export]", file=sys.stderr)
        return REFUSED
    except (SwarmError, OSError) as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return REFUSED
    return 0


def _read_range(text: str) -> tuple[int, int | None]:
    start, colon, end = text.partition(":")
    if not (colon and start.isdecimal() and (end.isdecimal() or not end)):
        raise UsageError("no range of layers", expected="START:END, such as 0:8", found=text[:40])
    return int(start), int(end) if end else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
