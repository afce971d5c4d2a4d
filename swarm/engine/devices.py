"""OpenVINO devices, and the plugin settings under which the exactness rules hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import openvino as ov

from swarm.protocol.errors import UsageError


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """How a kind of device is driven."""

    block_tokens: int
    """Positions in a block of its paged attention."""
    properties: dict[str, Any] = field(default_factory=dict)
    model_per_session: bool = False
    """Of the stateful engine: each session gets a compiled model of its own, weights and all."""
    keeps_compiled: bool = False
    """Compiling takes long, and its plugin can take up again what it compiled before (``CACHE_DIR``)."""


# Nothing compiled is kept for the CPU: openvino 2026.4 writes a file as large as the weights, cannot read it back for a
# paged shard (the head sizes of its attention are lost), and compiles anew; the weights are packed at the first forward
# in any case.
_CPU = DeviceProfile(
    32,
    {
        # f32 sums with 8-bit dynamic quantization of activations (in groups: see `model.grouping`) is the fastest
        # setting of the plugin for INT4 weights, and the rows of a batch stay independent of each other, bit for bit.
        "INFERENCE_PRECISION_HINT": "f32",
        # Quantized keys are scaled by channel over a block: rewriting rows of a block would change its other rows.
        "KV_CACHE_PRECISION": "f16",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    },
)
_GPU = DeviceProfile(
    16,
    {"KV_CACHE_PRECISION": "f16", "PERFORMANCE_HINT": "LATENCY"},
    # A reset of one request's cache breaks those of its siblings (arXiv 2608.19147).
    model_per_session=True,
    keeps_compiled=True,
)

_PROFILES = {"CPU": _CPU, "GPU": _GPU}


def usable_devices() -> list[str]:
    """OpenVINO's names of the devices here that can run shards."""
    available: list[str] = ov.Core().available_devices
    return [name for name in available if name.split(".")[0] in _PROFILES]


def choose_device(wanted: str | None) -> str:
    """The OpenVINO name of the device to run on. Raises `UsageError` for one that is not here or cannot run shards."""
    usable = usable_devices()
    if wanted is None:
        return "CPU"
    for name in usable:
        if wanted.upper() in (name, name.split(".")[0]):
            return name
    raise UsageError(
        f"no device {wanted!r}",
        expected=" or ".join(usable) or "a CPU",
        found=", ".join(ov.Core().available_devices) or "no OpenVINO device",
        action="Leave out --device to use the CPU.",
    )


def profile(device: str) -> DeviceProfile:
    return _PROFILES[device.split(".")[0]]
