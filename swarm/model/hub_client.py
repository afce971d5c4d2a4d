"""``python -m swarm.model.hub_client DIRECTORY``: talks to the Hugging Face hub for `hub`, which starts it.

The request, the answer and the progress are files in DIRECTORY. Everything that ``huggingface_hub`` reads from the
environment holds: ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``, proxies.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from swarm.model import gguf
from swarm.model.checkpoint import SINGLE, header_bytes, in_range
from swarm.model.disk import bytes_under
from swarm.model.hub import ANSWER, PROGRESS, REQUEST, RemoteFile
from swarm.model.routes import Choice, HubName, check_checkpoint, choose
from swarm.protocol.errors import ModelError, StoreError, SwarmError, UsageError

HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
"""All errors of the HTTP client that ``huggingface_hub`` uses: httpx in its version 1, httpx2 in version 2."""

TIMEOUT_S = 20.0
"""Of a connection, and of the silence in one."""

TRIES = 4
"""Without a new byte between them, waiting 1, 2 and 4 s."""

MAX_FILES = 20_000
MAX_CONFIG_BYTES = 4 * 1024 * 1024

_CHUNK_BYTES = 1024 * 1024
_HEADER_BYTES = 4 * 1024 * 1024
"""Fetched at a time of a GGUF file's header; one with 150,000 tokens has 6 MB."""

_BUSY = (429, 500, 502, 503, 504)


def look(name: HubName) -> dict[str, Any]:
    """The answer to `hub.look`. Raises `SwarmError`."""
    try:
        info = HfApi().model_info(name.repo, revision=name.revision or None, files_metadata=True, timeout=TIMEOUT_S)
    except Exception as error:  # HTTP clients have many; `_explain` sorts them
        problem = _explain(error, name)
        unreachable = isinstance(error, OfflineModeIsEnabled) or isinstance(problem, ModelError)
        if unreachable and (cached := _look_in_cache(name)) is not None:
            return cached
        raise problem from error
    files = {}
    for sibling in (info.siblings or [])[:MAX_FILES]:
        if _is_safe(sibling.rfilename):
            files[sibling.rfilename] = RemoteFile(
                sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else ""
            )
    choice = choose(str(name).removesuffix(f"/{name.file}") if name.file else str(name), files, name.file)
    needed = [files[file] for file in choice.files]
    commit = info.sha or ""
    try:
        quantization = _check_content(name, commit, choice, needed)
    except SwarmError:
        raise
    except Exception as error:
        raise _explain(error, name) from error
    snapshot = _cache_of(name.repo) / "snapshots" / commit
    return {
        "commit": commit,
        "route": choice.route,
        "files": [asdict(file) for file in needed],
        "directory": str(snapshot) if _holds(snapshot, needed) else "",
        "quantization": quantization,
    }


def _check_content(name: HubName, commit: str, choice: Choice, needed: Sequence[RemoteFile]) -> str:
    """Refuses what can be told from a few bytes of the model; the quantization of a GGUF file, else empty."""
    if choice.route == "gguf":
        with io.BufferedReader(_Ranged(name.repo, commit, needed[0]), _HEADER_BYTES) as file:
            header = gguf.parse_header(cast(BinaryIO, file))
        gguf.check_convertible(header, PurePosixPath(needed[0].name).name)
        return gguf.quantization(header)
    if choice.route == "checkpoint":
        config = json.loads(_read_range(name.repo, commit, "config.json", 0, MAX_CONFIG_BYTES))
        check_checkpoint(name.repo, config if isinstance(config, dict) else {})
    return ""


def _look_in_cache(name: HubName) -> dict[str, Any] | None:
    """The same from the hub's own cache on this PC, as ``huggingface_hub`` documents it; None where it is not whole."""
    cache = _cache_of(name.repo)
    try:
        commit = (cache / "refs" / (name.revision or constants.DEFAULT_REVISION)).read_text(encoding="utf-8").strip()
    except OSError:
        commit = name.revision
    snapshots = [path for path in (cache / "snapshots").glob("*") if path.is_dir()]
    if not commit and len(snapshots) == 1:
        commit = snapshots[0].name
    snapshot = cache / "snapshots" / commit
    if not commit or snapshot not in snapshots:
        return None
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    try:
        choice = choose(str(name), names, name.file)
    except UsageError:
        return None
    quantization = ""
    if choice.route == "gguf":
        header = gguf.read_header(snapshot / choice.files[0])
        gguf.check_convertible(header, PurePosixPath(choice.files[0]).name)
        quantization = gguf.quantization(header)
    return {
        "commit": commit,
        "route": choice.route,
        "files": [asdict(RemoteFile(file, (snapshot / file).stat().st_size)) for file in choice.files],
        "directory": str(snapshot),
        "quantization": quantization,
    }


def _cache_of(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / ("models--" + repo.replace("/", "--"))


def _holds(snapshot: Path, files: Iterable[RemoteFile]) -> bool:
    return all(
        (snapshot / file.name).is_file() and (snapshot / file.name).stat().st_size == file.bytes for file in files
    )


# --- fetching ---------------------------------------------------------------------------------------------------------


def fetch(repo: str, commit: str, directory: Path, files: Sequence[RemoteFile], progress: Path) -> dict[str, Any]:
    """Brings `files` into `directory`; the number of bytes that are here goes into the file `progress`."""
    _check_disk(directory, files)
    with progress.open("wb", buffering=0) as counter:
        done = 0
        for file in files:
            place = directory.joinpath(*PurePosixPath(file.name).parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not (place.is_file() and place.stat().st_size == file.bytes):
                for have in _download(repo, commit, file, place):
                    counter.seek(0)
                    counter.write(b"%020d" % (done + have))
            done += file.bytes
    return {}


def _check_disk(directory: Path, files: Sequence[RemoteFile]) -> None:
    total = sum(file.bytes for file in files)
    here = bytes_under(directory)
    free = shutil.disk_usage(directory).free
    if free < 2 * total - here:
        raise StoreError(
            "the disk is too full for this model",
            expected=f"{2 * total - here} bytes: {total} for the download and as much for the store",
            found=f"{free} bytes free at {directory}",
            action="Make room (python node.py models rm), or choose another place with --home.",
        )


def _download(repo: str, commit: str, file: RemoteFile, place: Path) -> Iterator[int]:
    """Fetches one file, from where an earlier try stopped; gives how many bytes are here. Raises `ModelError`."""
    part = place.with_name(f"{place.name}.part")
    with part.open("a+b") as target:
        target.seek(0)
        digest, have = hashlib.sha256(), 0
        while chunk := target.read(_CHUNK_BYTES):
            digest.update(chunk)
            have += len(chunk)
        for chunk in _read(repo, commit, file.name, have, file.bytes, to_the_end=True):
            target.write(chunk)
            digest.update(chunk)
            have += len(chunk)
            yield have
    if have != file.bytes or (file.sha256 and digest.hexdigest() != file.sha256):
        part.unlink()
        raise ModelError(
            f"{repo}/{file.name} did not come as it should be",
            expected=f"{file.bytes} bytes" + (f" with SHA-256 {file.sha256}" if file.sha256 else ""),
            found=f"{have} bytes" + (f" with SHA-256 {digest.hexdigest()}" if file.sha256 else ""),
            action="It was removed; try again.",
        )
    part.replace(place)


def _read(repo: str, commit: str, name: str, start: int, end: int, *, to_the_end: bool = False) -> Iterator[bytes]:
    """The bytes [start, end) of a file, or fewer where it is shorter; gone on with where a connection breaks.

    `to_the_end`: `end` is that of the file.
    """
    failures = 0
    while start < end:
        before = start
        try:
            for chunk, position in _stream(repo, commit, name, start, None if to_the_end else end):
                wanted = chunk[max(0, start - position) : max(0, end - position)]
                start += len(wanted)
                yield wanted
            if start == before:
                return
        except HTTPError as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else _BUSY[0]
            failures = failures + 1 if start == before else 1
            if status not in _BUSY or failures == TRIES:
                raise
            time.sleep(2 ** (failures - 1))


def _stream(repo: str, commit: str, name: str, start: int, end: int | None = None) -> Iterator[tuple[bytes, int]]:
    """(bytes, their place in the file) of a file, from `start` to before `end`, where the server knows ranges."""
    headers = {"Accept-Encoding": "identity"}
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    url = hf_hub_url(repo, name, revision=commit)
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response:
        hf_raise_for_status(response)
        position = start if response.status_code == 206 else 0
        for chunk in response.iter_bytes():
            yield chunk, position
            position += len(chunk)


def _read_range(repo: str, commit: str, name: str, start: int, end: int) -> bytes:
    """At most the bytes [start, end) of a file."""
    return b"".join(_read(repo, commit, name, start, end))


class _Ranged(io.RawIOBase):
    """A file on the hub, read in ranges."""

    def __init__(self, repo: str, commit: str, file: RemoteFile) -> None:
        self._where = repo, commit, file.name
        self._size = file.bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        data = _read_range(*self._where, self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


# --- some tensors of a checkpoint -------------------------------------------------------------------------------------


def fetch_parts(
    repo: str, commit: str, directory: Path, files: Sequence[RemoteFile], span: tuple[int, int, int], progress: Path
) -> dict[str, Any]:
    """The tensors of the layers ``[start, end)`` of a checkpoint, and nothing else, as the only file of `directory`.

    `span` is (start, end, layers of the model), `files` those with weights. The hub's SHA-256 is that of a whole
    file: here what comes is compared with the sizes that the files' headers tell.
    """
    header: dict[str, Any] = {}
    spans: list[tuple[str, int, int]] = []
    total = 0
    for file in files:
        for name, entry, first, last in _tensors(repo, commit, file, span):
            header[name] = {**entry, "data_offsets": [total, total + last - first]}
            total += last - first
            if spans and spans[-1][0] == file.name and spans[-1][2] == first:
                first = spans.pop()[1]  # neighbours come in one request
            spans.append((file.name, first, last))
    free = shutil.disk_usage(directory).free
    if free < total:
        found = f"{free} bytes free at {directory}"
        raise StoreError("the disk is too full for these layers", expected=f"{total} bytes", found=found)
    packed = json.dumps(header).encode()
    with (directory / SINGLE).open("wb") as target, progress.open("wb", buffering=0) as counter:
        target.write(len(packed).to_bytes(8, "little") + packed)
        done = 0
        for place, first, last in spans:
            expected = done + last - first
            for chunk in _read(repo, commit, place, first, last):
                target.write(chunk)
                done += len(chunk)
                counter.seek(0)
                counter.write(b"%020d" % done)
            if done != expected:
                found = f"{expected - done} fewer"
                raise ModelError(f"{repo}/{place} is cut short", expected=f"{last - first} bytes", found=found)
    return {}


def _tensors(
    repo: str, commit: str, file: RemoteFile, span: tuple[int, int, int]
) -> list[tuple[str, dict[str, Any], int, int]]:
    """(name, entry of the header, first byte, one behind the last) of a file's tensors in `span`, in their order."""
    size = header_bytes(Path(file.name), _read_range(repo, commit, file.name, 0, 8))
    try:
        header = json.loads(_read_range(repo, commit, file.name, 8, 8 + size))
        found = [
            (name, dict(entry), *(8 + size + int(offset) for offset in entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__" and in_range(name, *span)
        ]
        places = [(name, entry, first, last) for name, entry, first, last in found]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{repo}/{file.name} is damaged", found=f"{type(error).__name__}: {error}"[:200]) from None
    if any(not 0 <= first <= last <= file.bytes for _, _, first, last in places):
        raise ModelError(f"{repo}/{file.name} is damaged", expected=f"tensors within its {file.bytes} bytes")
    return sorted(places, key=lambda place: place[2])


# --- errors -----------------------------------------------------------------------------------------------------------


def _explain(error: Exception, name: HubName) -> SwarmError:
    """What a person can do about `error`."""
    page = f"{constants.ENDPOINT}/{name.repo}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if isinstance(error, OfflineModeIsEnabled):
        return UsageError(
            f"{name} is not whole in the offline cache",
            expected=f"its files under {_cache_of(name.repo)}",
            found="HF_HUB_OFFLINE is set",
            action="Unset HF_HUB_OFFLINE, or copy the cache from a PC that has it.",
        )
    if isinstance(error, GatedRepoError) or (status == 403):
        return UsageError(
            f"{name.repo} is for those who were given access",
            found=f"HTTP status {status}",
            action=f"Ask for access at {page}, and set HF_TOKEN to a token of that account.",
        )
    if isinstance(error, RevisionNotFoundError):
        return UsageError(f"{name.repo} has no revision {name.revision!r}", action=f"Look at {page}/commits/main.")
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return UsageError(
            "the Hugging Face hub refuses the token",
            found=f"HTTP status {status}",
            action=f"Set HF_TOKEN to a valid one, or unset it where {name.repo} is public.",
        )
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return UsageError(
            f"no model {name.repo} on the Hugging Face hub, nor a directory of that name here",
            found=f"HTTP status {status}",
            action="Check the name; where the model is private, set HF_TOKEN.",
        )
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return ModelError(
        f"the Hugging Face hub cannot be reached for {name.repo}",
        found=f"HTTP status {status}" if status else f"{type(error).__name__}: {reason}",
        action="Connect once, fetch the model on another PC, or give a directory with --model.",
    )


def _is_safe(name: str) -> bool:
    """A relative path that stays where it is put, on every system."""
    parts = name.split("/")
    return all(part not in ("", ".", "..") and not set(part) & set('\\:*?"<>|\0') for part in parts)


def answer_to(request: dict[str, Any], progress: Path) -> dict[str, Any]:
    """Raises `SwarmError`."""
    if request["action"] == "look":
        return look(HubName(**request["name"]))
    files = [RemoteFile(**file) for file in request["files"]]
    repo = request["repo"]
    try:
        if request["action"] == "fetch_parts":
            span = tuple(request["span"])
            return fetch_parts(repo, request["commit"], Path(request["directory"]), files, span, progress)
        return fetch(repo, request["commit"], Path(request["directory"]), files, progress)
    except HTTPError as error:
        raise _explain(error, HubName(repo)) from error
    except OfflineModeIsEnabled as error:
        raise _explain(error, HubName(repo)) from error
    except OSError as error:
        raise StoreError(
            "the model cannot be written",
            expected=f"to write under {request['directory']}",
            found=f"{error.strerror or error}, {shutil.disk_usage(request['directory']).free} bytes free",
            action="Make room, or choose another place with --home.",
        ) from error


def main(arguments: list[str]) -> int:
    """Exit status 0 wherever there is an answer, which may be an error."""
    if len(arguments) != 1:
        print("expected: python -m swarm.model.hub_client DIRECTORY", file=sys.stderr)
        return 2
    directory = Path(arguments[0])
    try:
        request = json.loads((directory / REQUEST).read_text(encoding="utf-8"))
        answer = answer_to(request, directory / PROGRESS)
    except SwarmError as error:
        kind = next(kind for kind in (UsageError, StoreError, ModelError) if isinstance(error, kind))
        answer = {"error": [kind.__name__, error.problem, error.expected, error.found, error.action]}
    (directory / ANSWER).write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
