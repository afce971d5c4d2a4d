"""The Hugging Face hub: which files of a model are needed, and the fetching of them. Blocking.

`hub_client` does the talking, in a process of its own that can be stopped at any time. What was fetched until then
stays and is gone on with. Files that lie in the hub's own cache (``HF_HOME``) are used from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarm.model.checkpoint import files_of, is_weights
from swarm.model.routes import HubName, Route
from swarm.model.scratch import is_abandoned, owned_name
from swarm.model.watched import module_command, package_path, run_watched
from swarm.protocol.errors import ModelError, StoreError, SwarmError, UsageError

LOOK_TIMEOUT_S = 180.0
"""One look: three short requests, and the first megabytes of a GGUF file."""

FETCH_TIMEOUT_S = 48 * 3600.0
"""One fetch: 40 GB at two megabits per second. One that stands still ends after a minute."""

REQUEST, ANSWER, PROGRESS = "request.json", "answer.json", "progress"
"""Files in the directory that `hub_client` is given."""

_ERRORS: dict[str, type[SwarmError]] = {kind.__name__: kind for kind in (UsageError, ModelError, StoreError)}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    bytes: int
    sha256: str = ""
    """Empty for small files, of which the hub does not tell it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A model on the hub, pinned: the commit that its name means now, and the files that are needed."""

    name: HubName
    commit: str
    route: Route
    files: tuple[RemoteFile, ...]
    directory: Path | None = None
    """In the hub's own cache, where all files are there already."""
    quantization: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def look(name: HubName, poll: Callable[[], None] = lambda: None) -> Found:
    """What the hub, or its cache on this PC, has under `name`; some seconds.

    Raises `UsageError` where there is no such model, it may not be read or cannot be used, and `ModelError` where the
    hub does not answer and the cache has not got it.
    """
    answer = _ask({"action": "look", "name": asdict(name)}, LOOK_TIMEOUT_S, lambda _: poll())
    return Found(
        name=name,
        commit=answer["commit"],
        route=answer["route"],
        files=tuple(RemoteFile(**file) for file in answer["files"]),
        directory=Path(answer["directory"]) if answer["directory"] else None,
        quantization=answer["quantization"],
    )


def fetch(
    found: Found, place: Path, progress: Callable[[int, int], None], check: Callable[[Path], object] = lambda _: None
) -> Path:
    """A directory with the files of `found`: in the hub's own cache, or under `place`. Of a checkpoint without weights.

    `progress(done, total)` counts bytes. `check` sees the directory once all but the last file are there, and raises to
    save the fetch of that one. Raises `ModelError` where a file cannot be fetched, `StoreError` where the disk is full.
    """
    if found.directory is not None:
        check(found.directory)
        return found.directory
    directory = _claim(place, found)
    *others, last = [file for file in found.files if not is_weights(file.name)]
    small = sum(file.bytes for file in others)
    total = small + last.bytes
    if others:
        _fetch_files(found, directory, others, lambda count: progress(min(count, small), total))
        check(directory)
    _fetch_files(found, directory, (last,), lambda count: progress(min(small + count, total), total))
    progress(total, total)
    return directory


def fetch_parts(
    found: Found, small: Path, directory: Path, span: tuple[int, int, int], progress: Callable[[int, int], None]
) -> None:
    """Of a checkpoint the tensors of some layers into `directory`, as one file; see `hub_client.fetch_parts`.

    The directory `small` holds the other files, as from `fetch`. `span` is (start, end, layers of the model);
    `progress(done, total)` counts bytes, `total` 0. Raises `ModelError` and `StoreError` as `fetch` does.
    """
    needed = files_of(small, *span)
    weights = [file for file in found.files if is_weights(file.name) and (needed is None or file.name in needed)]
    request = {"action": "fetch_parts", "repo": found.name.repo, "commit": found.commit}
    files = [asdict(file) for file in weights]
    _ask(
        {**request, "directory": str(directory.absolute()), "files": files, "span": span},
        FETCH_TIMEOUT_S,
        lambda count: progress(count, 0),
    )


def _fetch_files(found: Found, directory: Path, files: Sequence[RemoteFile], poll: Callable[[int], None]) -> None:
    request = {
        "action": "fetch",
        "repo": found.name.repo,
        "commit": found.commit,
        "directory": str(directory.absolute()),
    }
    _ask({**request, "files": [asdict(file) for file in files]}, FETCH_TIMEOUT_S, poll)


def _claim(place: Path, found: Found) -> Path:
    """A directory of this process, with what an earlier fetch that was stopped left."""
    key = place_key(found)
    mine = place / f"{key}.{owned_name()}"
    place.mkdir(parents=True, exist_ok=True)
    for other in sorted(place.glob(f"{key}.*")):
        owner = other.name.partition(".")[2]
        if owner.startswith(f"{os.getpid()}-") or is_abandoned(owner):
            with contextlib.suppress(OSError):  # another process was faster
                other.rename(mine)
                return mine
    mine.mkdir()
    return mine


def place_key(found: Found) -> str:
    """The beginning of the names of its directories under `place`."""
    return hashlib.sha256(f"{found.name.repo}@{found.commit}/{found.files[0].name}".encode()).hexdigest()[:16]


def _ask(request: dict[str, Any], timeout_s: float, poll: Callable[[int], None]) -> Any:
    """Lets `hub_client` do `request`; its answer. What `poll(bytes so far)` raises stops it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        (directory / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        status, message = run_watched(
            module_command("swarm.model.hub_client", folder),
            timeout_s,
            lambda: poll(_count(directory / PROGRESS)),
            directory / "log",
            {**package_path(), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
            directory,
        )
        try:
            answer = json.loads((directory / ANSWER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ModelError(
                "the Hugging Face hub cannot be asked",
                found=f"the client ended with status {status}" + (f": {message}" if message else ""),
                action="Try again, or give a directory with --model.",
            ) from None
    if "error" in answer:
        kind, problem, expected, found, action = answer["error"]
        raise _ERRORS[kind](problem, expected=expected, found=found, action=action)
    return answer


def _count(path: Path) -> int:
    try:
        return int(path.read_bytes() or b"0")
    except (OSError, ValueError):  # not there yet, or being written
        return 0
