"""Plugin settings that follow the model."""

from __future__ import annotations

import pytest

from swarm.engine.devices import choose_device
from swarm.protocol.errors import UsageError


def test_an_unknown_device_is_refused_with_those_that_are_here() -> None:
    with pytest.raises(UsageError, match="CPU"):
        choose_device("TPU")


def test_the_cpu_is_the_default() -> None:
    assert choose_device(None) == choose_device("cpu") == "CPU"
