"""``models``: the list for people and programs, the removal, the fetching; as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from swarm.cli.main import FAILURE_STATUS, USAGE_STATUS, main
from swarm.cli.models import choose, table
from swarm.model.inventory import StoredModel
from swarm.model.store import Store
from swarm.protocol.errors import UsageError
from swarm.protocol.ids import BlobId
from swarm.ring.supply import acquire_model, check_source
from tests.model import gguf_files
from tests.model.fake_hub import COMMIT, Repository, serving_to_us
from tests.model.gguf_files import tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SWARM_DISK", raising=False)
    return tmp_path / "home"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_llama())
    return path


def stored(number: int, name: str, **changes: object) -> StoredModel:
    values: dict[str, object] = {
        "id": BlobId(f"{number:064x}"[::-1]),
        "name": name,
        "source": f"org/{name}",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "quantization": "u4",
        "used": 1000.0,
        "bytes": 93_000_000,
        "here_bytes": 93_000_000,
        "layers": 30,
        "layers_here": 30,
        "blobs": frozenset(),
        "compiled_bytes": 0,
        "in_use": False,
    }
    return StoredModel(**{**values, **changes})  # type: ignore[arg-type]


def out_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_table() -> None:
    found = [stored(1, "small", in_use=True), stored(2, "large", here_bytes=31_000_000, layers_here=10, revision="")]
    assert table(found, 8200.0) == [
        "model  id            here         layers    weights  last used  from",
        "small  100000000000  93 MB        30 of 30  u4       now        org/small (0123456789ab)",
        "large  200000000000  31 of 93 MB  10 of 30  u4       2 h ago    org/large",
    ]


def test_which_model_is_meant() -> None:
    found = [stored(1, "small"), stored(2, "twin"), stored(3, "twin", in_use=True, source="/models/twin")]
    assert choose(found, "small") is choose(found, "org/small") is choose(found, "100000") is found[0]
    assert choose(found, "org/twin") is found[1]
    with pytest.raises(UsageError, match=r"several models are called 'twin'; expected one of twin \(2000.*by its id"):
        choose(found, "twin")
    with pytest.raises(
        UsageError, match=r"no model '10000' in the store; expected one of small \(100000000000\), twin"
    ):
        choose(found, "10000")
    with pytest.raises(UsageError, match=r"twin is in use by the node that runs here.*Stop the node"):
        choose(found, "/models/twin")


def test_an_empty_store(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert out_of(["models"], capsys).startswith("no model is here\nthe store takes 0 B; ")
    assert json.loads(out_of(["models", "--json"], capsys))["models"] == []


def test_pull_list_and_remove(home: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pulled = out_of(["models", "pull", str(tiny), "--disk", "1GB"], capsys)
    assert pulled.startswith("tiny is here: ")
    assert pulled.rstrip().endswith("2 layers")
    again = json.loads(out_of(["models", "pull", str(tiny), "--json"], capsys))
    found = json.loads(out_of(["models", "list", "--json", "--disk", "1GB"], capsys))
    (model,) = found["models"]
    assert {**again, "last_used": 0} == {**model, "last_used": 0}
    assert (model["name"], model["source"], model["layers_here"], model["in_use"]) == ("tiny", str(tiny), 2, False)
    assert model["here_bytes"] == model["bytes"] <= found["used_bytes"]
    assert found["limit_bytes"] == 1000**3
    assert "tiny" in out_of(["models"], capsys)
    assert out_of(["models", "rm", "tiny"], capsys).startswith("removed tiny: ")
    assert json.loads(out_of(["models", "--json"], capsys))["models"] == []


def test_the_model_of_a_running_process_stays(home: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = json.loads(out_of(["models", "pull", str(tiny), "--json"], capsys))
    program = f"""
import sys
from pathlib import Path
from swarm.model.store import Store
from swarm.ring.supply import load_model
load_model(Store(Path({str(home / "store")!r})), {model["id"]!r})
print("loaded", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"loaded"
        assert main(["models", "rm", "tiny"]) == USAGE_STATUS
        assert "in use by the node that runs here" in capsys.readouterr().err
        assert json.loads(out_of(["models", "--json"], capsys))["models"][0]["in_use"]
        process.communicate()
    assert out_of(["models", "rm", "tiny"], capsys)


def test_a_limit_that_is_too_small(home: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", str(tiny), "--disk", "10kB"]) == FAILURE_STATUS
    error = capsys.readouterr().err
    assert "the store has no room left; expected " in error
    assert "Give more --disk" in error
    assert json.loads(out_of(["models", "--json"], capsys))["models"] == []


def test_a_model_of_the_hub_is_pinned_until_it_is_pulled_anew(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_to_us(monkeypatch, tmp_path / "hf") as hub:
        hub.repositories["org/tiny"] = Repository({"tiny-F16.gguf": tiny_llama()})
        first = json.loads(out_of(["models", "pull", "org/tiny", "--json"], capsys))
        assert (first["source"], first["revision"], first["quantization"]) == ("org/tiny", COMMIT, "F16")
        asked = len(hub.requests)
        store = Store(home / "store")
        check_source("org/tiny", store)
        assert anyio.run(acquire_model, "org/tiny", store, lambda *_: None) == first["id"]
        assert len(hub.requests) == asked  # a node starts with what is here
        assert json.loads(out_of(["models", "pull", "org/tiny", "--json"], capsys))["id"] == first["id"]
        assert hub.sent("tiny-F16.gguf").count("") == 1
        hub.commit = COMMIT[::-1]
        hub.repositories["org/tiny"].files["tiny-F16.gguf"] = tiny_llama(gguf_files.Q8_0)
        second = json.loads(out_of(["models", "pull", "org/tiny", "--json"], capsys))
        assert (second["source"], second["revision"], second["quantization"]) == ("org/tiny", COMMIT[::-1], "Q8_0")
        assert anyio.run(acquire_model, "org/tiny", store, lambda *_: None) == second["id"]
        assert not list((home / "store" / "work" / "hub").iterdir())
        with pytest.raises(UsageError, match="no model org/other"):
            check_source("org/other", store)
    check_source("org/other", store)  # nobody answers now: another node may have it
