"""Real nodes on this PC, a core each, and users who ask them together over the HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anyio
import psutil

from bench import models
from bench.clients import Stream, ask
from tests.prompts import PROMPTS

FORMING_TIMEOUT_S = 600.0
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Drafting:
    """How nodes are started."""

    flags: tuple[str, ...]
    model: Path | None = None


PLAIN = Drafting(("--speculation", "off"))
DEFAULT = Drafting(("--draft", "none"))
"""As a swarm whose model has no draft model."""


@dataclass(frozen=True, slots=True)
class Round:
    rate: float
    """Tokens per second of all users together, while all of them decode; 0 where they never did."""
    tpot_ms: list[float]
    """Of each user, as the next."""
    ttfts_ms: list[float]

    @property
    def ttft_ms(self) -> float:
        """The median user's."""
        return statistics.median(self.ttfts_ms)


def drafting_for(model: str) -> Drafting:
    """With the 0.5B model where it has the target's tokenizer, else from the text alone."""
    if model != "qwen":
        return DEFAULT
    draft = models.draft_int4()
    return Drafting(("--draft", str(draft)), draft)


def prompt_of(turn: int) -> str:
    return list(PROMPTS.values())[turn % len(PROMPTS)]


@dataclass(frozen=True, slots=True)
class Ring:
    """Nodes that share a model."""

    apis: list[str]
    processes: list[int]
    logs: list[Path]


@contextlib.asynccontextmanager
async def ring_of(
    ir: Path, node_cores: Sequence[int], drafting: Drafting = PLAIN
) -> AsyncIterator[tuple[Ring, list[str]]]:
    """Nodes that share the model, one for each core, formed: (the nodes, their stages as text)."""
    with start_nodes(ir, node_cores, drafting) as ring:
        async with aiohttp.ClientSession() as session:
            try:
                with anyio.fail_after(FORMING_TIMEOUT_S):
                    drafts = drafting.model is not None
                    *_, stages = [await formed(session, api, len(node_cores), drafts=drafts) for api in ring.apis]
            except TimeoutError:
                logs = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in ring.logs)
                raise SystemExit(f"no ring was formed:\n{logs}") from None
        yield ring, stages


@contextlib.contextmanager
def start_nodes(ir: Path, node_cores: Sequence[int], drafting: Drafting = PLAIN) -> Iterator[Ring]:
    """Processes of ``node.py``; several have too little memory each for the whole model, so that they share it."""
    count = len(node_cores)
    weights_mb = (ir / "openvino_model.bin").stat().st_size // 2**20
    draft = (drafting.model / "openvino_model.bin").stat().st_size if drafting.model else 0
    draft_mb = 2 * draft // 2**20 + 200 if draft else 0  # with its cache and the repacked head
    memory = f"{int(weights_mb * 0.85) + draft_mb + 100}MB" if count > 1 else f"{weights_mb + draft_mb + 1000}MB"
    links, apis = _free_ports(count), _free_ports(count)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs = [Path(folder, f"{number}.log") for number in range(count)]
        nodes = []
        for number in range(count):
            command = [sys.executable, "node.py", "run", "--headless", "--open", "--swarm", f"bench-{links[0]}"]
            command += ["--home", str(Path(folder, str(number))), "--name", f"node{number}", "--memory", memory]
            command += ["--port", str(links[number]), "--api-port", str(apis[number])]
            for other in links[:number] + links[number + 1 :]:
                command += ["--peer", f"127.0.0.1:{other}"]
            command += drafting.flags
            if number == 0:
                command += ["--model", str(ir)]
            nodes.append(stack.enter_context(_running(command, node_cores[number], logs[number])))
            _wait_for(links[number])  # a node that finds nobody founds a swarm of its own, with a model of its own
        yield Ring([f"http://127.0.0.1:{port}" for port in apis], nodes, logs)


@contextlib.contextmanager
def _running(command: list[str], core: int, log: Path) -> Iterator[int]:
    root = Path(__file__).parents[1]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=root)
    try:
        if hasattr(psutil.Process, "cpu_affinity"):
            psutil.Process(process.pid).cpu_affinity([core])
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _wait_for(port: int) -> None:
    """Until somebody listens there."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


async def formed(session: aiohttp.ClientSession, url: str, stages: int, *, drafts: bool = False) -> list[str]:
    """Wait until the node at `url` serves in a ring of so many stages, and can draft with a model; they as text."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/status") as response:
                status = await response.json()
            drafting = bool(status["speculation"]["draft"]) or not drafts
            if status["ready"] and len(status["stages"]) == stages and drafting:
                return [f"{stage['name']} {stage['start']}-{stage['end']}" for stage in status["stages"]]
        await anyio.sleep(0.5)


async def ask_together(apis: Sequence[str], users: int, turn: int, tokens: int) -> Round:
    """`users` prompts at once, each asked of the next PC in turn: people sit at their own."""
    asking = [ask(apis[user % len(apis)], prompt_of(turn + user), tokens) for user in range(users)]
    return together(await asyncio.gather(*asking))


def together(streams: list[Stream]) -> Round:
    """Count what came from the moment the last user has a first token until the first user is done."""
    begin = max(stream.pieces[0] for stream in streams)
    end = min(stream.pieces[-1] for stream in streams)
    count = 0.0
    tpot_ms = []
    for stream in streams:
        # A piece of text is a token, but for those that end inside a character.
        tokens_a_piece = (stream.tokens - 1) / (len(stream.pieces) - 1)
        count += tokens_a_piece * sum(begin < piece <= end for piece in stream.pieces)
        tpot_ms.append((stream.pieces[-1] - stream.pieces[0]) * 1000 / (stream.tokens - 1))
    ttfts_ms = [(stream.pieces[0] - stream.asked) * 1000 for stream in streams]
    return Round(count / (end - begin) if end > begin else 0.0, tpot_ms, ttfts_ms)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in listening]
