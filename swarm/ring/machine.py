"""Facts about this PC: its memory, how fast it streams weights, its name. Numbers only; nothing is decided here but
how much memory to offer."""

from __future__ import annotations

import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import openvino as ov
import psutil
from openvino import opset13 as ops

from swarm.protocol.errors import DeviceError
from swarm.protocol.limits import MAX_NAME_CHARS
from swarm.protocol.tensors import Array

RUNTIME_BYTES = 512 * 1024**2
"""Kept for our own process beyond weights and KV: interpreter, OpenVINO, activations, buffers of the links."""

SYSTEM_SHARE = 0.05
"""Kept for the person at the PC, of all memory: what is available now will not all stay so."""

MIN_SYSTEM_BYTES = 512 * 1024**2

MAX_SHARE = 0.8
"""Never offer more than this share of all memory, however idle the PC is."""

_PROBE_SIZE = 2048
_PROBE_LAYERS = 24
"""Square INT4 layers of the speed probe: 52 MB of weights, more than the caches of an office PC hold."""

_PROBE_GROUP = 128
_PROBE_S = 0.15


@dataclass(frozen=True, slots=True)
class Memory:
    """Of this machine, or of the container we run in where that is less."""

    total: int
    available: int
    """Free, or held only by caches that the system gives back."""


def advertised_memory(total: int, available: int) -> int:
    """Bytes that a node offers for weights and KV by default.

    What is available now, less headroom for our own runtime and for the person's programs, and never more than
    `MAX_SHARE` of all: a PC that swaps slows the whole ring, so less is better than too much. 0 where nothing is left.
    """
    headroom = RUNTIME_BYTES + max(MIN_SYSTEM_BYTES, int(total * SYSTEM_SHARE))
    return max(0, min(available - headroom, int(total * MAX_SHARE)))


def memory() -> Memory:
    """Measured now. On Linux a control group's limit counts where it is lower."""
    machine = psutil.virtual_memory()
    found = Memory(machine.total, machine.available)
    return within_control_group(found, Path("/")) if sys.platform.startswith("linux") else found


def within_control_group(machine: Memory, root: Path) -> Memory:
    """`machine`, cut down to the control groups (version 1 or 2) that this process is in; `root` is ``/``."""
    total, available = machine.total, machine.available
    for folder, limit_name, usage_name in _control_groups(root):
        limit = _read_number(folder / limit_name)
        if limit is None or limit >= machine.total:
            continue
        usage = (_read_number(folder / usage_name) or 0) - _inactive_file(folder / "memory.stat")
        total = min(total, limit)
        available = min(available, max(0, limit - usage))
    return Memory(total, available)


def _control_groups(root: Path) -> list[tuple[Path, str, str]]:
    """(folder, name of its limit file, name of its usage file) of our memory groups, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers not in ("", "memory") or not path:
            continue
        base = root / "sys/fs/cgroup" / controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        inside = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, which is not visible there; the group itself is then the base.
        groups += [(base / part, *names) for part in (inside, *inside.parents) if ".." not in part.parts]
    return groups


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def _inactive_file(stat: Path) -> int:
    """Cache that is given back under pressure, bytes."""
    try:
        fields = dict(line.split(maxsplit=1) for line in stat.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def default_name() -> str:
    """A friendly name for this node: the PC's, without its domain, in the letters that `config.parse_name` takes."""
    return friendly_name(socket.gethostname())


def friendly_name(hostname: str) -> str:
    name = re.sub(r"[^\w .()+-]+", "-", hostname.partition(".")[0]).strip(" -")
    return name[:MAX_NAME_CHARS].rstrip() or "node"


def measure_speed(device: str = "CPU") -> float:
    """Weights streamed by a decode step on `device`, bytes per second. Blocks for a second or two: use a thread.

    Times a chain of INT4 matrix multiplications, the kernel that decoding spends its time in; takes 150 MB meanwhile.
    Raises `DeviceError`.
    """
    try:
        model, weight_bytes = _probe()
        compiled = ov.Core().compile_model(model, device, {"PERFORMANCE_HINT": "LATENCY"})
        request = compiled.create_infer_request()
        rows = np.ones((2, _PROBE_SIZE), np.float32)
        request.infer({0: rows})  # the first one repacks the weights
        return weight_bytes / _least_seconds(request, rows)
    except RuntimeError as error:
        raise DeviceError(
            f"the device {device} did not run the speed probe",
            found=str(error).strip().splitlines()[-1][:200],
            action="Name another with --device, such as CPU.",
        ) from error


def _least_seconds(request: ov.InferRequest, rows: Array) -> float:
    """Of several: what else runs on this PC meanwhile only makes it longer."""
    times: list[float] = []
    end = time.perf_counter() + _PROBE_S
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        request.infer({0: rows})
        times.append(time.perf_counter() - begin)
    return min(times)


def _probe() -> tuple[ov.Model, int]:
    """A chain of compressed matrix multiplications ``[rows, size] -> [rows, size]`` and the bytes of its weights."""
    size, groups = _PROBE_SIZE, _PROBE_SIZE // _PROBE_GROUP
    rows = ops.parameter([-1, size], np.float32)
    hidden = rows
    weight_bytes = 0
    for _ in range(_PROBE_LAYERS):
        packed = ov.Tensor(ov.Type.i4, ov.Shape([size, groups, _PROBE_GROUP]))
        packed.data[:] = 0x17
        scale = np.full((size, groups, 1), 1e-3, np.float16)
        weights = ops.multiply(ops.convert(ops.constant(packed), np.float16), ops.constant(scale))
        weights = ops.convert(ops.reshape(weights, [size, size], special_zero=False), np.float32)
        hidden = ops.matmul(hidden, weights, False, True)
        weight_bytes += packed.byte_size + scale.nbytes
    return ov.Model([hidden], [rows]), weight_bytes
