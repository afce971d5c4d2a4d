"""The real models that benchmarks run, made once into the cache that tests use too.

`qwen_int4` is what ``optimum-cli export openvino --weight-format int4 --sym --group-size 128 --ratio 1.0`` gives: INT4
symmetric in groups of 128 along the input axis, the embedding and the head INT8 by row. It is made without torch, by
quantizing anew, in the graph, the weights that openvino_genai took from the GGUF.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from swarm.engine.shortlist import Shortlist, most_needed
from swarm.model.convert import convert
from swarm.model.scratch import owned_name
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.tensors import Array
from tests.real_models import (
    cache_directory,
    draft_gguf,
    draft_ir,
    qwen_gguf,
    qwen_ir,
    smollm2_gguf,
    smollm2_ir,
)

GROUP = 128
_ROWS = 16_384  # of a weight in memory as f32 at once
_SMALLEST = np.float32(np.finfo(np.float32).eps)


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: IR directory."""
    return smollm2_ir(cache_directory())


def qwen() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: IR directory."""
    return qwen_ir(cache_directory())


def draft() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, Q4_K_M with most weights in Q5_0 (INT8 in the IR): IR directory."""
    return draft_ir(cache_directory())


def gguf_file(model: str) -> Path:
    """What ``smollm2``, ``qwen`` or ``draft`` was made from."""
    return {"smollm2": smollm2_gguf, "qwen": qwen_gguf, "draft": draft_gguf}[model](cache_directory())


def as_written(model: str) -> Path:
    """The weights just as openvino_genai takes them from the GGUF: IR directory."""
    target = cache_directory() / "as-written" / model
    if not target.is_dir():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(convert, gguf_file(model), target, True).result()
    return target


def qwen_int4() -> Path:
    """The same, INT4 symmetric: IR directory. Made once, in about a minute."""
    return _int4_ir("qwen", "qwen-int4-sym")


def draft_int4() -> Path:
    """The draft, INT4 symmetric: IR directory. Made once, in about half a minute."""
    return _int4_ir("draft", "draft-int4-sym")


def shortlist(ir: Path) -> Shortlist | None:
    """What a draft with this tokenizer draws from, as in the product."""
    tokenizer = Tokenizer.load(ir)
    return most_needed(tokenizer.tokens(), tokenizer.stop_tokens, tokenizer.vocabulary_size)


def _int4_ir(model: str, name: str) -> Path:
    target = cache_directory() / name
    if target.is_dir():
        return target
    scratch = cache_directory() / "tmp" / owned_name()
    try:
        requantize(as_written(model), scratch)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def requantize(source: Path, target: Path) -> None:
    """Write the IR in `source`, made from a GGUF, to the new directory `target` with other weights."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("openvino_model.*"))
    model = ov.Core().read_model(source / "openvino_model.xml")
    weights = [node for node in model.get_ordered_ops() if _is_weight(node)]
    head = model.get_results()[0].input_value(0).get_node().input_value(1).get_node()
    for node in weights:
        consumer = next(iter(node.output(0).get_target_inputs())).get_node()
        by_row = consumer.get_type_name() == "Gather" or node.get_name() == head.get_name()
        made = _int8(node) if by_row else _int4(node)
        for use in list(node.output(0).get_target_inputs()):
            use.replace_source_output(made.output(0))
    model.validate_nodes_and_infer_types()
    ov.serialize(model, target / "openvino_model.xml")


def int4_symmetric(weight: Array) -> tuple[Array, Array]:
    """f32 ``[out, in]`` to integers in [-8, 7] ``[out, groups, GROUP]`` and f32 scales ``[out, groups, 1]``.

    nncf's formula: the scale has the sign that puts the value of largest magnitude at -8.
    """
    grouped = weight.reshape(len(weight), -1, GROUP)
    low, high = np.abs(grouped.min(-1, keepdims=True)), grouped.max(-1, keepdims=True)
    scale = np.where(low >= high, low, -high) / 8
    scale = np.where(np.abs(scale) < _SMALLEST, _SMALLEST, scale)
    return np.clip(np.rint(grouped / scale), -8, 7).astype(np.int8), scale


def int8_asymmetric(weight: Array) -> tuple[Array, Array, Array]:
    """f32 ``[out, in]`` to u8 ``[out, in]`` with u8 zero points and f32 scales ``[out, 1]``."""
    low = np.minimum(weight.min(-1, keepdims=True), 0)
    high = np.maximum(weight.max(-1, keepdims=True), 0)
    scale = np.maximum((high - low) / 255, _SMALLEST)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    return np.clip(np.rint(weight / scale + zero), 0, 255).astype(np.uint8), zero.astype(np.uint8), scale


def _is_weight(node: ov.Node) -> bool:
    """The last node of Constant, Convert, Subtract, Multiply, Reshape, Convert."""
    for kind in ("Convert", "Reshape", "Multiply", "Subtract", "Convert", "Constant"):
        if node.get_type_name() != kind:
            return False
        if kind != "Constant":
            node = node.input_value(0).get_node()
    return True


def _int4(node: ov.Node) -> ov.Node:
    rows, columns = node.get_output_shape(0)
    packed, scales = [], []
    for weight in _row_blocks(node):
        values, scale = int4_symmetric(weight)
        nibbles = values.reshape(-1, 2).view(np.uint8) & 0xF
        packed.append(nibbles[:, 0] | nibbles[:, 1] << 4)
        scales.append(scale.astype(np.float16))
    # A tensor of its own memory: a constant made from one over a numpy array does not keep the array alive.
    values = ov.Tensor(ov.Type.i4, ov.Shape([rows, columns // GROUP, GROUP]))
    values.data.reshape(-1).view(np.uint8)[:] = np.concatenate(packed)
    scaled = ops.multiply(ops.convert(ops.constant(values), "f16"), ops.constant(np.concatenate(scales)))
    return ops.convert(ops.reshape(scaled, np.array([rows, columns]), special_zero=False), "f32")


def _int8(node: ov.Node) -> ov.Node:
    parts = [int8_asymmetric(weight) for weight in _row_blocks(node)]
    values, zeros, scales = (np.concatenate(part) for part in zip(*parts, strict=True))
    shifted = ops.subtract(ops.convert(ops.constant(values), "f16"), ops.convert(ops.constant(zeros), "f16"))
    return ops.convert(ops.multiply(shifted, ops.constant(scales.astype(np.float16))), "f32")


def _row_blocks(node: ov.Node) -> Iterator[Array]:
    """The weight that `node` decompresses, as f32 ``[rows, in]``, some rows at a time."""
    multiply = node.input_value(0).get_node().input_value(0).get_node()
    subtract = multiply.input_value(0).get_node()
    values, zeros = (_integers(subtract.input_value(i).get_node().input_value(0).get_node()) for i in (0, 1))
    scales = multiply.input_value(1).get_node().data
    for first in range(0, len(values), _ROWS):
        block = slice(first, first + _ROWS)
        weight = (values[block].astype(np.float32) - zeros[block]) * scales[block].astype(np.float32)
        yield weight.reshape(len(weight), -1)


def _integers(constant: ov.Node) -> Array:
    """A u4 or u8 constant as u8."""
    data = constant.get_tensor_view().data
    if constant.get_output_element_type(0) == ov.Type.u4:
        packed = data.reshape(-1).view(np.uint8)
        data = np.stack([packed & 0xF, packed >> 4], -1)
    unpacked: Array = data.reshape(constant.get_output_shape(0))
    return unpacked


if __name__ == "__main__":
    print(qwen_int4(), draft_int4())
