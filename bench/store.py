"""The layer store between PCs: a fetch as a share of its lines' rate, what a join moves, and start to first token.

``python -m bench.store [--rate 12.5] [--rounds N] [--quick]``. Sources are processes on the second core that serve over
TLS behind a line of a known rate; the node that fetches has the first. The starts are real processes of ``node.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import multiprocessing
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from bench import models
from bench.report import ROUNDS, cores, in_turns, pin, report, spread
from bench.throttle import proxy
from swarm.model.manifest import Manifest
from swarm.model.publish import publish
from swarm.model.store import Store
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.plan import Plan, Stage
from swarm.ring.blob_client import BlobSource
from swarm.ring.blob_server import BlobServer
from swarm.ring.identity import load_or_create
from swarm.ring.plan import Offer, make_plan
from swarm.ring.supply import shape_of
from swarm.ring.transfer import BlobFetcher

SECRET = b"bench" * 7
START_TIMEOUT_S = 300.0
_MIB = 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument("--rate", type=float, default=12.5, help="of a line, 10**6 bytes a second (default: 12.5)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"counted (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="one round, nothing kept")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    pin(cores()[0])
    ir = models.smollm2()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = _opened(root / "whole")
        model = publish(ir, store, "smollm2", "", lambda *_: None)
        figures = fetching(store, model, root, arguments.rate * 1e6, rounds)
        figures |= asyncio.run(replanning(store, model, root))
    figures |= starting(rounds)
    settings = {"model": "smollm2", "rate_mb_s": arguments.rate, "rounds": rounds}
    report("store", figures, settings, keep=not arguments.quick)


def _opened(root: Path) -> Store:
    store = Store(root)
    store.open()
    return store


# --- a fetch over lines of a known rate -------------------------------------------------------------------------------


def fetching(store: Store, model: BlobId, root: Path, rate: float, rounds: int) -> dict[str, float]:
    """Bytes a second of a second node's fetch of the whole model, as a share of what its sources' lines carry."""
    wanted = _blobs(store, model)
    total = sum(wanted.values())
    numbers = itertools.count()
    with _source_process(store.root, root, rate, 3) as sources:

        def fetch(count: int) -> float:
            target = _opened(root / f"fetched-{next(numbers)}")
            began = time.perf_counter()
            received = asyncio.run(_fetch(target, wanted, sources[:count]))
            share = total / (time.perf_counter() - began) / (rate * count)
            print(f"{count} sources: {share:.3f} of the rate, {received / total:.4f} bytes a byte", file=sys.stderr)
            return share

        shares = in_turns({str(count): partial(fetch, count) for count in (1, 3)}, rounds)
    print(f"1 source: {spread(shares['1'])} of its rate; 3 sources: {spread(shares['3'])}")
    return {
        "fetch_1_source": statistics.median(shares["1"]),
        "fetch_3_sources": statistics.median(shares["3"]),
        "fetch_mb": total / 1e6,
    }


def _blobs(store: Store, model: BlobId) -> dict[BlobId, int]:
    manifest = Manifest.decode(store.read(model))
    return {model: store.path(model).stat().st_size, **{blob.id: blob.bytes for blob in manifest.blobs()}}


async def _fetch(target: Store, wanted: dict[BlobId, int], sources: Sequence[BlobSource]) -> int:
    """How many bytes came."""
    async with BlobFetcher(target, NodeId("0" * 32), SECRET) as fetcher:
        found = await fetcher.fetch_all(list(wanted.items()), sources, lambda _: None)
    return sum(found.by_node.values())


@contextlib.contextmanager
def _source_process(store: Path, root: Path, rate: float, count: int) -> Iterator[list[BlobSource]]:
    """Sources in a process of its own, each behind its own line."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(store, root, rate, count, theirs))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


def _serve(store: Path, root: Path, rate: float, count: int, told: Connection) -> None:
    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            sources = []
            for number in range(count):
                source = await stack.enter_async_context(serving(_opened(store), root / f"source-{number}"))
                port = await stack.enter_async_context(proxy(int(source.address.rpartition(":")[2]), rate))
                sources.append(BlobSource(source.node, f"127.0.0.1:{port}"))
            told.send(sources)
            await asyncio.to_thread(told.recv)

    pin(cores()[-1])
    asyncio.run(serve())


@contextlib.asynccontextmanager
async def serving(store: Store, home: Path) -> AsyncIterator[BlobSource]:
    """A node that hands out the blobs of `store`."""
    identity = load_or_create(home)
    app = web.Application()
    app.add_routes(BlobServer(store, identity.node, SECRET).routes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate_path, identity.key_path)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield BlobSource(identity.node, f"127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


# --- a join -----------------------------------------------------------------------------------------------------------


async def replanning(whole: Store, model: BlobId, root: Path) -> dict[str, float]:
    """A third node joins two: what the real plan moves, over real transfers, against the least of any order."""
    manifest = Manifest.decode(whole.read(model))
    names = [NodeId(letter * 32) for letter in "abc"]
    two = make_plan(shape_of(model, manifest), [_offer(name) for name in names[:2]], Epoch(1, names[0]))
    three = make_plan(shape_of(model, manifest), [_offer(name) for name in names], Epoch(2, names[0]), previous=two)
    if (len(two.stages), len(three.stages)) != (2, 3):
        raise SystemExit(f"the plans are not of 2 and 3 stages: {two.note}; {three.note}")
    stores = {name: _opened(root / f"node-{name[0]}") for name in names}
    async with contextlib.AsyncExitStack() as stack:
        sources = {name: await stack.enter_async_context(serving(stores[name], root / name)) for name in names}
        outside = await stack.enter_async_context(serving(whole, root / "outside"))
        for stage in two.stages:
            await _fetch(stores[stage.node], _needed(manifest, stage), [outside])
        held = {name: set(_held(store)) for name, store in stores.items()}
        moved = {}
        for stage in three.stages:
            others = [source for name, source in sources.items() if name != stage.node]
            moved[stage.node] = await _fetch(stores[stage.node], _needed(manifest, stage), others)
    least_of_plan = sum(_missing(manifest, stage, held[stage.node]) for stage in three.stages)
    orders = [_reordered(three, order) for order in itertools.permutations(names)]
    least = min(sum(_missing(manifest, stage, held[stage.node]) for stage in order) for order in orders)
    total = sum(moved.values())
    print(
        f"a join moved {total / _MIB:.1f} MiB; {least_of_plan / _MIB:.1f} by its plan, {least / _MIB:.1f} by any order"
    )
    return {
        "replan_bytes_to_least": total / least,
        "replan_bytes_to_plan": total / least_of_plan,
        "replan_mb": total / 1e6,
    }


def _offer(node: NodeId) -> Offer:
    """Room for all of it, and so slow that every node more makes the ring faster."""
    return Offer(node, node[0], 2**30, "CPU", 1e8)


def _needed(manifest: Manifest, stage: Stage) -> dict[BlobId, int]:
    return {blob.id: blob.bytes for blob in manifest.weights(stage.start, stage.end)}


def _held(store: Store) -> list[BlobId]:
    return [BlobId(path.name) for path in (store.root / "blobs").glob("*/*")]


def _missing(manifest: Manifest, stage: Stage, held: set[BlobId]) -> int:
    return sum(size for blob, size in _needed(manifest, stage).items() if blob not in held)


def _reordered(plan: Plan, order: Sequence[NodeId]) -> list[Stage]:
    """The plan's ranges, given to the nodes in another order."""
    return [
        Stage(node, node[0], stage.start, stage.end, "CPU", 0) for node, stage in zip(order, plan.stages, strict=True)
    ]


# --- start to first token ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    ready_s: float
    first_token_s: float
    resident_mb: float


def starting(rounds: int) -> dict[str, float]:
    """From the command to the first token of an answer: with a new home, and again with what the first start left."""
    cold, warm = [], []
    for turn in range(rounds + (rounds > 1)):  # the first warms up the system's own caches
        with tempfile.TemporaryDirectory() as home:
            found = [start(Path(home)) for _ in range(2)]
        if turn or rounds == 1:
            cold.append(found[0])
            warm.append(found[1])
            print(f"cold {found[0].first_token_s:.1f} s, warm {found[1].first_token_s:.1f} s", file=sys.stderr)
    print(f"start to first token: cold {spread([one.first_token_s for one in cold])} s", end="")
    print(f", warm store {spread([one.first_token_s for one in warm])} s")
    return {
        "start_cold_s": statistics.median(one.first_token_s for one in cold),
        "start_warm_store_s": statistics.median(one.first_token_s for one in warm),
        "start_warm_to_cold": statistics.median(
            a.first_token_s / b.first_token_s for a, b in zip(warm, cold, strict=True)
        ),
        "start_resident_mb": statistics.median(one.resident_mb for one in warm),
    }


def start(home: Path) -> Start:
    """One start of a lone node with the GGUF of SmolLM2, on the first core."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, links = one.getsockname()[1], two.getsockname()[1]
    command = [
        sys.executable,
        "node.py",
        "run",
        "--headless",
        "--open",
        "--swarm",
        f"bench-{port}",
        "--port",
        str(links),
    ]
    command += ["--home", str(home / "home"), "--api-port", str(port), "--model", str(models.gguf_file("smollm2"))]
    began = time.perf_counter()
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=Path(__file__).parents[1]
        )
    try:
        while not _status(port).get("ready"):
            if process.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                raise SystemExit("the node does not come up:\n" + (home / "log").read_text("utf-8", "replace"))
            time.sleep(0.05)
        ready_s = time.perf_counter() - began
        _first_token(port)
        first_token_s = time.perf_counter() - began
        return Start(ready_s, first_token_s, psutil.Process(process.pid).memory_info().rss / 1e6)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _status(port: int) -> dict[str, Any]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        try:
            connection.request("GET", "/status")
            found: dict[str, Any] = json.loads(connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException):
            return {}
        return found


def _first_token(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the node does not answer: {response.read()[:300]!r}")
        response.read()


if __name__ == "__main__":
    main()
