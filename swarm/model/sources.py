"""Where a model comes from: the embedded default, a directory, a ``.gguf`` file, the Hugging Face hub.

`resolve` looks quickly and refuses early; `pin` asks the hub what a name of it means now; `acquire` does the work and
ends in an IR directory with its tokenizers. All block: call them from a worker thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from swarm.model import embedded, gguf, hub
from swarm.model.convert import CONVERSION, REFUSED
from swarm.model.directory import check_graph, check_ir, read_config
from swarm.model.routes import HubName, check_checkpoint, choose, parse_hub_name
from swarm.model.scratch import is_abandoned, owned_name
from swarm.model.watched import bytes_under, module_command, package_path, run_watched
from swarm.protocol.errors import StoreError, UsageError
from swarm.protocol.messages import Phase

ProgressCallback: TypeAlias = Callable[[Phase, str, int, int], None]
"""(phase, label, done, total) in bytes, `total` 0 where it is not known; several times a second. What it raises stops
the work: the subprocess is ended and nothing half made stays, but for the beginning of a download."""

CONVERT_TIMEOUT_S = 3600.0
"""One conversion; a 1.5B model takes 20 s, and the largest that fits a PC a few minutes."""

_KNOWN = (
    f"nothing (for {embedded.NAME}), a directory with an OpenVINO IR, a .gguf file, "
    "or a name on the Hugging Face hub such as org/name"
)


@dataclass(frozen=True, slots=True)
class Source:
    kind: Literal["default", "ir", "gguf", "checkpoint", "hub"]
    spec: str
    """What names it again: ``default``, an absolute path, or a name on the hub."""
    name: str
    """For people: the last part of what they gave, so that `ring.choice` knows the model again by it."""
    path: Path | None = None
    """The directory or file; None for the default and the hub."""
    on_hub: HubName | None = None
    found: hub.Found | None = None
    """What the name on the hub means, once it is pinned."""
    quantization: str = ""

    @property
    def is_checkpoint(self) -> bool:
        """It is no IR and becomes none: `exporting` takes it from here."""
        return self.kind == "checkpoint" or (self.found is not None and self.found.route == "checkpoint")

    @property
    def revision(self) -> str:
        """The commit on the hub; empty for what does not come from there."""
        return self.found.commit if self.found else ""


def resolve(model: str | None) -> Source:
    """The source that ``--model`` names; None and ``default`` are the embedded default.

    Checks what can be checked at once, without the network. Raises `UsageError`.
    """
    if model in (None, "", "default"):
        return Source("default", "default", embedded.NAME)
    try:
        path = Path(model).expanduser().absolute()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user's home, a NUL, a name too long
        raise UsageError("cannot read the model's path", expected=_KNOWN, found=f"{model!r}: {error}"[:200]) from None
    if is_directory:
        return _resolve_directory(path)
    if is_file:
        return _resolve_gguf(path, path.stem)
    if name := parse_hub_name(model):
        title = Path(name.file).stem if name.file else name.repo.partition("/")[2]
        return Source("hub", str(name), title, on_hub=name)
    raise UsageError("no such model", expected=_KNOWN, found=repr(model)[:200], action="Check the path.")


def pin(source: Source, poll: Callable[[], None] = lambda: None) -> Source:
    """Of a source on the hub the one with its commit and files known; any other as it is. Asks the hub.

    Raises `UsageError` for what is not there or cannot be used, and `ModelError` where the hub cannot be reached.
    """
    if source.on_hub is None or source.found is not None:
        return source
    found = hub.look(source.on_hub, poll)
    if found.route == "checkpoint":
        require_exporter(source.name)
    return replace(source, found=found, quantization=found.quantization)


def acquire(source: Source, workdir: Path, progress: ProgressCallback) -> Path:
    """A directory with `IR_FILES`, or with a checkpoint: the source's own, or one under `workdir` that is reused.

    Raises `UsageError` where the model cannot be converted, `ModelError` where it cannot be fetched, `DeadlineError`
    where that takes too long, `StoreError` where the disk is full.
    """
    if source.kind in ("ir", "checkpoint"):
        assert source.path is not None
        return source.path
    with _scratch(workdir) as scratch:
        if source.kind == "hub":
            return _acquire_hub(
                pin(source, lambda: progress(Phase.DOWNLOAD, source.name, 0, 0)), workdir, scratch, progress
            )
        if source.kind == "default":

            def downloaded(done: int, total: int) -> None:
                progress(Phase.DOWNLOAD, source.name, done, total)

            file, key = embedded.default_gguf(workdir / "default", scratch, downloaded), embedded.SHA256[:16]
        else:
            assert source.path is not None
            file, key = source.path, _file_key(source.path)
        return _made(
            file,
            workdir / "ir" / f"{key}-{CONVERSION}",
            scratch,
            lambda done: progress(Phase.CONVERT, source.name, done, 0),
        )


def require_exporter(label: str) -> None:
    """Raises `UsageError` where this PC cannot export a checkpoint."""
    if importlib.util.find_spec("optimum") is None or importlib.util.find_spec("torch") is None:
        raise UsageError(
            f"{label} is a checkpoint, which has to be exported first",
            expected="the extra export (torch and optimum-intel)",
            found="a PC without it",
            action='Install it, pip install "swarm-inference[export]", or name an OpenVINO IR or a GGUF file of it.',
        )


# --- local files ------------------------------------------------------------------------------------------------------


def _resolve_directory(path: Path) -> Source:
    choice = choose(str(path), [entry.name for entry in path.iterdir() if entry.is_file()])
    if choice.route == "gguf":
        return _resolve_gguf(path / choice.files[0], path.name)
    if choice.route == "checkpoint":
        check_checkpoint(str(path), read_config(path / "config.json"))
        require_exporter(str(path))
        return Source("checkpoint", str(path), path.name, path)
    check_ir(path)
    return Source("ir", str(path), path.name, path)


def _resolve_gguf(path: Path, name: str) -> Source:
    header = gguf.read_header(path)
    gguf.check_convertible(header, path.name)
    return Source("gguf", str(path), name, path, quantization=gguf.quantization(header))


# --- the hub ----------------------------------------------------------------------------------------------------------


def _acquire_hub(source: Source, workdir: Path, scratch: Path, progress: ProgressCallback) -> Path:
    """Fetches what is needed of a pinned source, and makes an IR of a GGUF file; then that goes."""
    found = source.found
    assert found is not None
    target = workdir / "ir" / f"{hub.place_key(found)}-{CONVERSION}"
    if target.is_dir():
        return target
    directory = hub.fetch(
        found,
        workdir / "hub",
        lambda done, total: progress(Phase.DOWNLOAD, source.name, done, total),
        check_graph if found.route == "ir" else lambda _: None,
    )
    if found.route == "ir":
        check_ir(directory)
        return directory
    if found.route == "checkpoint":
        return directory
    file = directory / found.files[0].name
    made = _made(file, target, scratch, lambda done: progress(Phase.CONVERT, source.name, done, 0))
    if directory.is_relative_to(workdir):
        shutil.rmtree(directory, ignore_errors=True)
    return made


# --- conversion -------------------------------------------------------------------------------------------------------


def _made(source: Path, target: Path, scratch: Path, progress: Callable[[int], None]) -> Path:
    """`target`, the IR that is made of a GGUF file where it is not there yet."""
    if not target.is_dir():
        made = scratch / "converted" / "ir"
        made.parent.mkdir()
        _convert(source, made, progress)
        _move(made, target)
    return target


def _convert(source: Path, target: Path, progress: Callable[[int], None]) -> None:
    status, message = run_watched(
        module_command("swarm.model.convert", str(source), str(target)),
        CONVERT_TIMEOUT_S,
        lambda: progress(bytes_under(target.parent, links=False)),
        target.parent.with_name("stderr"),
        package_path(),
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


def _file_key(path: Path) -> str:
    """Names the present content of a file, or of a directory's files, without reading all of it."""
    files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files]
    text = "|".join(f"{file}|{status.st_size}|{status.st_mtime_ns}" for file, status in stats)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
