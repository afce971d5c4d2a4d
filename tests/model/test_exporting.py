"""The way from a checkpoint into the store, slice by slice, with a stand-in for the exporter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from swarm.model import exporting, watched
from swarm.model.exporting import Exporter, forget_parts, held, remember, slices
from swarm.model.manifest import Manifest
from swarm.model.sources import acquire, pin, resolve
from swarm.model.store import Store
from swarm.protocol.errors import ModelError, StoreError, UsageError
from swarm.protocol.ids import BlobId
from swarm.protocol.messages import Phase
from tests.engine.chains import Published, published, write_tiny_ir
from tests.model import stand_in_exporter
from tests.model.fake_hub import COMMIT, FakeHub, Repository, serving_to_us

LAYERS = 4
NAME = "org/tiny"


@pytest.fixture(scope="module")
def mold(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("mold")
    return published(write_tiny_ir(folder / "ir", LAYERS), folder / "store")


@pytest.fixture
def checkpoint(mold: Published, tmp_path: Path) -> Path:
    return stand_in_exporter.write_checkpoint(tmp_path / "tiny", mold.store, mold.manifest)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.open()
    return store


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_exporter.take_its_place(monkeypatch)


@pytest.fixture
def served(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving_to_us(monkeypatch, tmp_path / "hf") as hub:
        hub.repositories[NAME] = Repository({path.name: path.read_bytes() for path in checkpoint.iterdir()})
        yield hub


@dataclass
class Told:
    phases: list[Phase]

    def __call__(self, phase: Phase, _label: str, _done: int, _total: int) -> None:
        self.phases.append(phase)


def exporter(model: str, store: Store) -> Exporter:
    source = pin(resolve(model))
    workdir = store.root / "work"
    return Exporter(acquire(source, workdir, Told([])), source, store, workdir, Told([]))


def ids(manifest: Manifest) -> list[BlobId]:
    return [blob.id for blob in manifest.blobs()]


@pytest.mark.usefixtures("_stand_in")
def test_slice_by_slice_it_becomes_the_whole(
    checkpoint: Path, store: Store, mold: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SLICE_BYTES", 1)
    made = exporter(str(checkpoint), store)
    outline = made.outline()
    assert outline.unknown(0, LAYERS) == [(0, LAYERS)]
    assert [blob.bytes for blob in outline.blobs()] == [blob.bytes for blob in mold.manifest.blobs()]
    part = made.export(outline, 1, 2)
    assert part.unknown(0, LAYERS) == [(0, 1), (2, LAYERS)]
    whole = made.export_all(part)
    assert ids(whole) == ids(mold.manifest)
    assert (whole.name, whole.source, whole.quantization) == ("tiny", str(checkpoint), exporting.QUANTIZATION)
    (entry,) = store.manifests()  # the parts before it are forgotten
    assert entry.blob == remember(store, whole)
    assert list((store.root / "work" / "tmp").iterdir()) == []


@pytest.mark.usefixtures("_stand_in")
def test_from_the_hub_come_only_the_tensors_of_the_slice(
    served: FakeHub, checkpoint: Path, store: Store, mold: Published
) -> None:
    made = exporter(NAME, store)
    outline = made.outline()
    assert not [path for path, _ in served.requests if path.endswith(".safetensors")]
    part = made.export(outline, 0, 1)
    assert {path.rpartition("/")[2] for path, _ in served.requests if "safetensors" in path} == {
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    }
    whole = made.export_all(part)
    assert ids(whole) == ids(mold.manifest)
    assert whole.revision == COMMIT
    assert served.weights_sent_once()
    assert not list(store.root.rglob("*.safetensors"))


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("lie", [b"\xff" * 40, (30).to_bytes(8, "little") + b"[]" + bytes(100), b"\x01"])
def test_a_damaged_file_on_the_hub_is_told(served: FakeHub, store: Store, lie: bytes) -> None:
    made = exporter(NAME, store)
    outline = made.outline()
    served.repositories[NAME].lies["model-00001-of-00002.safetensors"] = lie
    with pytest.raises(ModelError, match=r"00001-of-00002\.safetensors is damaged"):
        made.export(outline, 0, 1)
    assert list((store.root / "work" / "tmp").iterdir()) == []


@pytest.mark.usefixtures("_stand_in")
def test_a_connection_that_breaks_is_taken_up_again(served: FakeHub, store: Store, mold: Published) -> None:
    made = exporter(NAME, store)
    outline = made.outline()
    served.cut_after = 3000
    assert made.export(outline, 0, 1).layers[0] == mold.manifest.layers[0]


@pytest.mark.usefixtures("_stand_in")
def test_an_export_that_was_stopped_goes_on(checkpoint: Path, store: Store) -> None:
    made = exporter(str(checkpoint), store)
    outline = made.outline()
    made.export(outline, 0, 2)
    again = held(store, exporter(str(checkpoint), store).outline())
    assert again.unknown(0, LAYERS) == [(2, LAYERS)]
    store.path(again.layers[1].id).unlink()
    assert held(store, outline).unknown(0, LAYERS) == [(1, LAYERS)]
    assert held(store, replace(outline, revision="another")).unknown(0, LAYERS) == [(0, LAYERS)]


@pytest.mark.usefixtures("_stand_in")
def test_a_full_store_is_told_before_the_work(checkpoint: Path, store: Store) -> None:
    made = exporter(str(checkpoint), store)
    outline = made.outline()
    store.limit_bytes = store.usage_bytes() + 1
    with pytest.raises(StoreError, match="the store has no room left"):
        made.export(outline, 0, LAYERS)
    assert held(store, outline) == outline


def test_slices_are_as_large_as_they_may_be(mold: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [sum(blob.bytes for blob in mold.manifest.part(layer, layer + 1)) for layer in range(LAYERS)]
    monkeypatch.setattr(exporting, "SLICE_BYTES", sizes[1] + sizes[2])
    found = list(slices(mold.manifest, 1, LAYERS))
    assert found == [(1, 3), (3, 4)]
    assert list(slices(mold.manifest, 2, 2)) == []


def test_parts_are_forgotten_once_the_whole_is_there(mold: Published, store: Store) -> None:
    whole = replace(mold.manifest, source="somewhere")
    part = remember(store, whole.without({whole.layers[0].id}))
    other = remember(store, replace(whole, source="elsewhere").without({whole.layers[0].id}))
    forget_parts(store, whole, BlobId("1" * 64))
    assert [entry.blob for entry in store.manifests()] == [other]
    assert store.has(part)


# --- failures of the process ------------------------------------------------------------------------------------------


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
    checkpoint: Path,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    kind: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr("swarm.model.sources.require_exporter", lambda _label: None)
    package = tmp_path / "path" / "swarm" / "model"
    package.mkdir(parents=True)
    for folder in (package.parent, package):  # whole packages: one without these would lose to an installed one
        (folder / "__init__.py").touch()
    (package / "export.py").write_text(program, encoding="utf-8")
    monkeypatch.setattr(watched, "__file__", str(package / "watched.py"))
    with pytest.raises(kind, match=words):
        exporter(str(checkpoint), store).outline()
    assert store.manifests() == ()
    assert list((store.root / "work" / "tmp").iterdir()) == []
