"""The whole model's graph from its configuration alone: traced by optimum-intel, with weights that are not there.

Every matrix is a view into one region of memory that nobody touches, told by its address; OpenVINO's 16-bit tracing
does not compute with it. Norms and biases are random numbers, told by their values: the tracer folds them with what
stands beside them (Gemma's norms are ``1 + weight``). So the graph of a 70B model takes no more memory than that of a
small one with as many layers, and is the same on every node, whichever layers it holds.

Needs the extra `export`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from swarm.model.checkpoint import part_of
from swarm.protocol.errors import UnsupportedModelError, UsageError
from swarm.protocol.tensors import Array

FAMILIES = ("gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""`model_type` of the configurations that are tried."""

_APART = 64
"""Numbers between the addresses of two matrices."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant of the graph that stands for a tensor of the checkpoint."""

    tensor: str
    shape: tuple[int, ...]
    part: int
    """`EMBEDDING`, a layer, or the number of layers: the head."""
    node: ov.Node
    plus_one: bool
    """The graph wants ``1 + tensor``."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    model: ov.Model
    """Stateful, as a whole export's before compression."""
    weights: tuple[Weight, ...]
    """In the order of part and name."""
    layers: int
    settings: str
    """The configuration as the exporter saves it, JSON."""
    region: Any
    """What the matrices are views of; must outlive `model`."""


def trace(directory: Path) -> Skeleton:
    """From the ``config.json`` in `directory`. Blocking: some ten seconds, most of them imports.

    Raises `UsageError` where there is none or the family is not one of `FAMILIES`, and `UnsupportedModelError` where
    the graph does not use every tensor in a way that is known.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{directory} has no configuration that can be read", expected="config.json", found=str(error)[:200]
        ) from None
    if config.model_type not in FAMILIES:
        raise UsageError(f"a model of the family {config.model_type} cannot be exported", expected=", ".join(FAMILIES))
    with _no_weights():
        model = AutoModelForCausalLM.from_config(config).eval()
    model.tie_weights()
    _open_scaled_embeddings(model)
    region, addresses, probes = _give_weights(model)
    graph, settings = _export(model)
    layers: int = config.num_hidden_layers
    weights = _find_weights(graph, addresses, probes, dict(model.named_parameters()), layers)
    return Skeleton(graph, weights, layers, settings, region)


@contextlib.contextmanager
def _no_weights() -> Iterator[None]:
    """Modules made inside have parameters without memory; buffers, such as rotary frequencies, are real."""
    import torch

    register = torch.nn.Module.register_parameter

    def register_without_memory(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_without_memory
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def _open_scaled_embeddings(model: Any) -> None:
    """Gemma 3 scales inside its embedding, which 16-bit tracing then does not know as one: scale behind it."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and type(module) is not torch.nn.Embedding:
            if not hasattr(module, "embed_scale"):
                raise UnsupportedModelError("an unknown kind of embedding", found=type(module).__name__)
            module.__class__ = torch.nn.Embedding
            module.register_forward_hook(lambda scaled, _, output: output * scaled.embed_scale)


def _give_weights(model: Any) -> tuple[Any, dict[int, str], dict[str, Array]]:
    """The region, the name of the matrix at each address in it, and the numbers of each vector."""
    import torch

    parameters = dict(model.named_parameters())
    region = torch.empty(
        max(value.numel() for value in parameters.values()) + _APART * len(parameters), dtype=torch.float16
    )
    addresses, probes, made = {}, {}, {}
    for number, (name, value) in enumerate(parameters.items()):
        if value.dim() == 2:
            begin = _APART * number
            tensor = region[begin : begin + value.numel()].view(value.shape)
            addresses[tensor.data_ptr()] = name
        else:
            probes[name] = np.random.default_rng(number).standard_normal(value.shape).astype(np.float32)
            tensor = torch.from_numpy(probes[name])
        made[id(value)] = torch.nn.Parameter(tensor, requires_grad=False)
    for module in model.modules():
        for leaf, value in module.named_parameters(recurse=False):
            setattr(module, leaf, made[id(value)])
    return region, addresses, probes


def _export(model: Any) -> tuple[ov.Model, str]:
    """What optimum-intel would write to disk, and the configuration beside it."""
    from optimum.exporters.openvino import convert

    found: list[ov.Model] = []
    save = convert._save_model
    convert._save_model = lambda graph, *_, **__: found.append(graph)
    try:
        with tempfile.TemporaryDirectory() as folder:
            convert.export_from_model(
                model, folder, task="text-generation-with-past", stateful=True, patch_16bit_model=True
            )
            settings = Path(folder, "config.json").read_text(encoding="utf-8")
    finally:
        convert._save_model = save
    return found[0], settings


def _find_weights(
    graph: ov.Model, addresses: dict[int, str], probes: dict[str, Array], parameters: dict[str, Any], layers: int
) -> tuple[Weight, ...]:
    found = []
    vectors = _by_beginning(probes)
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "Constant" or not node.get_byte_size():
            continue
        data = node.data
        if node.get_element_type() == ov.Type.f16 and data.ctypes.data in addresses:
            found.append((addresses[data.ctypes.data], node, False))
        elif node.get_element_type() == ov.Type.f32:
            numbers = data.reshape(-1)
            name, plus_one, form = vectors.get((numbers.size, float(numbers[0])), ("", False, None))
            if form is not None and np.array_equal(numbers, form):
                found.append((name, node, plus_one))
    unknown = sorted(set(parameters) - {name for name, _, _ in found})
    if unknown:
        raise UnsupportedModelError(
            "the graph uses a tensor in a way that is not known",
            expected="each tensor as it is, or plus one",
            found=unknown[0],
        )
    weights = [
        Weight(name, tuple(parameters[name].shape), part_of(name, layers), node, plus_one)
        for name, node, plus_one in found
    ]
    return tuple(sorted(weights, key=lambda weight: (weight.part, weight.tensor)))


def _by_beginning(probes: dict[str, Array]) -> dict[tuple[int, float], tuple[str, bool, Array]]:
    """The vectors a constant can hold, by their length and first number."""
    forms = [
        (name, plus_one, 1 + probe if plus_one else probe)
        for name, probe in probes.items()
        for plus_one in (False, True)
    ]
    return {(form.size, float(form[0])): (name, plus_one, form) for name, plus_one, form in forms}
