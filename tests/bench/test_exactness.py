"""The exactness matrix in small: a tiny model in every setting, and that a fault would be seen."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.exactness import DRAFT_COSTS, Case, Subject, add_parts, every_case, pairwise, pairwise_cases, part_of, run
from bench.simulator import Draft, Forgetful
from swarm.coordinator.requests import SpeculationUsage
from swarm.engine.base import Output
from swarm.engine.kinds import ExactEngine, make_engine
from swarm.engine.paged import PagedEngine
from swarm.model.cut import cut
from swarm.model.shard import Shard
from swarm.model.tiny import VOCABULARY, tiny_model
from swarm.protocol.config import PAGED
from swarm.protocol.messages import Segment

LAYERS, TOKENS = 3, 24
_random = np.random.default_rng(3)
PROMPTS: dict[str, list[int]] = {name: _random.integers(0, VOCABULARY, 9).tolist() for name in ("one", "other")}


def engines(kind: str, stages: int, kv_tokens: int) -> Sequence[ExactEngine]:
    ends = [LAYERS * index // stages for index in range(stages + 1)]
    shards = [Shard(cut(tiny_model(LAYERS), start, end)) for start, end in itertools.pairwise(ends)]
    return [make_engine(kind, shard, "CPU", kv_tokens, VOCABULARY, 1) for shard in shards]


def draft() -> Draft:
    """The target itself, which is wrong a third of the time."""
    return Draft(lambda: Forgetful(engines(PAGED, 1, 8192)[0], 0.67), DRAFT_COSTS)


def test_every_pair_of_settings_gives_the_plain_answer() -> None:
    subject = Subject(engines, PROMPTS, TOKENS, draft())
    found = list(run(subject, pairwise_cases(PROMPTS)))
    assert [one for one in found if one.difference] == []
    use = sum((one.use for one in found), SpeculationUsage())
    assert use.accepted > 100
    assert use.rejected > 50


def test_a_wrong_token_is_found_and_explained() -> None:
    class Faulty(PagedEngine):
        def run(self, batch: Sequence[Segment]) -> list[Output]:
            outputs = super().run(batch)
            at_fault = [len(segment.tokens) > 1 and segment.start > 9 for segment in batch]
            return [
                replace(output, drawn=(*output.drawn[:-1], output.drawn[-1] ^ 1)) if wrong else output
                for output, wrong in zip(outputs, at_fault, strict=True)
            ]

    def faulty(kind: str, stages: int, kv_tokens: int) -> Sequence[ExactEngine]:
        if kv_tokens == 4096:  # plain decoding
            return engines(kind, stages, kv_tokens)
        return [Faulty(Shard(tiny_model(LAYERS)), "CPU", kv_tokens, VOCABULARY, 1)]

    case = Case(k=3, depth=1, temperature=0.0, stages=1, engine=PAGED, prompt="one")
    (found,) = run(Subject(faulty, PROMPTS, TOKENS, draft()), [case])
    assert "not rounding" in found.difference


def test_a_part_has_a_name_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    add_parts(parser)
    assert part_of(parser.parse_args([])) == ""
    assert part_of(parser.parse_args(["--engine", "paged", "--stages", "1", "3"])) == "_paged_1_3"
    assert part_of(parser.parse_args(["--stages", "2"])) == "_2"
    assert part_of(parser.parse_args(["--model", "qwen", "--engine", "stateful"])) == "_qwen_stateful"


def test_the_cover_holds_every_pair() -> None:
    factors = [(1, 2, 3), ("a", "b"), (True, False), (7, 8, 9, 10)]
    chosen = list(pairwise(factors))
    pairs = {pair for one in chosen for pair in itertools.combinations(enumerate(one), 2)}
    wanted = {((i, a), (j, b)) for i, j in itertools.combinations(range(4), 2) for a in factors[i] for b in factors[j]}
    assert wanted <= pairs
    assert len(chosen) < len(list(itertools.product(*factors))) / 2
    assert len(pairwise_cases()) < len(every_case()) / 10
