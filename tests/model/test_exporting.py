"""The way from a checkpoint into the store, with a stand-in for the exporter: its process, its result, its failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.model import watched
from swarm.model.exporting import export_checkpoint
from swarm.model.manifest import Manifest
from swarm.model.sources import Source
from swarm.model.store import Store
from swarm.protocol.errors import ModelError, UsageError
from tests.engine.chains import published, write_tiny_ir


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.open()
    return store


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """``swarm.model.export`` is `program`, in a package of its own."""
    package = tmp_path / "path" / "swarm" / "model"
    package.mkdir(parents=True)
    for folder in (package.parent, package):  # whole packages: one without these would lose to an installed one
        (folder / "__init__.py").touch()
    (package / "export.py").write_text(program, encoding="utf-8")
    monkeypatch.setattr(watched, "__file__", str(package / "watched.py"))


def export(store: Store, tmp_path: Path) -> Manifest:
    source = Source("checkpoint", "/models/tiny", "tiny", tmp_path)
    model = export_checkpoint(tmp_path / "checkpoint", source, store, tmp_path / "work", lambda *_: None)
    assert [found.blob for found in store.manifests()] == [model]
    return Manifest.decode(store.read(model))


def test_the_manifest_is_kept_and_marked(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = published(write_tiny_ir(tmp_path / "ir", 2), tmp_path / "other").manifest
    (tmp_path / "made").write_bytes(manifest.encode())
    program = f"""
import shutil, sys
from pathlib import Path
checkpoint, store, result, *flags = sys.argv[1:]
assert Path(store) == Path({str(store.root)!r}) and checkpoint.endswith("checkpoint"), sys.argv
assert flags == ["--name", "tiny", "--source", "/models/tiny"], flags
shutil.copyfile({str(tmp_path / "made")!r}, result)
"""
    stand_in(tmp_path, monkeypatch, program)
    kept = export(store, tmp_path)
    assert (kept.layers, kept.quantization) == (manifest.layers, manifest.quantization)
    assert list((tmp_path / "work" / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("import sys; print('no such layers', file=sys.stderr); sys.exit(2)", UsageError, "^no such layers$"),
        ("import os; os.abort()", ModelError, "tiny cannot be exported; found the exporter ended with status"),
        ("", ModelError, "ended with status 0"),
        ("import sys; open(sys.argv[3], 'wb').write(b'x')", ModelError, "not a manifest"),
    ],
)
def test_a_failure_is_an_error_and_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, kind: type[Exception], words: str
) -> None:
    stand_in(tmp_path, monkeypatch, program)
    with pytest.raises(kind, match=words):
        export(store, tmp_path)
    assert store.manifests() == ()
    assert list((tmp_path / "work" / "tmp").iterdir()) == []
