"""The self-test of a device: do the exactness rules of an engine hold here?

A small random model decodes plainly, all its layers in one shard, one session, one row at a time. Then the same tokens
are run in other ways, and every logit is compared bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarm.engine.kinds import ExactEngine, make_engine
from swarm.model.cut import cut
from swarm.model.shard import Shard
from swarm.model.tiny import VOCABULARY, tiny_model
from swarm.protocol.config import PAGED
from swarm.protocol.ids import NO_EPOCH, NodeId, SessionId
from swarm.protocol.messages import RowKind, Segment
from swarm.protocol.sampling import GREEDY
from swarm.protocol.tensors import Array

LAYERS, PROMPT, DECODED = 3, 40, 24


@dataclass(frozen=True, slots=True)
class SelfTest:
    device: str
    engine: str
    """One of `kinds.ENGINES`."""
    differences: dict[str, float]
    """For each way of running, the largest |difference| of a logit from plain decoding; 0.0 is exact."""
    seconds: float

    @property
    def exact(self) -> bool:
        return not any(self.differences.values())


class Chain:
    """Engines one behind the other, as the stages of a ring are, without a ring."""

    def __init__(self, engines: Sequence[ExactEngine]) -> None:
        self.engines = engines

    def run(self, batch: Sequence[Segment]) -> tuple[list[tuple[int, ...]], Array]:
        """The drawn tokens of each segment, and the wanted rows' logits ``[rows, vocabulary]``."""
        for engine in self.engines:
            outputs = engine.run(batch)
            batch = [replace(segment, hidden=output.hidden) for segment, output in zip(batch, outputs, strict=True)]
        wanted = sum(segment.wanted for segment in batch)
        return [output.drawn for output in outputs], self.engines[-1].logits()[:wanted].copy()

    def adopt(self, session: int, prompt: Sequence[int]) -> int:
        """Begin a session anew with the first positions of `prompt` that every engine holds; how many those are."""
        name, held = segment(session, 0, [0]).session, len(prompt)
        for engine in self.engines:
            engine.close_session(name)
            held = engine.adopt(name, prompt[:held])
        return held

    def decode(self, session: int, prompt: Sequence[int], count: int) -> tuple[list[int], Array]:
        """Plain greedy decoding: `count` tokens and the logits each was drawn from."""
        drawn, logits = self.run([segment(session, 0, prompt)])
        tokens, rows = [drawn[0][0]], [logits]
        while len(tokens) < count:
            drawn, logits = self.run([segment(session, len(prompt) + len(tokens) - 1, tokens[-1:])])
            tokens.append(drawn[0][0])
            rows.append(logits)
        return tokens, np.concatenate(rows)


def segment(session: int, start: int, tokens: Sequence[int], wanted: int = 1, kind: RowKind | None = None) -> Segment:
    """Rows of a session: several are prefill and one is decoding, unless `kind` says otherwise."""
    kind = kind or (RowKind.PREFILL if len(tokens) > 1 else RowKind.DECODE)
    name = SessionId(f"00000000-{session:x}-00000000")
    return Segment(name, NodeId("0" * 32), NO_EPOCH, 0, start, kind, tuple(tokens), wanted, GREEDY)


def self_test(device: str, threads: int | None = None, kind: str = PAGED) -> SelfTest:
    """Run every check of the engine `kind` on `device`; blocking, about a second.

    Raises `DeviceError` where it cannot run a shard.
    """
    began = time.perf_counter()

    def engine(start: int, end: int) -> ExactEngine:
        return make_engine(kind, Shard(cut(tiny_model(LAYERS), start, end)), device, 1024, VOCABULARY, threads)

    whole = Chain([engine(0, LAYERS)])
    random = np.random.default_rng(1)
    prompt: list[int] = random.integers(0, VOCABULARY, PROMPT).tolist()
    other: list[int] = random.integers(0, VOCABULARY, PROMPT + 7).tolist()
    reference = Reference(prompt, other, *whole.decode(1, prompt, DECODED), *whole.decode(2, other, DECODED))
    checks: dict[str, Callable[[], float]] = {
        "again": lambda: _distance(whole.decode(3, prompt, DECODED)[1], reference.logits),
        "cut": lambda: _distance(
            Chain([engine(0, 1), engine(1, LAYERS)]).decode(1, prompt, DECODED)[1], reference.logits
        ),
        "chunks": lambda: check_chunks(whole, reference),
        "batches": lambda: check_batches(whole, reference),
        "windows": lambda: check_windows(whole, reference, random),
    }
    differences = {name: check() for name, check in checks.items()}
    return SelfTest(device, kind, differences, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Reference:
    """Two prompts and how they are decoded plainly."""

    prompt: list[int]
    other_prompt: list[int]
    tokens: list[int]
    logits: Array
    other_tokens: list[int]
    other_logits: Array


def check_chunks(chain: Chain, reference: Reference) -> float:
    """The prompt in chunks of 8."""
    prompt = reference.prompt
    for start in range(0, len(prompt), 8):
        _, logits = chain.run([segment(11, start, prompt[start : start + 8])])
    return _distance(logits, reference.logits[:1])


def check_batches(chain: Chain, reference: Reference) -> float:
    """Two sessions in one forward, one prefilling while the other decodes, then both decoding."""
    prompt, other = reference.prompt, reference.other_prompt
    chain.run([segment(21, 0, prompt)])
    worst = 0.0
    _, logits = chain.run([segment(21, len(prompt), reference.tokens[:1]), segment(22, 0, other)])
    worst = max(worst, _distance(logits[0], reference.logits[1]), _distance(logits[1], reference.other_logits[0]))
    for i in range(1, len(reference.tokens) - 1):
        batch = [
            segment(21, len(prompt) + i, reference.tokens[i : i + 1]),
            segment(22, len(other) + i - 1, reference.other_tokens[i - 1 : i]),
        ]
        _, logits = chain.run(batch)
        worst = max(
            worst, _distance(logits[0], reference.logits[i + 1]), _distance(logits[1], reference.other_logits[i])
        )
    return worst


def check_windows(chain: Chain, reference: Reference, random: np.random.Generator) -> float:
    """Verify windows of 1 to 6 rows, each after a window of wrong tokens that is rejected."""
    prompt, tokens = reference.prompt, reference.tokens
    chain.run([segment(31, 0, prompt)])
    done, worst = 0, 0.0
    while done < len(tokens) - 1:
        start = len(prompt) + done
        wrong = [tokens[done], *random.integers(0, VOCABULARY, 5).tolist()]
        chain.run([segment(31, start, wrong, len(wrong), RowKind.DECODE)])
        window = tokens[done : min(done + int(random.integers(1, 7)), len(tokens) - 1)]
        _, logits = chain.run([segment(31, start, window, len(window), RowKind.DECODE)])
        worst = max(worst, _distance(logits, reference.logits[done + 1 : done + 1 + len(window)]))
        done += len(window)
    return worst


def _distance(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max())
