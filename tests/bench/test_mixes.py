"""Mixes of sessions in small: a tiny model on every kind of ring, and that a fault would be seen."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench import mixes, office
from bench.guests import invite, other_question
from bench.ledger import Ledger
from bench.mixes import Setting, Subject, run
from bench.simulator import Forgetful
from swarm.engine.base import Engine, Output
from swarm.engine.kinds import ExactEngine
from swarm.engine.paged import PagedEngine
from swarm.model.shard import Shard
from swarm.model.tiny import VOCABULARY, tiny_model
from swarm.protocol.config import PAGED, STATEFUL
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind, Segment
from tests.bench.test_exactness import LAYERS, engines


class Syllables:
    """Four letters are a token; a token is a letter."""

    stop_tokens = frozenset(range(0, VOCABULARY, 50))

    def render_chat(self, messages: Sequence[tuple[str, str]], /) -> str:
        return "".join(f"{role + content:\n<{-(-len(role + content) // 4) * 4}}" for role, content in messages)

    def encode(self, text: str, /) -> list[int]:
        return [zlib.crc32(text[start : start + 4].encode()) % VOCABULARY for start in range(0, len(text), 4)]

    def stream(self) -> Syllables:
        return self

    def push(self, token: int, /) -> str:
        return chr(97 + token % 26)

    def flush(self) -> str:
        return ""


def draft() -> Engine:
    return Forgetful(engines(PAGED, 1, 16384)[0], 0.67)


def subject(make: Callable[[str, int, int], Sequence[ExactEngine]] = engines) -> Subject:
    return Subject(make, Syllables(), 24, draft)


SETTINGS = (
    Setting(PAGED, 2, "roomy", 12),
    Setting(PAGED, 3, "tight", 17),
    Setting(STATEFUL, 1, "tight", 15),
    Setting(STATEFUL, 3, "roomy", 20),
)


def test_everybody_is_told_what_they_are_told_alone() -> None:
    found, courses = zip(*run(subject(), SETTINGS), strict=True)
    answers = [one for each in found for one in each]
    assert [(one.setting, one.told.guest, one.difference) for one in answers if one.difference] == []
    assert [course.faults for course in courses] == [[], [], [], []]
    assert sum(one.mismatches for course in courses for one in course.stats) == 0
    figures = mixes.count(answers, courses)
    assert figures["whole"] > 40
    assert figures["answers"] - figures["whole"] > 10
    assert min(figures[name] for name in ("shared", "continued", "begun_anew")) > 0
    assert min(figures["replays"] + figures["waited"], figures["drafted"], figures["rejected"]) > 0


class Influenced(PagedEngine):
    """Draws another token where several sessions decode together."""

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        outputs = super().run(batch)
        if sum(segment.kind is RowKind.DECODE for segment in batch) < 3:
            return outputs
        return [replace(output, drawn=tuple(token ^ 1 for token in output.drawn)) for output in outputs]


class Leaking(PagedEngine):
    def close_session(self, session: SessionId) -> None:
        """Forgotten."""


class Rounding(PagedEngine):
    """Its logits differ a little from one forward to the next; its draws do not."""

    def logits(self) -> np.ndarray:
        logits = super().logits().copy()
        logits[:, 0] += np.random.default_rng().random() * 1e-4
        return logits


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Influenced, "the first"), (Leaking, "left behind"), (Rounding, "stages=1")],
)
def test_a_fault_is_found(kind: type[PagedEngine], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office, "REST_S", 0.5)

    def make(_: str, stages: int, kv_tokens: int) -> Sequence[ExactEngine]:
        if kv_tokens == 2 * mixes.LONGEST:  # alone
            return engines(PAGED, stages, kv_tokens)
        return [kind(Shard(tiny_model(LAYERS)), "CPU", kv_tokens, VOCABULARY, 1)]

    ((found, course),) = run(subject(make), [Setting(PAGED, 1, "roomy", 12)])
    assert any(message in text for text in (*course.faults, *(one.difference for one in found)))


def test_a_ledger_tells_histories_apart() -> None:
    ledger, exact = Ledger(kinds=True), Ledger(kinds=False)
    prefilled, decoded = [(5, RowKind.PREFILL)] * 2, [(5, RowKind.PREFILL), (5, RowKind.DECODE)]
    assert ledger.histories(prefilled)[0] == ledger.histories(decoded)[0]
    assert ledger.histories(prefilled)[1] != ledger.histories(decoded)[1]
    assert exact.histories(prefilled) == exact.histories(decoded)
    first, *_, last = ledger.histories(prefilled)
    assert ledger.histories(prefilled[1:], first) == [last]
    ledger.note(last, np.array([1.0, 2.0]), "here")
    ledger.note(last, np.array([1.0, 2.0]), "there")
    assert ledger.conflicts == []
    ledger.note(last, np.array([1.0, np.nextafter(2.0, 3.0)]), "elsewhere")
    assert ledger.conflicts == ["elsewhere"]


@pytest.mark.parametrize("seed", range(8))
def test_one_person_asks_something_else(seed: int) -> None:
    mix = invite(seed, 24)
    changed, other = other_question(mix)
    assert mix == invite(seed, 24)
    pairs = zip(mix.guests, other.guests, strict=True)
    assert [one.number for one, two in pairs if one != two] == [changed]
