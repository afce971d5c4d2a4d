"""A small HTTP server that speaks what is asked of the Hugging Face hub for models: their listing and their files.

``python -m tests.model.fake_hub HOST PORT LOG NAME FILE…`` serves one model until it is killed; LOG gets a line
``path range`` for every request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^?]+))?(?:\?.*)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)(?:\?.*)?")


@dataclass
class Repository:
    files: dict[str, bytes]
    token: str = ""
    """Who may read its files; everybody where it is empty."""
    private: bool = False
    """Without the token not even its name is told."""
    lies: dict[str, bytes] = field(default_factory=dict)
    """What is sent in place of a file."""


class FakeHub:
    """The hub at `endpoint`, with the models of `repositories`."""

    def __init__(self) -> None:
        self.commit = COMMIT
        """What ``main`` and ``v1`` are."""
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        """(path, range) of every request."""
        self.cut_after: int | None = None
        """Connections for files end after this many bytes, while it is set."""
        self.endpoint = ""
        self.log: Path | None = None

    def asked(self, path: str, span: str) -> None:
        self.requests.append((path, span))
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{path} {span}\n")

    def sent(self, name: str) -> list[str]:
        """The ranges of a file that were asked for."""
        return [span for path, span in self.requests if path.endswith(f"/{name}")]

    def tensors_sent(self, first: int = 0) -> list[str]:
        """The names of the tensors that were asked for, from a request on; headers of files aside."""
        found = []
        for path, span in self.requests[first:]:
            if path.endswith(".safetensors"):
                data = self.repositories["/".join(path.split("/")[1:3])].files[path.rpartition("/")[2]]
                size = 8 + int.from_bytes(data[:8], "little")
                start, end = (int(place) for place in span.removeprefix("bytes=").split("-"))
                for name, entry in json.loads(data[8:size]).items():
                    if name != "__metadata__" and start < size + entry["data_offsets"][1] and end >= size:
                        found += [name] if end >= size + entry["data_offsets"][0] else []
        return found

    def weights_sent_once(self) -> bool:
        """Some were, and no tensor twice."""
        sent = self.tensors_sent()
        return bool(sent) and len(sent) == len(set(sent))

    def layers_sent(self, first: int = 0) -> set[int]:
        """The layers of the tensors that were asked for, from a request on."""
        return {int(name.split(".")[2]) for name in self.tensors_sent(first) if ".layers." in name}

    @contextlib.contextmanager
    def serving(self, host: str = "127.0.0.1", port: int = 0) -> Iterator[FakeHub]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.asked(self.path, self.headers.get("Range", ""))
                _answer(hub, self, whole=True)

            def do_HEAD(self) -> None:
                hub.asked(self.path, "HEAD")
                _answer(hub, self, whole=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer((host, port), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        self.endpoint = f"http://{host}:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@contextlib.contextmanager
def serving_to_us(monkeypatch: pytest.MonkeyPatch, hf_home: Path) -> Iterator[FakeHub]:
    """A hub in place of the real one, for a user without a token or a cache."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(hf_home))
    with FakeHub().serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def _answer(hub: FakeHub, request: BaseHTTPRequestHandler, *, whole: bool) -> None:
    listing, file = _API.fullmatch(request.path), _FILE.fullmatch(request.path)
    match = listing or file
    repository = hub.repositories.get(match[1]) if match else None
    known = request.headers.get("Authorization") == f"Bearer {repository.token}" if repository else False
    if match is None or repository is None or (repository.private and not known):
        _refuse(request, 401, "RepoNotFound")
    elif (match[2] or "main") not in ("main", "v1", hub.commit):
        _refuse(request, 404, "RevisionNotFound")
    elif listing:
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": "b", "lfs": _lfs(data) if len(data) > 2000 else None}
            for name, data in repository.files.items()
        ]
        body = json.dumps({"id": match[1], "modelId": match[1], "sha": hub.commit, "siblings": siblings})
        _send(request, 200, body.encode(), whole)
    elif repository.token and not known:
        _refuse(request, 403, "GatedRepo")
    elif file is not None and file[3] in repository.files:
        _send_file(hub, request, repository.lies.get(file[3], repository.files[file[3]]), whole)
    else:
        _refuse(request, 404, "EntryNotFound")


def _lfs(data: bytes) -> dict[str, str | int]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}


def _send_file(hub: FakeHub, request: BaseHTTPRequestHandler, data: bytes, whole: bool) -> None:
    headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
    status = 200
    if span := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
        start, end = int(span[1]), min(int(span[2] or len(data)) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        data, status = data[start:end], 206
    _send(request, status, data, whole, headers, hub.cut_after)


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    whole: bool,
    headers: dict[str, str] | None = None,
    cut_after: int | None = None,
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if whole:
        with contextlib.suppress(ConnectionError):  # the client went away
            request.wfile.write(body[:cut_after])
        if cut_after is not None and len(body) > cut_after:
            request.close_connection = True


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    _send(request, status, b"{}", request.command == "GET", {"X-Error-Code": code})


def main(host: str, port: str, log: str, name: str, *files: str) -> None:
    hub = FakeHub()
    hub.log = Path(log)
    hub.repositories[name] = Repository({Path(file).name: Path(file).read_bytes() for file in files})
    with hub.serving(host, int(port)):
        hub.log.touch()
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
