"""OpenVINO devices, and the plugin settings under which the exactness rules hold."""

from __future__ import annotations

from collections import Counter
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


MIN_WEIGHT_GROUP, MAX_WEIGHT_GROUP = 32, 128
"""Of the groups in which activations are quantized; the plugin's kernels take 32, 64 and 128."""

_CPU = DeviceProfile(
    32,
    {
        # f32 sums with 8-bit dynamic quantization of activations (in groups: see `weight_group`) is the fastest setting
        # of the plugin for INT4 weights, and the rows of a batch stay independent of each other, bit for bit.
        "INFERENCE_PRECISION_HINT": "f32",
        # Quantized keys are scaled by channel over a block: rewriting rows of a block would change its other rows.
        "KV_CACHE_PRECISION": "f16",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    },
)
_GPU = DeviceProfile(16, {"KV_CACHE_PRECISION": "f16", "PERFORMANCE_HINT": "LATENCY"})

_PROFILES = {"CPU": _CPU, "GPU": _GPU}


def weight_group(model: ov.Model) -> int:
    """How many activations the CPU plugin should quantize together for `model`: as many as its weights share a scale.

    With larger groups than the weights have, the plugin falls back to a kernel that takes 1.6 to 1.9 times as long
    (SmolLM2 and a 1.5B model from GGUFs, groups of 32); with smaller ones it rescales more often than it needs to.
    """
    weights: Counter[int] = Counter()
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and node.get_output_element_type(0) in (ov.Type.u4, ov.Type.i4):
            shape = node.get_output_shape(0)
            if len(shape) == 3 and shape[2] > 1:
                weights[shape[2]] += node.get_byte_size()
    group = weights.most_common(1)[0][0] if weights else MAX_WEIGHT_GROUP
    return min(max(group, MIN_WEIGHT_GROUP), MAX_WEIGHT_GROUP)


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
