"""Stages without a model: the next token is a function of all ids before it and of how each row was run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from swarm.coordinator.pace import Speculation
from swarm.protocol.ids import BlobId, Epoch, NodeId, SessionId
from swarm.protocol.messages import Drawn, Refused, RowKind, Segment
from swarm.protocol.plan import Plan, Stage

Row = tuple[int, RowKind]

NODE = NodeId("a" * 32)
MODEL = BlobId("b" * 64)
PLAIN = Speculation(enabled=False)


def next_token(rows: Sequence[Row]) -> int:
    """A small letter. A row of the wrong kind changes it, as it changes the last bits of a real model's logits."""
    return 97 + zlib.crc32(repr([(token, int(kind)) for token, kind in rows]).encode()) % 26


def prompt_rows(ids: Sequence[int]) -> list[Row]:
    """How new prompt tokens are run: a lone one is a decode row."""
    kind = RowKind.PREFILL if len(ids) > 1 else RowKind.DECODE
    return [(token, kind) for token in ids]


def plain_decode(prompt: Sequence[int], count: int) -> list[int]:
    """What an undisturbed ring answers."""
    return decode_behind(prompt_rows(prompt), count)


def decode_behind(rows: Sequence[Row], count: int) -> list[int]:
    """What it answers behind rows that were run like this."""
    rows, answer = list(rows), []
    for _ in range(count):
        answer.append(next_token(rows))
        rows.append((answer[-1], RowKind.DECODE))
    return answer


def make_plan(number: int, stages: int, kv_tokens: int = 0, rings: int = 1) -> Plan:
    """`rings` of so many stages each; every one of them takes 10 ms a token."""
    nodes = [NodeId(f"{number:016x}{index:016x}") for index in range(stages * rings)]
    return Plan(
        Epoch(number, NODE),
        MODEL,
        tuple(Stage(node, node[-4:], i % stages, i % stages + 1, "CPU", 1) for i, node in enumerate(nodes)),
        kv_tokens=kv_tokens,
        ring_token_ms=(10.0,) * rings if stages else (),
    )


class FakeStages:
    """All stages as one: caches by session, the rules of `messages.Segment`."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.caches: dict[SessionId, list[Row]] = {}
        self.attempts: dict[SessionId, int] = {}
        self.ran: dict[SessionId, tuple[int, int]] = {}

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> int:
        """Begin with what another session computed, in blocks of four."""
        rows, held = prompt_rows(tokens), 0
        for cache in self.caches.values():
            while held + 4 <= len(rows) and cache[: held + 4] == rows[: held + 4]:
                held += 4
        self.caches[session] = rows[:held]
        return held

    def run(self, segment: Segment) -> Drawn | Refused | None:
        assert segment.kind is RowKind.DECODE or len(segment.tokens) > 1, "a prefill chunk of one row"
        session, attempt = segment.session, segment.attempt
        if segment.epoch != self.epoch:
            return Refused(session, segment.epoch, attempt, "another epoch", fatal=False)
        if attempt < self.attempts.get(session, 0):
            return None
        self.attempts[session] = attempt
        cache = self.caches.setdefault(session, [])
        gap = segment.number and self.ran.get(session) != (attempt, segment.number - 1)
        if gap or segment.start > len(cache):
            return Refused(session, self.epoch, attempt, "the cache is behind", fatal=False)
        self.ran[session] = (attempt, segment.number)
        cache[segment.start :] = [(token, segment.kind) for token in segment.tokens]
        if not segment.wanted:
            return None
        first = len(cache) - segment.wanted + 1
        tokens = tuple(next_token(cache[:position]) for position in range(first, len(cache) + 1))
        return Drawn(session, self.epoch, attempt, first, tokens)
