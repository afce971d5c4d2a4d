"""Two nodes, a core each, against one PC: the whole model on one core in our engine, one user.

Real processes of ``node.py`` on loopback, asked over the HTTP API of the first; each has too little memory for the
whole model, so that they share it. The node's core also carries its API, and the users' clients run on the first core.

``python -m bench.two_nodes [--model qwen|smollm2] [--users N]… [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import openvino_genai
import psutil

from bench import models
from bench.report import ROUNDS, cores, first_in_line, percentile, pin, ratios, report, spread
from bench.shards import TOKENS, Party, ours
from tests.prompts import PROMPTS

FORMING_TIMEOUT_S = 600.0
SILENCE_TIMEOUT_S = 120.0
_PREFIX = {"qwen": "", "smollm2": "smollm2_"}
_NAMES = {1: "two_nodes_one_user", 2: "two_nodes_two_users_plain"}


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer as a user saw it."""

    asked: float
    pieces: tuple[float, ...]
    """When each piece of text came, seconds."""
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Round:
    rate: float
    """Tokens per second of all users together, while all of them decode."""
    tpot_ms: list[float]
    ttft_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.two_nodes", description=__doc__)
    parser.add_argument("--model", choices=sorted(_PREFIX), default="qwen")
    parser.add_argument("--users", type=int, action="append", help="at once (default: 1, 2, 4 and 8)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"counted (default: {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of each answer (default: {TOKENS})")
    parser.add_argument("--first", action="store_true", help="go before all other processes of a busy PC (Linux, root)")
    parser.add_argument("--quick", action="store_true", help="one round of 16 tokens, nothing kept")
    arguments = parser.parse_args()
    users = arguments.users or [1, 2, 4, 8]
    tokens, rounds = (16, 1) if arguments.quick else (arguments.tokens, arguments.rounds)
    node_cores = (cores()[0], cores()[-1])
    pin(node_cores[0])
    ir = models.qwen_int4() if arguments.model == "qwen" else models.smollm2()
    solo, shared, stages = asyncio.run(measure(ir, node_cores, users, rounds, tokens, arguments.first))
    prefix, figures = _PREFIX[arguments.model], {}
    solo_rates = [found.rate for found in solo]
    print(f"one PC: {spread(solo_rates)} tok/s")
    figures["one_pc_tokens_per_second"] = statistics.median(solo_rates)
    figures["one_pc_ttft_ms"] = statistics.median(found.ttft_ms for found in solo)
    for count, found in shared.items():
        times = ratios([one.rate for one in found], solo_rates)
        name = _NAMES.get(count, f"two_nodes_{count}")
        figures[name] = statistics.median(times)
        figures[f"{name}_tokens_per_second"] = statistics.median(one.rate for one in found)
        figures[f"{name}_ttft_ms"] = statistics.median(one.ttft_ms for one in found)
        tpot_ms = [ms for one in found for ms in one.tpot_ms]
        figures[f"{name}_tpot_ms"] = statistics.median(tpot_ms)
        figures[f"{name}_tpot_p95_ms"] = percentile(tpot_ms, 0.95)
        print(f"two nodes, {count} users: {spread(times)} of one PC")
    settings = {
        "model": arguments.model,
        "rounds": rounds,
        "tokens": tokens,
        "first": arguments.first,
        "stages": stages,
    }
    figures = {prefix + name: value for name, value in figures.items()}
    report("two_nodes", figures, settings, keep=not arguments.quick)


async def measure(
    ir: Path, node_cores: tuple[int, int], users: list[int], rounds: int, tokens: int, first: bool
) -> tuple[list[Round], dict[int, list[Round]], list[str]]:
    """Of each round: one PC, then two nodes with each number of users, in turns; the first round warms up."""
    solo: list[Round] = []
    shared: dict[int, list[Round]] = {count: [] for count in users}
    spawn = multiprocessing.get_context("spawn")
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_TIMEOUT_S)
    one_pc = ProcessPoolExecutor(1, spawn, pin, node_cores[:1])
    with two_nodes(ir, node_cores) as (apis, nodes, logs), one_pc:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                with anyio.fail_after(FORMING_TIMEOUT_S):
                    _, stages = [await formed(session, api) for api in apis]
            except TimeoutError:
                raise SystemExit("no ring was formed:\n" + "\n".join(_read(log) for log in logs)) from None
            for turn in range(rounds + 1):
                alone = await asyncio.get_running_loop().run_in_executor(one_pc, answer_alone, ir, turn, tokens, first)
                found = {}
                for count in users:
                    with first_in_line(first, nodes):
                        found[count] = await ask_together(session, apis[0], count, turn, tokens)
                if turn:
                    solo.append(alone)
                    for count, one in found.items():
                        shared[count].append(one)
                        print(f"round {turn}: {count} users {one.rate / alone.rate:.3f}", file=sys.stderr, flush=True)
    return solo, shared, stages


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


# --- one PC -----------------------------------------------------------------------------------------------------------


def answer_alone(ir: Path, turn: int, tokens: int, first: bool) -> Round:
    """The whole model in our engine, one prompt; in the pinned process."""
    party, tokenizer = _one_pc(ir)
    history = [{"role": "user", "content": _prompt(turn)}]
    text = tokenizer.apply_chat_template(history, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
    with first_in_line(first):
        answer = party(ids, tokens)
    return Round(answer.rate, answer.token_ms, answer.ttft_ms)


@cache
def _one_pc(ir: Path) -> tuple[Party, Any]:
    return ours(ir, 1), openvino_genai.Tokenizer(str(ir))


def _prompt(turn: int) -> str:
    return list(PROMPTS.values())[turn % len(PROMPTS)]


# --- two nodes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_nodes(ir: Path, node_cores: tuple[int, int]) -> Iterator[tuple[list[str], list[int], list[Path]]]:
    """Start two nodes that share the model, a core each: (their APIs, process ids, logs)."""
    weights = (ir / "openvino_model.bin").stat().st_size
    memory = f"{int(weights * 0.85) // 2**20 + 100}MB"
    links, apis = _free_ports(2), _free_ports(2)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs = [Path(folder, f"{number}.log") for number in (0, 1)]
        nodes = []
        for number in (0, 1):
            command = [sys.executable, "node.py", "run", "--headless", "--open", "--swarm", f"bench-{links[0]}"]
            command += ["--home", str(Path(folder, str(number))), "--name", f"node{number}", "--memory", memory]
            command += ["--port", str(links[number]), "--api-port", str(apis[number])]
            command += ["--peer", f"127.0.0.1:{links[1 - number]}"]
            if number == 0:
                command += ["--model", str(ir)]
            nodes.append(stack.enter_context(_running(command, node_cores[number], logs[number])))
        yield [f"http://127.0.0.1:{port}" for port in apis], nodes, logs


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


async def formed(session: aiohttp.ClientSession, url: str) -> list[str]:
    """Wait until the node at `url` serves in a ring of two; its stages as text."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/status") as response:
                status = await response.json()
            if status["ready"] and len(status["stages"]) == 2:
                return [f"{stage['name']} {stage['start']}-{stage['end']}" for stage in status["stages"]]
        await anyio.sleep(0.5)


async def ask_together(session: aiohttp.ClientSession, api: str, users: int, turn: int, tokens: int) -> Round:
    """`users` prompts at once."""
    asking = [ask(session, api, _prompt(turn + user), tokens) for user in range(users)]
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
    ttft_ms = statistics.median((stream.pieces[0] - stream.asked) * 1000 for stream in streams)
    return Round(count / (end - begin), tpot_ms, ttft_ms)


async def ask(session: aiohttp.ClientSession, api: str, prompt: str, tokens: int) -> Stream:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked, pieces, text, count = time.perf_counter(), [], "", 0
    async with session.post(f"{api}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            count = (event.get("usage") or {}).get("completion_tokens", count)
            for choice in event.get("choices", ()):
                if piece := choice.get("delta", {}).get("content"):
                    pieces.append(time.perf_counter())
                    text += piece
    return Stream(asked, tuple(pieces), count, text)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in listening]


if __name__ == "__main__":
    main()
