"""Small changes to small graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset13 as ops

from swarm.model.tiny import tiny_model

Node = Any
"""openvino.Node; its operators are not typed."""


def edited(model: ov.Model, folder: Path, *changes: tuple[str, str]) -> ov.Model:
    """`model` with text of its XML replaced."""
    xml, weights = folder / "edited.xml", folder / "edited.bin"
    ov.serialize(model, xml, weights)
    text = xml.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return ov.Core().read_model(text.encode(), weights.read_bytes())


def with_results(model: ov.Model, outputs: Sequence[Node]) -> ov.Model:
    """`model` with other outputs."""
    return ov.Model([ops.result(output) for output in outputs], model.get_sinks(), model.get_parameters(), "changed")


def rewire(node: Node, port: int, source: Node) -> None:
    """Let input `port` of `node` read from `source`."""
    output = source if isinstance(source, ov.Output) else source.output(0)
    node.input(port).replace_source_output(output)


def of_type(model: ov.Model, kind: str) -> list[Node]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def attentions(model: ov.Model) -> list[Node]:
    """One for each layer, in order."""
    return of_type(model, "ScaledDotProductAttention")


def caches(model: ov.Model) -> list[Node]:
    """The ReadValues, keys and values of layer after layer."""
    return sorted(of_type(model, "ReadValue"), key=lambda node: node.get_variable_id())


SHARING = 4
"""Layers of `sharing` with a cache of their own."""


def sharing(*shared: int) -> ov.Model:
    """A tiny model with more layers than `SHARING`, which read the keys and values of the layers `shared`."""
    model = tiny_model(SHARING + len(shared))
    layers = attentions(model)
    for reader, source in zip(layers[SHARING:], shared, strict=True):
        for port in (1, 2):
            rewire(reader, port, layers[source].input_value(port))
    sinks = [sink for sink in model.get_sinks() if int(sink.get_variable_id().split(".")[1]) < SHARING]
    return ov.Model(model.get_results(), sinks, model.get_parameters(), "sharing")
