"""The exactness matrix: speculation in every setting against plain decoding by the whole model, token for token.

Real sessions, queues, engines and drafts on the virtual clock of `bench.simulator`, many sessions at once, so that
windows of all sizes share forwards and are rejected in all ways: the same course of events every time.

- SmolLM2 with n-gram drafts: all combinations of K, depth, temperature, stages, engine and prompt, 64 tokens.
- The 1.5B target with the 0.5B draft: a selection in which every pair of settings occurs, 256 tokens.

``python -m bench.exactness [--model smollm2|qwen]… [--engine paged|stateful] [--stages N…] [--quick]``: all of it, or a
part, whose result is kept beside those of other parts. Exit status 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from bench import models
from bench.clock import RowCosts, World
from bench.report import report
from bench.simulator import Draft, Links, Ring, User
from swarm.coordinator.pace import Speculation
from swarm.coordinator.requests import SpeculationUsage
from swarm.engine.kinds import ExactEngine, make_engine
from swarm.engine.sampling import gumbel
from swarm.engine.selftest import segment
from swarm.model.cut import cut
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.config import PAGED, STATEFUL
from swarm.protocol.sampling import GREEDY, SamplingParams
from tests.prompts import PROMPTS

K = (1, 2, 3, 5, 7, 10)
DEPTHS = (1, 2, 4)
TEMPERATURES = (0.0, 0.8)
STAGES = (1, 2, 3)
ENGINES = (PAGED, STATEFUL)
MODELS = ("smollm2", "qwen")

AT_ONCE = 48
"""Sessions that run at the same time: each forward then holds windows of many sizes."""

SEED = 20260817
COSTS = RowCosts(((1, 10.0), (2, 10.0), (32, 40.0)))
DRAFT_COSTS = RowCosts(((1, 3.0), (32, 9.0)))
LINKS = Links(delay_s=0.02)
"""Long enough that windows of four depths are under way at once."""

ROOM = 1024
"""Positions for a session's rejected rows: the stateful engine keeps them masked for a while."""

NEAR = 0.05
"""Two logits that close may change places by rounding."""


@dataclass(frozen=True, slots=True)
class Case:
    """One answer in one setting."""

    k: int
    depth: int
    temperature: float
    stages: int
    engine: str
    prompt: str

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=SEED) if self.temperature else GREEDY


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a case."""

    case: Case
    use: SpeculationUsage
    difference: str
    """Empty where the answer is identical."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, how its shards are made, and what it is asked."""

    engines: Callable[[str, int, int], Sequence[ExactEngine]]
    """(kind of engine, stages, positions of KV cache) -> a chain."""
    prompts: Mapping[str, Sequence[int]]
    tokens: int
    draft: Draft | None = None


def every_case(prompts: Iterable[str] = PROMPTS) -> list[Case]:
    return [Case(*settings) for settings in itertools.product(K, DEPTHS, TEMPERATURES, STAGES, ENGINES, prompts)]


def pairwise_cases(prompts: Iterable[str] = PROMPTS) -> list[Case]:
    """Few cases in which each value of a setting meets each value of every other."""
    return [Case(*settings) for settings in pairwise((K, DEPTHS, TEMPERATURES, STAGES, ENGINES, tuple(prompts)))]


def pairwise(factors: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Combinations that together hold every pair of values of two factors; each next one brings the most new pairs."""
    every = [(combination, set(itertools.combinations(enumerate(combination), 2))) for combination in product(*factors)]
    missing = set().union(*(pairs for _, pairs in every))
    while missing:
        best, pairs = max(every, key=lambda one: len(missing & one[1]))
        missing -= pairs
        yield best


def run(subject: Subject, cases: Iterable[Case]) -> Iterator[Found]:
    """Answer every case beside many others, and hold it against plain decoding."""
    alone: dict[str, Plain] = {}
    for (kind, stages), group in _by_ring(cases).items():
        if kind not in alone:
            alone[kind] = Plain(subject, kind)
        longest = max(len(prompt) for prompt in subject.prompts.values()) + subject.tokens
        engines = subject.engines(kind, stages, AT_ONCE * (longest + ROOM))
        for first in range(0, len(group), AT_ONCE):
            chosen = group[first : first + AT_ONCE]
            for engine in engines:
                engine.reset()
            ring = Ring(World(), engines, [COSTS] * stages, LINKS, subject.draft)
            users = [_user(subject, number, case) for number, case in enumerate(chosen)]
            for case, conversation in zip(chosen, ring.ask(users), strict=True):
                yield Found(
                    case, conversation.session.speculation, alone[kind].difference(case, conversation.answer.tokens)
                )


def _by_ring(cases: Iterable[Case]) -> dict[tuple[str, int], list[Case]]:
    rings: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        rings.setdefault((case.engine, case.stages), []).append(case)
    return rings


def _user(subject: Subject, number: int, case: Case) -> User:
    return User(
        tuple(subject.prompts[case.prompt]),
        subject.tokens,
        case.sampling,
        home=number % case.stages,
        arrives_s=number * 0.013,
        speculation=Speculation(fixed_k=case.k, fixed_depth=case.depth),
    )


class Plain:
    """Plain decoding by the whole model: one session, one row at a time, nobody else in the batch."""

    def __init__(self, subject: Subject, kind: str) -> None:
        self._subject = subject
        (self._engine,) = subject.engines(kind, 1, 4096)
        self._answers: dict[tuple[str, float], list[int]] = {}

    def difference(self, case: Case, answer: Sequence[int]) -> str:
        """Where and why `answer` is not what plain decoding gives; empty where it is."""
        key = case.prompt, case.temperature
        if key not in self._answers:
            self._answers[key] = self._decode(case, self._subject.tokens)
        expected = self._answers[key]
        if list(answer) == expected:
            return ""
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer, expected, strict=False)))
        if same == min(len(answer), len(expected)):
            return f"{len(answer)} tokens instead of {len(expected)}"
        self._decode(case, same + 1)
        position = len(self._subject.prompts[case.prompt]) + same
        ids = np.array([expected[same], answer[same]])
        scores = self._engine.logits()[0][ids].astype(np.float64)
        if case.temperature:
            scores = scores / case.temperature + gumbel(SEED, position, ids)
        behind = float(scores[0] - scores[1])
        cause = "rounding decides" if behind < NEAR else "not rounding: it saw other tokens or another cache"
        return f"token {same} is {answer[same]} instead of {expected[same]}, which is {behind:.4f} ahead: {cause}"

    def _decode(self, case: Case, count: int) -> list[int]:
        prompt = self._subject.prompts[case.prompt]
        rows, start, tokens = list(prompt), 0, []
        for _ in range(count):
            (output,) = self._engine.run([replace(segment(0, start, rows), sampling=case.sampling)])
            start += len(rows)
            rows = list(output.drawn)
            tokens += rows
        return tokens


# --- the models -------------------------------------------------------------------------------------------------------


def smollm2(tokens: int) -> Subject:
    """With n-gram drafts."""
    return Subject(engines_of(models.smollm2()), _prompts(models.smollm2()), tokens)


def qwen(tokens: int) -> Subject:
    """The 1.5B target with its 0.5B draft."""
    (draft,) = engines_of(models.draft_int4())(PAGED, 1, AT_ONCE * 640)
    ir = models.qwen_int4()
    return Subject(engines_of(ir), _prompts(ir), tokens, Draft(lambda: draft, DRAFT_COSTS))


def engines_of(ir: Path) -> Callable[[str, int, int], Sequence[ExactEngine]]:
    def engines(kind: str, stages: int, kv_tokens: int) -> Sequence[ExactEngine]:
        found = []
        for index in range(stages):
            model = ov.Core().read_model(ir / "openvino_model.xml")
            layers = map_layers(Graph.of(model)).layers
            vocabulary = model.output(0).get_partial_shape()[2].get_length()
            shard = Shard(cut(model, layers * index // stages, layers * (index + 1) // stages))
            found.append(make_engine(kind, shard, "CPU", kv_tokens, vocabulary, threads=1))
        return found

    return engines


def _prompts(ir: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.load(ir)
    return {name: tokenizer.encode(text) for name, text in PROMPTS.items()}


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__)
    add_parts(parser)
    parser.add_argument("--quick", action="store_true", help="SmolLM2, every pair of settings, 16 tokens, nothing kept")
    arguments = parser.parse_args()
    chosen = ["smollm2"] if arguments.quick else arguments.model or MODELS
    figures: dict[str, float] = {}
    for model in chosen:
        if model == "qwen":
            subject, cases = qwen(256), pairwise_cases()
        else:
            subject = smollm2(16 if arguments.quick else 64)
            cases = pairwise_cases() if arguments.quick else every_case()
        cases = [one for one in cases if one.engine in arguments.engine and one.stages in arguments.stages]
        found = list(_shown(run(subject, cases), len(cases)))
        show(model, found)
        use = sum((one.use for one in found), SpeculationUsage())
        figures[f"{model}_runs"] = len(found)
        figures[f"{model}_identical"] = sum(not one.difference for one in found)
        figures[f"{model}_drafted"] = use.drafted
        figures[f"{model}_rejected"] = use.rejected
    settings = {"models": chosen, "engines": arguments.engine, "stages": arguments.stages}
    report(f"exactness{part_of(arguments)}", figures, settings, keep=not arguments.quick)
    sys.exit(any(figures[f"{model}_identical"] < figures[f"{model}_runs"] for model in chosen))


def add_parts(parser: argparse.ArgumentParser) -> None:
    """Options that choose a part of the settings; for `part_of`."""
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=ENGINES, help="default: all")
    parser.add_argument("--stages", type=int, choices=STAGES, nargs="+", default=STAGES, help="default: all")


def part_of(arguments: argparse.Namespace) -> str:
    """What names the chosen part in a file's name; empty for the whole."""
    named = arguments.model if arguments.model and len(arguments.model) == 1 else []
    chosen = [] if len(arguments.engine) == len(ENGINES) else arguments.engine
    counts = [] if len(arguments.stages) == len(STAGES) else arguments.stages
    return "".join(f"_{one}" for one in (*named, *chosen, *counts))


def _shown(found: Iterable[Found], count: int) -> Iterator[Found]:
    for number, one in enumerate(found, 1):
        if one.difference or number % AT_ONCE == 0:
            print(f"{number} of {count}: {one.case} {one.difference or 'identical'}", file=sys.stderr, flush=True)
        yield one


def show(model: str, found: Sequence[Found]) -> None:
    """Runs and identical answers, by each value of each setting; then the first difference."""
    print(f"{model:24}{'runs':>8}{'identical':>12}{'drafted':>12}{'accepted':>12}")
    print(_row("all", found))
    for field in fields(Case):
        for value in sorted({getattr(one.case, field.name) for one in found}):
            print(_row(f"{field.name} {value}", [one for one in found if getattr(one.case, field.name) == value]))
    first = next((one for one in found if one.difference), None)
    print(
        f"first difference: {first.case}: {first.difference}" if first else "every answer is the plain one", flush=True
    )


def _row(name: str, found: Sequence[Found]) -> str:
    identical = sum(not one.difference for one in found)
    drafted, accepted = sum(one.use.drafted for one in found), sum(one.use.accepted for one in found)
    return f"{name:24}{len(found):8}{identical:12}{drafted:12}{accepted:12}"


if __name__ == "__main__":
    main()
