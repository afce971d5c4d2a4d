"""A small decoder with seeded random weights, built here node by node.

It has what the exactness rules are about (INT4 weights in groups, rotary positions, grouped-query attention over
a stateful cache) and nothing else: the self-test of a device runs it, and tests that need a graph but no language.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

Node: TypeAlias = Any
"""openvino.Node; its operators are not typed."""

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, VOCABULARY, GROUP = 256, 4, 2, 64, 512, 512, 32


def tiny_model(layers: int = 3, seed: int = 7) -> ov.Model:
    """A stateful text-generation graph like an exporter's: ``input_ids … -> logits [batch, rows, 512]``."""
    return _Builder(np.random.default_rng(seed)).build(layers)


class _Builder:
    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._sinks: list[Node] = []
        self._variables: list[Variable] = []

    def build(self, layers: int) -> ov.Model:
        ids = _parameter("input_ids", [-1, -1], ov.Type.i64)
        mask = _parameter("attention_mask", [-1, -1], ov.Type.i64)
        positions = _parameter("position_ids", [-1, -1], ov.Type.i64)
        beams = _parameter("beam_idx", [-1], ov.Type.i32)
        table = self._random.standard_normal((VOCABULARY, HIDDEN)).astype(np.float16)
        embedding = ops.convert(ops.constant(table), ov.Type.f32)
        x = ops.gather(embedding, ops.convert(ids, ov.Type.i32), _scalar(0, np.int32))
        batch = ops.gather(ops.shape_of(ids), _list(0), _scalar(0))
        rotary = self._rotary(positions)
        causal = _mask(ids, mask)
        for layer in range(layers):
            x = ops.add(x, self._attention(_norm(x), layer, beams, batch, rotary, causal))
            x = ops.add(x, self._feed_forward(_norm(x)))
        logits = self._linear(_norm(x), VOCABULARY, HIDDEN)
        result = ops.result(logits)
        logits.output(0).set_names({"logits"})
        return ov.Model([result], self._sinks, [ids, mask, positions, beams], self._variables, "tiny")

    def _linear(self, x: Node, outputs: int, inputs: int) -> Node:
        """INT4 weights ``[outputs, inputs]`` with an f16 scale and a zero point for each group."""
        groups = inputs // GROUP
        packed = self._random.integers(0, 256, outputs * inputs // 2, dtype=np.uint8)
        zeros = self._random.integers(0, 256, outputs * groups // 2, dtype=np.uint8)
        centred = ops.subtract(_packed(packed, [outputs, groups, GROUP]), _packed(zeros, [outputs, groups, 1]))
        return _product(x, self._scaled(centred, outputs, inputs, GROUP, 5 * inputs**0.5))

    def _linear8(self, x: Node, outputs: int, inputs: int) -> Node:
        """INT8 weights with a scale and a zero point for each group of 16, as Q6_K tensors of a GGUF arrive."""
        groups = inputs // 16
        weights = ops.constant(self._random.integers(0, 256, (outputs, groups, 16), dtype=np.uint8))
        zeros = ops.constant(self._random.integers(120, 136, (outputs, groups, 1), dtype=np.uint8))
        centred = ops.subtract(ops.convert(weights, ov.Type.f16), ops.convert(zeros, ov.Type.f16))
        return _product(x, self._scaled(centred, outputs, inputs, 16, 80 * inputs**0.5))

    def _scaled(self, centred: Node, outputs: int, inputs: int, group: int, divisor: float) -> Node:
        """`centred` times a random f16 scale for each group, as a matrix ``[outputs, inputs]``."""
        scale = self._random.uniform(0.5, 1.5, (outputs, inputs // group, 1)) / divisor
        decompressed = ops.multiply(centred, ops.constant(scale.astype(np.float16)))
        return ops.reshape(decompressed, _list(outputs, inputs), False)

    def _attention(self, x: Node, layer: int, beams: Node, batch: Node, rotary: Node, causal: Node) -> Node:
        query = _rotate(_heads(self._linear(x, HEADS * HEAD_SIZE, HIDDEN), HEADS), rotary)
        key = _rotate(_heads(self._linear(x, KV_HEADS * HEAD_SIZE, HIDDEN), KV_HEADS), rotary)
        value = _heads(self._linear(x, KV_HEADS * HEAD_SIZE, HIDDEN), KV_HEADS)
        key = _repeat(self._cached(key, f"past_key_values.{layer}.keypresent.{layer}.key", beams, batch), batch)
        value = _repeat(self._cached(value, f"past_key_values.{layer}.valuepresent.{layer}.value", beams, batch), batch)
        mixed = ops.scaled_dot_product_attention(query, key, value, causal)
        joined = ops.reshape(ops.transpose(mixed, _list(0, 2, 1, 3)), _list(0, 0, HEADS * HEAD_SIZE), True)
        return self._linear(joined, HIDDEN, HEADS * HEAD_SIZE)

    def _cached(self, new: Node, name: str, beams: Node, batch: Node) -> Node:
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, KV_HEADS, -1, HEAD_SIZE])
        info.data_type = ov.Type.f32
        info.variable_id = name
        variable = Variable(info)
        self._variables.append(variable)
        shape = ops.concat([batch, _list(KV_HEADS), _list(0), _list(HEAD_SIZE)], 0)
        past = ops.read_value(ops.broadcast(_scalar(0.0, np.float32), shape), variable)
        total = ops.concat([ops.gather(past, beams, _scalar(0)), new], 2)
        self._sinks.append(ops.assign(total, variable))
        return total

    def _feed_forward(self, x: Node) -> Node:
        gate = ops.swish(self._linear(x, INTERMEDIATE, HIDDEN))
        return self._linear8(ops.multiply(gate, self._linear(x, INTERMEDIATE, HIDDEN)), HIDDEN, INTERMEDIATE)

    def _rotary(self, positions: Node) -> tuple[Node, Node]:
        frequencies = 10_000.0 ** -(np.arange(0, HEAD_SIZE, 2, dtype=np.float32) / HEAD_SIZE)
        angles = ops.multiply(
            ops.unsqueeze(ops.convert(positions, ov.Type.f32), _list(2)), ops.constant(frequencies[None, None])
        )
        both = ops.unsqueeze(ops.concat([angles, angles], 2), _list(1))
        return ops.cos(both), ops.sin(both)


def _parameter(name: str, shape: list[int], kind: ov.Type) -> Node:
    parameter = ops.parameter(shape, kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _packed(data: npt.NDArray[np.uint8], shape: list[int]) -> Node:
    """Two u4 a byte, as f16."""
    return ops.convert(ops.constant(ov.Tensor(data, ov.Shape(shape), ov.Type.u4), shared_memory=False), ov.Type.f16)


def _product(x: Node, weights: Node) -> Node:
    return ops.matmul(x, ops.convert(weights, ov.Type.f32), False, True)


def _scalar(value: float, kind: Any = np.int64) -> Node:
    return ops.constant(np.array(value, kind))


def _list(*values: int) -> Node:
    return ops.constant(np.array(values, np.int64))


def _norm(x: Node) -> Node:
    """RMS norm, in the form that plugins fuse."""
    power = ops.power(x, ops.constant(np.array([[[2.0]]], np.float32)))
    mean = ops.add(ops.reduce_mean(power, _list(-1), True), ops.constant(np.array([[[1e-5]]], np.float32)))
    scaled = ops.multiply(ops.divide(ops.constant(np.array([[[1.0]]], np.float32)), ops.sqrt(mean)), x)
    return ops.multiply(scaled, ops.constant(np.full((1, 1, HIDDEN), 0.9, np.float32)))


def _heads(x: Node, heads: int) -> Node:
    return ops.transpose(ops.reshape(x, _list(0, 0, heads, HEAD_SIZE), True), _list(0, 2, 1, 3))


def _rotate(x: Node, rotary: Node) -> Node:
    cos, sin = rotary
    half = HEAD_SIZE // 2
    left = ops.slice(x, _list(0), _list(half), _list(1), _list(3))
    right = ops.slice(x, _list(half), _list(2**62), _list(1), _list(3))
    minus = ops.multiply(right, ops.constant(np.array([[[[-1.0]]]], np.float32)))
    return ops.add(ops.multiply(x, cos), ops.multiply(ops.concat([minus, left], 3), sin))


def _repeat(x: Node, batch: Node) -> Node:
    """Each key or value head once for every query head of its group."""
    group = HEADS // KV_HEADS
    shape = ops.concat([batch, _list(KV_HEADS), _list(group), _list(1), _list(HEAD_SIZE)], 0)
    spread = ops.broadcast(ops.unsqueeze(x, _list(2)), shape, broadcast_spec="BIDIRECTIONAL")
    return ops.reshape(spread, _list(0, HEADS, -1, HEAD_SIZE), True)


def _mask(ids: Node, mask: Node) -> Node:
    """Additive causal mask ``[1, 1, rows, total]``."""
    rows = ops.gather(ops.shape_of(ids), _scalar(1), _scalar(0))
    total = ops.gather(ops.shape_of(mask), _scalar(1), _scalar(0))
    keys = ops.unsqueeze(ops.range(_scalar(0), total, _scalar(1), ov.Type.i64), _list(0))
    queries = ops.unsqueeze(ops.range(ops.subtract(total, rows), total, _scalar(1), ov.Type.i64), _list(1))
    hidden = ops.select(ops.greater(keys, queries), _scalar(-65504.0, np.float32), _scalar(0.0, np.float32))
    return ops.unsqueeze(hidden, _list(0, 1))
