"""Plugin settings that follow the model."""

from __future__ import annotations

from pathlib import Path

import openvino as ov
import pytest

from swarm.engine.devices import MAX_WEIGHT_GROUP, choose_device, weight_group
from swarm.model.tiny import GROUP, tiny_model
from swarm.protocol.errors import UsageError


def test_activations_are_grouped_as_the_weights_are() -> None:
    assert weight_group(tiny_model()) == GROUP


@pytest.mark.model
def test_the_default_model_has_groups_of_32(smollm2_ir: Path) -> None:
    assert weight_group(ov.Core().read_model(smollm2_ir / "openvino_model.xml")) == 32


def test_a_model_without_groups_gets_the_largest() -> None:
    x = ov.opset13.parameter([1, 4], ov.Type.f32)
    assert weight_group(ov.Model([ov.opset13.relu(x)], [x], "none")) == MAX_WEIGHT_GROUP


def test_an_unknown_device_is_refused_with_those_that_are_here() -> None:
    with pytest.raises(UsageError, match="CPU"):
        choose_device("TPU")


def test_the_cpu_is_the_default() -> None:
    assert choose_device(None) == choose_device("cpu") == "CPU"
