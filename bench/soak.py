"""Users who come and go for an hour: does anything grow, leak, or change an answer?

Two nodes share SmolLM2. Each user asks, reads to the end, or goes away in the middle or before the first token; prompts
begin alike or not, greedy or sampled. Resident memory of both nodes is taken all the while. In the end everything must
be idle again, the first question must get the first answer, and memory must not have grown since the second sixth.

``python -m bench.soak [--minutes 60] [--users 6] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp
import anyio
import psutil

from bench import models
from bench.clients import SILENCE_TIMEOUT_S, ask
from bench.nodes import DEFAULT, ring_of
from bench.report import cores, pin, report
from tests.prompts import PROMPTS

SAMPLE_S = 10.0
IDLE_TIMEOUT_S = 120.0
SYSTEM = "You answer in one short sentence, calmly and without any lists, as a patient teacher would do it for a child."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=6, help="at once (default: 6)")
    parser.add_argument("--quick", action="store_true", help="one minute, nothing kept")
    arguments = parser.parse_args()
    minutes = 1.0 if arguments.quick else arguments.minutes
    pin(cores()[0])
    figures = asyncio.run(soak(minutes, arguments.users))
    settings = {"model": "smollm2", "nodes": 2, "users": arguments.users, "minutes": minutes}
    report("soak", figures, settings, keep=not arguments.quick)


async def soak(minutes: float, users: int) -> dict[str, float]:
    """See above; MB and counts."""
    counts: Counter[str] = Counter()
    nodes = ring_of(models.smollm2(), (cores()[0], cores()[-1]), DEFAULT)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_TIMEOUT_S)
    async with nodes as (ring, _), aiohttp.ClientSession(timeout=timeout) as session:
        probe = next(iter(PROMPTS.values()))
        before = [(await ask(api, probe, 48)).text for api in ring.apis]
        memory: list[list[float]] = []
        with anyio.move_on_after(minutes * 60):
            async with anyio.create_task_group() as group:
                for number in range(users):
                    api = ring.apis[number % len(ring.apis)]
                    group.start_soon(_user, session, api, random.Random(number), counts)
                while True:
                    await anyio.sleep(SAMPLE_S)
                    memory.append([psutil.Process(one).memory_info().rss / 2**20 for one in ring.processes])
                    print(f"{dict(counts)}, {[round(mb) for mb in memory[-1]]} MB", file=sys.stderr, flush=True)
        left = await _until_idle(session, ring.apis)
        after = [(await ask(api, probe, 48)).text for api in ring.apis]
    first, last = _ends([sum(sample) for sample in memory])
    return {
        "minutes": minutes,
        **{name: float(counts[name]) for name in ("answers", "left_early", "left_at_once", "errors")},
        "changed_answers": float(sum(one != other for one, other in zip(before, after, strict=True))),
        "left_running": float(left),
        "memory_first_mb": first,
        "memory_last_mb": last,
        "memory_growth_mb": last - first,
    }


def _ends(samples: Sequence[float]) -> tuple[float, float]:
    """Medians of the second and of the last sixth; the first one warms up."""
    part = max(1, len(samples) // 6)
    return statistics.median(samples[part : 2 * part] or samples), statistics.median(samples[-part:])


async def _user(session: aiohttp.ClientSession, api: str, chance: random.Random, counts: Counter[str]) -> None:
    while True:
        question = chance.choice(list(PROMPTS.values()))
        system = [{"role": "system", "content": SYSTEM}] if chance.random() < 0.5 else []
        body = {
            "messages": [*system, {"role": "user", "content": question}],
            "max_tokens": chance.randint(4, 64),
            "temperature": chance.choice([0.0, 0.8]),
            "stream": True,
        }
        patience = chance.choice([None, None, None, 0.05, 0.5, 1.5])
        with contextlib.suppress(aiohttp.ClientConnectionError), anyio.move_on_after(patience):
            counts[await _answered(session, api, body)] += 1
            patience = None
        if patience is not None:
            counts["left_at_once" if patience < 0.1 else "left_early"] += 1
        await anyio.sleep(chance.random())


async def _answered(session: aiohttp.ClientSession, api: str, body: dict[str, object]) -> str:
    """Read to the end: what became of it."""
    async with session.post(f"{api}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return "errors"
        text = (await response.read()).decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "errors" if any("error" in event for event in events) else "answers"


async def _until_idle(session: aiohttp.ClientSession, apis: Sequence[str]) -> int:
    """Answers and segments that are still there after everybody has gone; 0 is what is wanted."""
    left, deadline = 1, time.monotonic() + IDLE_TIMEOUT_S
    while left and time.monotonic() < deadline:
        await anyio.sleep(1.0)
        left = 0
        for api in apis:
            async with session.get(f"{api}/status") as response:
                status = await response.json()
            left += sum(member["sessions"] + member["waiting"] for member in status["members"])
    return left


if __name__ == "__main__":
    main()
