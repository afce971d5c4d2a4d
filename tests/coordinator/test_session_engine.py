"""Sessions on the paged engine: a replay and a turn give the same logits, bit for bit."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from swarm.coordinator.events import Begin, Effect, Emit, Finish, PlanChanged, SendSegment
from swarm.coordinator.session import Counters, Session, SessionLimits
from swarm.engine.kinds import make_engine
from swarm.engine.selftest import Chain
from swarm.model.cut import cut
from swarm.model.shard import Shard
from swarm.model.tiny import VOCABULARY, tiny_model
from swarm.protocol.config import ENGINES, PAGED
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Drawn
from swarm.protocol.sampling import SamplingParams
from swarm.protocol.tensors import Array
from tests.coordinator.fake_stages import MODEL, NODE, PLAIN, make_plan

LAYERS = 3
LIMITS = SessionLimits(chunk_rows=16, sibling_rows=5)


def chain(*ends: int, kind: str = PAGED) -> Chain:
    starts = (0, *ends[:-1])
    return Chain(
        [
            make_engine(kind, Shard(cut(tiny_model(LAYERS), start, end)), "CPU", 1024, VOCABULARY, 1)
            for start, end in zip(starts, ends, strict=True)
        ]
    )


class Run:
    """One session whose ring becomes another after `change_after` tokens of each turn."""

    def __init__(self, rings: list[Chain], change_after: int | None) -> None:
        self.rings = rings
        self.change_after = change_after
        self.epoch = 1
        self.session = Session(SessionId("aaaaaaaa-1-00000000"), NODE, make_plan(1, 1), LIMITS, Counters(), PLAIN)
        self.logits: dict[int, Array] = {}
        self.replayed = 0

    def turn(self, prompt: list[int], count: int) -> list[int]:
        sampling = SamplingParams(temperature=1.0, seed=11)
        tokens: list[int] = []
        kinds = bytes(self.session.log.kinds(0, len(self.session.log)))
        effects: deque[Effect] = deque(
            self.session.handle(Begin(tuple(prompt), MODEL, 1000, sampling, max_tokens=count, kinds=kinds), 0.0)
        )
        changed = False
        while not isinstance(effect := effects.popleft(), Finish):
            if isinstance(effect, Emit):
                tokens += effect.tokens
                if len(tokens) == self.change_after and not changed:
                    changed = True
                    effects.extend(self.change())
            elif isinstance(effect, SendSegment) and effect.segment.attempt == self.session.attempt:
                effects.extend(self.session.handle(self.run(effect), 0.0))
        return tokens

    def run(self, effect: SendSegment) -> Drawn:
        segment = effect.segment
        (drawn,), logits = self.rings[0].run([segment])
        position = segment.start + len(segment.tokens)
        before = self.logits.setdefault(position, logits[0])
        if before is not logits[0]:
            self.replayed += 1
            assert np.array_equal(before, logits[0]), f"position {position} differs after a replay"
        return Drawn(segment.session, segment.epoch, segment.attempt, position, drawn)

    def change(self) -> list[Effect]:
        self.rings.append(self.rings.pop(0))
        for engine in self.rings[0].engines:
            engine.reset()
        self.epoch += 1
        return self.session.handle(PlanChanged(make_plan(self.epoch, 1)), 0.0)


@pytest.mark.parametrize("kind", ENGINES)
def test_rings_that_change_in_the_middle_of_answers_change_no_bit(kind: str) -> None:
    whole, two, three = (chain(*ends, kind=kind) for ends in ((3,), (1, 3), (1, 2, 3)))
    random = np.random.default_rng(5)
    prompt: list[int] = random.integers(0, VOCABULARY, 37).tolist()
    question: list[int] = random.integers(0, VOCABULARY, 9).tolist()
    calm, moved = Run([whole], None), Run([two, three], change_after=13)
    for run in (calm, moved):
        for engine in run.rings[0].engines:
            engine.reset()
    first = calm.turn(prompt, 30)
    assert moved.turn(prompt, 30) == first
    assert moved.replayed > 0
    second = [*prompt, *first, *question]
    assert calm.turn(second, 20) == moved.turn(second, 20)
    assert calm.session.reused == moved.session.reused == len(prompt) + len(first) - 1
    assert moved.session.counters.mismatches == 0
    assert moved.session.counters.replays == 2
    for position, logits in calm.logits.items():
        assert np.array_equal(logits, moved.logits[position]), f"position {position} differs from the calm run"
