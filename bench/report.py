"""How benchmarks measure and report: on one core, in turns, medians with their spread, one line of JSON last."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psutil

RESULTS = Path(__file__).parent / "results"

ROUNDS = 5
"""Counted rounds at least, after one for warming up."""

T = TypeVar("T")


def cores() -> list[int]:
    """The cores that this process may use."""
    if not hasattr(psutil.Process, "cpu_affinity"):  # macOS has none
        return list(range(psutil.cpu_count() or 1))
    return list(psutil.Process().cpu_affinity())


def pin(core: int) -> None:
    """From now on this process runs on `core` alone; before OpenVINO is first used: it reads the mask once."""
    if hasattr(psutil.Process, "cpu_affinity"):
        psutil.Process().cpu_affinity([core])


def on_core(core: int, function: Callable[..., T], *arguments: Any) -> T:
    """Run a module's function in a process of its own, pinned to `core`, and return what it returns."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=pin, initargs=(core,)) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def first_in_line(wanted: bool, processes: Sequence[int] = ()) -> Iterator[None]:
    """Where `wanted`: this process and those go before everything else on their cores, for a turn of seconds.

    For a machine that others use at the same time. Linux, as root; raises ``PermissionError`` for others. A draft model
    and a stage on one core take turns only as often as ``/proc/sys/kernel/sched_rr_timeslice_ms`` says: 4 is like
    everyday scheduling.
    """
    found = [psutil.Process(), *map(psutil.Process, processes)] if wanted else []
    began = time.perf_counter()
    _schedule(found, realtime=True)
    try:
        yield
    finally:
        _schedule(found, realtime=False)
    if wanted:
        time.sleep((time.perf_counter() - began) / 2)  # the others' turn


def _schedule(processes: Sequence[psutil.Process], *, realtime: bool) -> None:
    if not processes:
        return
    if sys.platform != "linux":
        raise PermissionError("only on Linux")
    for process in processes:
        for thread in process.threads():
            # A main thread, with its event loop, goes before the threads that compute: it does by itself otherwise.
            priority = 1 + (thread.id == process.pid) if realtime else 0
            with suppress(ProcessLookupError):  # it ended meanwhile
                policy = os.SCHED_RR if realtime else os.SCHED_OTHER
                os.sched_setscheduler(thread.id, policy, os.sched_param(priority))


def in_turns(parties: Mapping[str, Callable[[], T]], rounds: int = ROUNDS) -> dict[str, list[T]]:
    """Call every party once for warming up, then `rounds` times A B C, A B C, …: what each counted call returned."""
    for call in parties.values():
        call()
    results: dict[str, list[T]] = {name: [] for name in parties}
    for _ in range(rounds):
        for name, call in parties.items():
            results[name].append(call())
    return results


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round, so that what slowed down both counts in neither."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> str:
    """``median [least to most]``."""
    return f"{statistics.median(values):.3f} [{min(values):.3f} to {max(values):.3f}]"


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def machine() -> dict[str, str | int]:
    """What it ran on."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "openvino": version("openvino"),
        "openvino_genai": version("openvino-genai"),
    }


def report(
    bench: str, figures: Mapping[str, float], settings: Mapping[str, Any], *, simulated: bool = False, keep: bool = True
) -> None:
    """Print the result as the last line and, with `keep`, write it to `RESULTS`."""
    result = {
        "bench": bench,
        "figures": {name: round(value, 4) for name, value in figures.items()},
        "simulated": simulated,
        "settings": {**settings, "machine": machine(), "date": time.strftime("%Y-%m-%d")},
    }
    if keep:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{bench}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.stderr.flush()
    print(json.dumps(result), flush=True)


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
