"""Work in a process of its own: it can be stopped at any time, its memory goes back, and a crash is only an error."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.protocol.errors import DeadlineError

_POLL_S = 0.2


def module_command(module: str, *arguments: str) -> list[str]:
    """``python -m module arguments…`` with the Python that runs."""
    return [sys.executable, "-m", module, *arguments]


def package_path() -> dict[str, str]:
    """The environment with which a subprocess finds this very package, whatever directory it starts in."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def run_watched(
    command: Sequence[str],
    timeout_s: float,
    poll: Callable[[], None],
    log: Path,
    environment: dict[str, str],
    directory: Path | None = None,
) -> tuple[int, str]:
    """Runs `command` and calls `poll` several times a second: (exit status, last line of its errors).

    What `poll` raises ends the process, as does the deadline, with a `DeadlineError`.
    """
    deadline = time.monotonic() + timeout_s
    with log.open("w+b") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | environment,
            cwd=directory,
        )
        try:
            while True:
                poll()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(_POLL_S)
                    break
                if time.monotonic() > deadline:
                    name = " ".join(command[1:4])
                    raise DeadlineError(f"{name} did not end", expected=f"at most {timeout_s:.0f} s", found="longer")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        poll()
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("WARNING", "[notice]", "DEPRECATION"))]
    return status, lines[-1].removeprefix("ERROR: ")[:500] if lines else ""


def bytes_under(directory: Path, *, links: bool = True) -> int:
    """Size of the files under `directory`; without `links`, those that have another name elsewhere do not count."""
    total = 0
    for folder, _, files in os.walk(directory):  # unlike `rglob` it goes on where a folder is gone by now
        for name in files:
            with contextlib.suppress(OSError):  # and so may a file
                status = Path(folder, name).stat()
                if links or status.st_nlink == 1:
                    total += status.st_size
    return total
