"""Speculation on the paged engine: the tokens of plain decoding, and its logits to the last bit, for any window."""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from swarm.coordinator.events import AskDraft, Begin, Drafted, Effect, Emit, Finish, SendSegment
from swarm.coordinator.pace import Speculation
from swarm.coordinator.requests import SpeculationUsage
from swarm.coordinator.session import Counters, Session, SessionLimits
from swarm.engine.paged import PagedEngine
from swarm.engine.selftest import Chain
from swarm.model.cut import cut
from swarm.model.shard import Shard
from swarm.model.tiny import VOCABULARY, tiny_model
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Drawn, Segment
from swarm.protocol.sampling import GREEDY, SamplingParams
from swarm.protocol.tensors import Array
from tests.coordinator.fake_stages import MODEL, NODE, PLAIN, make_plan
from tests.engine.chains import Published, even_cuts, published
from tests.prompts import PROMPTS

SAMPLED = SamplingParams(temperature=0.8, seed=11)
PENALIZED = SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.3)


class Answer:
    """One answer of one session over `chain`; a stage runs what was sent, stale or not, as late as it may.

    `draft` is asked where a draft model would be: what plain decoding said, with an error at every third position.
    """

    def __init__(
        self,
        chain: Chain,
        stages: int,
        prompt: tuple[int, ...],
        count: int,
        sampling: SamplingParams,
        speculation: Speculation,
        draft: list[int] | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.logits: dict[int, Array] = {}
        """By position of the token drawn from them, where the session used it."""
        self._chain = chain
        self._prompt = prompt
        self._draft = draft
        self._sent: deque[Segment] = deque()
        self._over = False
        self._session = Session(
            SessionId("aaaaaaaa-1-00000000"), NODE, make_plan(1, stages), SessionLimits(), Counters(), speculation
        )
        begin = Begin(prompt, MODEL, 1000, sampling, max_tokens=count, draft_model=draft is not None)
        self._carry_out(self._session.handle(begin, 0.0))
        while not self._over:
            self._run(self._sent.popleft())
            self._session.validate_state()
        for engine in chain.engines:
            engine.reset()

    @property
    def usage(self) -> SpeculationUsage:
        return self._session.speculation

    def _run(self, segment: Segment) -> None:
        (tokens,), logits = self._chain.run([segment])
        position = segment.start + len(segment.tokens) - segment.wanted + 1
        before = self._session.log.certain
        current = segment.attempt == self._session.attempt
        self._carry_out(
            self._session.handle(Drawn(segment.session, segment.epoch, segment.attempt, position, tokens), 0.0)
        )
        for offset in range(len(tokens)):
            if current and before <= position + offset < len(self._prompt) + len(self.tokens):
                self.logits[position + offset] = logits[offset]

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self.tokens += effect.tokens
        for effect in effects:
            if isinstance(effect, SendSegment):
                self._sent.append(effect.segment)
            elif isinstance(effect, AskDraft):
                self._carry_out(self._session.handle(self._drafted(effect), 0.0))
            elif isinstance(effect, Finish):
                self._over = True

    def _drafted(self, ask: AskDraft) -> Drafted:
        assert self._draft is not None
        places = range(ask.start - len(self._prompt), ask.start - len(self._prompt) + ask.count)
        tokens = tuple(self._draft[place] ^ (place % 3 == 2) for place in places if place < len(self._draft))
        return Drafted(ask.attempt, ask.start, tokens, 0.01)


def assert_plain(found: Answer, plain: Answer) -> None:
    assert found.tokens == plain.tokens
    for position, logits in found.logits.items():
        assert np.array_equal(logits, plain.logits[position]), f"logits of position {position}"
    assert found.logits.keys() == plain.logits.keys()


# --- a small random model, drafts that are right two times of three ---------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> dict[int, Chain]:
    def engine(start: int, end: int) -> PagedEngine:
        return PagedEngine(Shard(cut(tiny_model(3), start, end)), "CPU", 1024, VOCABULARY, 1)

    return {1: Chain([engine(0, 3)]), 2: Chain([engine(0, 1), engine(1, 3)])}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_small_model_with_a_draft(tiny: dict[int, Chain], stages: int, sampling: SamplingParams) -> None:
    prompt = tuple(np.random.default_rng(3).integers(0, VOCABULARY, 37).tolist())
    plain = Answer(tiny[1], 1, prompt, 60, sampling, PLAIN)
    assert plain.usage.windows == 0
    for k in (1, 3, 10):
        for depth in (1, 2, 4):
            way = Speculation(fixed_k=k, fixed_depth=depth)
            found = Answer(tiny[stages], stages, prompt, 60, sampling, way, plain.tokens)
            assert_plain(found, plain)
            assert found.usage.model_accepted > 0
            assert found.usage.rejected > 0
    assert_plain(Answer(tiny[stages], stages, prompt, 60, sampling, Speculation(), plain.tokens), plain)


# --- SmolLM2, n-gram --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_ir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(smollm2_ir, tmp_path_factory.mktemp("smollm2"))


def check_smollm2(model: Published, names: list[str], count: int, ks: tuple[int, ...], depths: tuple[int, ...]) -> None:
    tokenizer = Tokenizer.load(model.ir)
    accepted = 0
    whole = model.whole(2048)

    @cache
    def plain(name: str, sampling: SamplingParams) -> Answer:
        return Answer(whole, 1, tuple(tokenizer.encode(PROMPTS[name])), count, sampling, PLAIN)

    for stages in (1, 2):
        chain = model.chain(even_cuts(model.layers, stages), 2048)
        for name in names:
            for sampling in (GREEDY, SAMPLED):
                expected = plain(name, sampling)
                for k in ks:
                    for depth in depths:
                        way = Speculation(fixed_k=k, fixed_depth=depth)
                        prompt = tuple(tokenizer.encode(PROMPTS[name]))
                        found = Answer(chain, stages, prompt, count, sampling, way)
                        assert_plain(found, expected)
                        accepted += found.usage.ngram_accepted
    assert accepted > 0


@pytest.mark.model
def test_smollm2_with_ngram(smollm2: Published) -> None:
    check_smollm2(smollm2, ["code"], 32, (1, 7), (2,))


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_with_ngram_in_full(smollm2: Published) -> None:
    check_smollm2(smollm2, list(PROMPTS), 64, (1, 3, 7), (1, 2))
