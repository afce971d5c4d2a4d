"""The Hugging Face hub, through its real client: a small server stands for it, or a cache laid out on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.model import hub, sources
from swarm.model.files import IR_FILES
from swarm.model.sources import acquire, pin, resolve
from swarm.protocol.errors import ModelError, StoreError, UsageError
from swarm.protocol.messages import Phase
from tests.model.fake_hub import COMMIT, FakeHub, Repository, serving_to_us
from tests.model.gguf_files import tiny_llama

NAME = "org/tiny"
TOKEN = "hf_secret"
CONFIG = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}).encode()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving_to_us(monkeypatch, tmp_path / "hf") as server:
        yield server


@pytest.fixture
def ir_files(tiny_ir: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in tiny_ir.iterdir()}
    return {**files, "README.md": b"read me", "model.safetensors": bytes(5000)}


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Phase, str, int, int]] = []

    def __call__(self, phase: Phase, label: str, done: int, total: int) -> None:
        self.calls.append((phase, label, done, total))


def lay_out(cache: Path, files: dict[str, bytes], ref: str | None = "main") -> Path:
    """The hub's own cache as ``huggingface_hub`` lays it out; its snapshot."""
    repository = cache / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, data in files.items():
        (snapshot / name).write_bytes(data)
    if ref is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / ref).write_text(COMMIT, encoding="utf-8")
    return snapshot


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_an_ir_is_fetched_pinned_and_whole(served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path) -> None:
    served.repositories[NAME] = Repository(ir_files)
    source = resolve(NAME)
    assert (source.kind, source.spec, source.name, source.revision) == ("hub", NAME, "tiny", "")
    assert served.requests == []  # the network is asked later
    pinned = pin(source)
    assert (pinned.revision, pinned.spec, pinned.name) == (COMMIT, NAME, "tiny")
    recorder = Recorder()
    directory = acquire(pinned, tmp_path / "work", recorder)
    assert directory.is_relative_to(tmp_path / "work")
    assert {path.name for path in directory.iterdir()} == {*IR_FILES, "config.json"}
    for name in (*IR_FILES, "config.json"):
        assert (directory / name).read_bytes() == ir_files[name], name
    assert served.sent("README.md") == served.sent("model.safetensors") == []
    total = sum(len(ir_files[name]) for name in (*IR_FILES, "config.json"))
    assert {call[0] for call in recorder.calls} == {Phase.DOWNLOAD}
    assert recorder.calls[-1] == (Phase.DOWNLOAD, "tiny", total, total)
    assert all(COMMIT in path for path, _ in served.requests if "/resolve/" in path)


@pytest.mark.parametrize("revision", ["v1", COMMIT, "main"])
def test_a_revision(served: FakeHub, ir_files: dict[str, bytes], revision: str) -> None:
    served.repositories[NAME] = Repository(ir_files)
    pinned = pin(resolve(f"{NAME}@{revision}"))
    assert (pinned.revision, pinned.spec) == (COMMIT, f"{NAME}@{revision}")
    with pytest.raises(UsageError, match="org/tiny has no revision 'v2'"):
        pin(resolve(f"{NAME}@v2"))


def test_a_gguf_is_checked_before_it_is_fetched(served: FakeHub, tmp_path: Path) -> None:
    good, bad = tiny_llama(), tiny_llama(architecture="phi3")
    served.repositories[NAME] = Repository({"tiny-Q8_0.gguf": good, "other-Q4_0.gguf": bad})
    with pytest.raises(UsageError, match=r"other-Q4_0\.gguf: unsupported architecture; expected .*llama, qwen2, qwen3"):
        pin(resolve(NAME))
    pinned = pin(resolve(f"{NAME}/tiny-Q8_0.gguf"))
    assert (pinned.name, pinned.revision, pinned.spec) == ("tiny-Q8_0", COMMIT, f"{NAME}/tiny-Q8_0.gguf")
    assert pinned.quantization == sources.gguf.quantization(_header(good, tmp_path))
    directory = acquire(pinned, tmp_path / "work", Recorder())
    assert resolve(str(directory)).kind == "ir"
    assert list((tmp_path / "work" / "hub").iterdir()) == []  # the file is not needed any more
    before = len(served.requests)
    assert acquire(pinned, tmp_path / "work", Recorder()) == directory
    assert len(served.requests) == before


def _header(data: bytes, tmp_path: Path) -> sources.gguf.Header:
    (tmp_path / "x.gguf").write_bytes(data)
    return sources.gguf.read_header(tmp_path / "x.gguf")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_checkpoint_needs_the_extra(served: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served.repositories[NAME] = Repository({"config.json": CONFIG, "model.safetensors": bytes(5000)})
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"tiny is a checkpoint.*pip install \"swarm-inference\[export\]\""):
        pin(resolve(NAME))
    served.repositories[NAME].files["config.json"] = b'{"model_type": "bert", "architectures": ["BertModel"]}'
    with pytest.raises(UsageError, match=r"unsupported architecture; expected .*gemma3_text; found bert"):
        pin(resolve(NAME))
    for name, data in {"config.json": CONFIG, "model.safetensors": bytes(10)}.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=r"swarm-inference\[export\]"):
        resolve(str(tmp_path))


def test_a_repository_without_a_model(served: FakeHub) -> None:
    served.repositories[NAME] = Repository({"pytorch_model.bin": b"x"})
    with pytest.raises(
        UsageError, match=r"org/tiny holds no model that can be used; expected .*found pytorch_model\.bin"
    ):
        pin(resolve(NAME))


def test_an_ir_of_another_kind_is_not_fetched_whole(
    served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path
) -> None:
    graph = ir_files["openvino_model.xml"].replace(b"ReadValue", b"Sigmoid")
    served.repositories[NAME] = Repository({**ir_files, "openvino_model.xml": graph})
    with pytest.raises(UsageError, match="not a language model"):
        acquire(resolve(NAME), tmp_path / "work", Recorder())
    assert served.sent("openvino_model.bin") == []


@pytest.mark.parametrize(
    ("repository", "token", "words"),
    [
        (None, "", "no model org/tiny on the Hugging Face hub, nor a directory .*HTTP status 401.*set HF_TOKEN"),
        (Repository({"a.gguf": b""}, TOKEN, private=True), "hf_wrong", "no model org/tiny"),
        (
            Repository({"a.gguf": bytes(9)}, TOKEN),
            "",
            "given access; found HTTP status 403. Ask .*/org/tiny, .*HF_TOKEN",
        ),
    ],
)
def test_what_may_not_be_read(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, repository: Repository | None, token: str, words: str
) -> None:
    if repository is not None:
        served.repositories[NAME] = repository
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError, match=words) as caught:
        pin(resolve(NAME))
    assert "\n" not in str(caught.value)


def test_a_token_opens_a_gated_model(
    served: FakeHub, ir_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served.repositories[NAME] = Repository(ir_files, TOKEN, private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve(str(acquire(resolve(NAME), tmp_path, Recorder()))).kind == "ir"


# --- trouble on the way -----------------------------------------------------------------------------------------------


def test_without_a_network(served: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"hub cannot be reached for org/tiny; found .*Connect once") as caught:
        pin(resolve(NAME))
    assert "\n" not in str(caught.value)


def test_a_broken_connection_is_taken_up_again(served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path) -> None:
    data = ir_files["openvino_model.bin"]
    served.repositories[NAME] = Repository(ir_files)
    pinned = pin(resolve(NAME))
    served.cut_after = len(data) // 2 + 1
    directory = acquire(pinned, tmp_path, Recorder())
    assert (directory / "openvino_model.bin").read_bytes() == data
    assert served.sent("openvino_model.bin") == ["", f"bytes={served.cut_after}-"]


def test_a_stopped_download_goes_on_where_it_was(served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path) -> None:
    data = ir_files["openvino_model.bin"]
    served.repositories[NAME] = Repository(ir_files)
    pinned = pin(resolve(NAME))
    assert pinned.found is not None
    left = tmp_path / "hub" / f"{hub.place_key(pinned.found)}.999999999-0"
    left.mkdir(parents=True)
    (left / "openvino_model.bin.part").write_bytes(data[:1000])
    directory = acquire(pinned, tmp_path, Recorder())
    assert (directory / "openvino_model.bin").read_bytes() == data
    assert served.sent("openvino_model.bin") == ["bytes=1000-"]
    assert list((tmp_path / "hub").iterdir()) == [directory]


def test_what_is_stopped_ends_at_once_and_is_kept(served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path) -> None:
    served.repositories[NAME] = Repository(ir_files)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    pinned = pin(resolve(NAME))
    with pytest.raises(KeyboardInterrupt):
        acquire(pinned, tmp_path, stop)
    (kept,) = (tmp_path / "hub").iterdir()
    assert acquire(pinned, tmp_path, Recorder()).parent == kept.parent
    assert not kept.exists()  # it was gone on with


def test_wrong_bytes_are_refused(served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path) -> None:
    data = ir_files["openvino_model.bin"]
    served.repositories[NAME] = Repository(ir_files, lies={"openvino_model.bin": bytes(len(data))})
    with pytest.raises(ModelError, match=r"openvino_model\.bin did not come as it should be; expected .*SHA-256"):
        acquire(resolve(NAME), tmp_path, Recorder())
    assert not list(tmp_path.rglob("openvino_model.bin*"))


def test_a_disk_that_is_too_small_says_by_how_much(served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path) -> None:
    served.repositories[NAME] = Repository(ir_files)
    found = pin(resolve(NAME)).found
    assert found is not None
    huge = hub.RemoteFile("openvino_model.bin", 2**60)
    larger = hub.Found(found.name, COMMIT, "ir", (*found.files[:-1], huge))
    with pytest.raises(StoreError, match=rf"too full .*bytes: {2**60} for the download .*found \d+ bytes free"):
        hub.fetch(larger, tmp_path, lambda *_: None)


# --- the hub's own cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["main", None])
def test_offline_from_the_cache(
    served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str | None
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match=r"not whole in the offline cache; .*Unset HF_HUB_OFFLINE"):
        pin(resolve(NAME))
    snapshot = lay_out(tmp_path / "hf", ir_files, ref)
    pinned = pin(resolve(NAME))
    assert pinned.revision == COMMIT
    assert acquire(pinned, tmp_path / "work", Recorder()) == snapshot
    assert served.requests == []
    (snapshot / "openvino_model.bin").unlink()
    with pytest.raises(UsageError, match="not whole in the offline cache"):
        pin(resolve(NAME))


def test_without_a_network_the_cache_serves(served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = lay_out(tmp_path / "hf", {"tiny-Q8_0.gguf": tiny_llama()})
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    pinned = pin(resolve(NAME))
    assert (pinned.name, pinned.revision) == ("tiny", COMMIT)
    assert resolve(str(acquire(pinned, tmp_path / "work", Recorder()))).kind == "ir"
    assert (snapshot / "tiny-Q8_0.gguf").exists()  # the cache is not ours


def test_what_is_in_the_cache_is_not_fetched_again(served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path) -> None:
    served.repositories[NAME] = Repository(ir_files)
    snapshot = lay_out(tmp_path / "hf", ir_files)
    assert acquire(resolve(NAME), tmp_path / "work", Recorder()) == snapshot
    assert served.sent("openvino_model.bin") == []


def test_names_that_lead_out_are_not_written(served: FakeHub, ir_files: dict[str, bytes], tmp_path: Path) -> None:
    from swarm.model.hub_client import _is_safe

    assert all(_is_safe(name) for name in ("a", "a/b.gguf", "model-00001-of-00002.safetensors"))
    for name in ("", "/a", "../a", "a/../b", "a//b", "a\\b", "c:a", "a/."):
        assert not _is_safe(name), name
    served.repositories[NAME] = Repository({**ir_files, "../chat_template.jinja": b"x"})
    found = pin(resolve(NAME)).found
    assert found is not None
    assert all(file.name in ir_files for file in found.files)
