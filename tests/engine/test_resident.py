"""A prepared stage holds its weights once: packed by the plugin, and no longer as pages of the blobs too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.model.publish import publish
from swarm.model.store import Store
from tests.real_models import cache_directory, smollm2_ir

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
from pathlib import Path
import anyio
from swarm.model.manifest import Manifest
from swarm.model.store import Store
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.plan import Plan, Stage
from swarm.ring.stage import StageHost

def resident(folder):
    found, counts = {"anonymous": 0, "blobs": 0}, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split()[0]:
            counts = folder in line
        elif name == "Rss" and counts:
            found["blobs"] += int(rest.split()[0]) << 10
        elif name == "Anonymous":
            found["anonymous"] += int(rest.split()[0]) << 10
    return found

async def main(root, model):
    store = Store(Path(root))
    manifest = Manifest.decode(store.read(BlobId(model)))
    stage = Stage(NodeId("a" * 32), "a", 10, 20, "CPU", 1)
    plan = Plan(Epoch(1, stage.node), BlobId(model), (stage,), 1024)

    class Here:
        async def fetch_all(self, wanted, sources, on_progress):
            from swarm.ring.transfer import FetchSummary
            return FetchSummary({})

    host = StageHost(stage.node, store, Here(), None, 1 << 40, lambda *_: None)
    before = resident(str(store.root))
    await host.prepare(plan, manifest, [])
    after = resident(str(store.root))
    print(json.dumps({
        "weights": sum(blob.bytes for blob in manifest.weights(10, 20)),
        "anonymous": after["anonymous"] - before["anonymous"],
        "blobs": after["blobs"],
        "kv": 1024 * sum(manifest.kv_bytes_per_token[10:20]),
    }))

anyio.run(main, *sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_resident_memory_of_a_shard_is_about_its_size(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()
    model = publish(smollm2_ir(cache_directory()), store, "smollm2", "", lambda *_: None)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), model], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["blobs"] < 0.1 * found["weights"], found
    # Beside the packed weights: cache, activations, kernels, the graph. A second copy would not fit in here.
    assert found["anonymous"] < found["weights"] + found["kv"] + BESIDE_BYTES, found


BESIDE_BYTES = 64 * 1024**2

FILLING = """
import json, random, sys
import psutil
from bench.costs import stage_engine
from swarm.engine.selftest import segment
from pathlib import Path

engine, _ = stage_engine(Path(sys.argv[1]), 0, 1, 1024)
choose, found = random.Random(0), []
for number in range(80):
    prompt = segment(number, 0, [choose.randrange(1000, 40_000) for _ in range(choose.choice((40, 60, 80, 100)))])
    engine.run([prompt])
    engine.close_session(prompt.session)
    found.append(psutil.Process().memory_info().rss)
print(json.dumps(found))
"""


def test_beginnings_that_are_kept_fill_the_pool_and_then_memory_stands_still() -> None:
    """Blocks of prompts stay for those that begin alike; memory is touched as blocks are first used, and no more of it
    once all were."""
    ended = subprocess.run(
        [sys.executable, "-c", FILLING, str(smollm2_ir(cache_directory()))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    pool_bytes = 1024 * 23_040
    assert found[39] - found[0] > 0.3 * pool_bytes, "it was filled"
    assert max(found[40:]) - found[39] < 0.1 * pool_bytes
