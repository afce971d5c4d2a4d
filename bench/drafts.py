"""Draft models for the 1.5B target: how often they are right, and what a token of theirs costs.

``python -m bench.drafts [--quick]``

The target answers the eight prompts plainly, greedy and at temperature 0.8; every draft then draws, with the same
noise, the token that follows each position of these answers, from a shortlist and from the whole vocabulary. *Right* is
the share where both drew the same. Times are CPU time of one thread, in which other programs do not count; target and
drafts take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import openvino as ov

from bench import models
from bench.report import cores, on_core, ratios, report, spread
from swarm.engine.paged import PagedEngine
from swarm.engine.pages import use_huge_pages
from swarm.engine.selftest import segment
from swarm.model.cut import cut
from swarm.model.layers import Graph, map_layers
from swarm.model.shard import Shard
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.messages import RowKind
from swarm.protocol.sampling import GREEDY, SamplingParams
from tests.prompts import PROMPTS

TOKENS = 96
SAMPLINGS = {"greedy": GREEDY, "sampled": SamplingParams(temperature=0.8, seed=3)}
ROWS = (1, 2, 4)
"""New rows of a step: after everything was accepted, one or two."""

_KV_TOKENS = 2048

Answer = tuple[str, list[int], list[int]]
"""Name of the sampling, prompt, answer."""


@dataclass(frozen=True, slots=True)
class Party:
    """A model, and whether it draws from a shortlist."""

    ir: Path
    short: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.drafts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two prompts of 16 tokens, few rounds, nothing kept")
    quick = parser.parse_args().quick
    target = models.qwen_int4()
    drafts = {
        f"{kind}{head}": Party(ir, short=not head)
        for kind, ir in (("int8", models.draft()), ("int4", models.draft_int4()))
        for head in ("", "_whole")
    }
    tokens, prompts = (16, 2) if quick else (TOKENS, len(PROMPTS))
    answers = on_core(cores()[-1], answers_of, target, tokens, prompts)
    figures: dict[str, float] = {}
    for name, party in drafts.items():
        shares = on_core(cores()[-1], right, party, answers)
        figures |= {f"{name}_right_{kind}": share for kind, share in shares.items()}
        print(f"{name}: {shares}", flush=True)
    figures |= on_core(cores()[-1], speeds, {"target": Party(target), **drafts}, 4 if quick else 24)
    settings = {"tokens": tokens, "prompts": prompts, "rows": ROWS}
    settings["times"] = "milliseconds of CPU time of a step at 96 tokens of context, median; one thread"
    report("drafts", figures, settings, keep=not quick)


def answers_of(ir: Path, tokens: int, prompts: int) -> list[Answer]:
    """Plain decoding."""
    engine, tokenizer = engine_of(Party(ir)), Tokenizer.load(ir)
    found: list[Answer] = []
    for text in list(PROMPTS.values())[:prompts]:
        prompt = list(tokenizer.encode(tokenizer.render_chat([("user", text)])))
        for kind, sampling in SAMPLINGS.items():
            answer: list[int] = []
            rows, start = prompt, 0
            for _ in range(tokens):
                row_kind = RowKind.DECODE if answer else RowKind.PREFILL
                (output,) = engine.run([replace(segment(0, start, rows, 1, row_kind), sampling=sampling)])
                start, rows = start + len(rows), list(output.drawn)
                answer += rows
            found.append((kind, prompt, answer))
            print(f"{kind}: {text[:40]!r} answered", flush=True)
    return found


def right(party: Party, answers: Sequence[Answer]) -> dict[str, float]:
    """Share of the answers' tokens that the draft drew too."""
    engine = engine_of(party)
    judged: dict[str, list[bool]] = {kind: [] for kind in SAMPLINGS}
    for kind, prompt, answer in answers:
        drawn: list[int] = []
        rows, start = prompt, 0
        for token in answer:  # one by one: what is in a text already is drawn from, and nothing that is yet to come
            row_kind = RowKind.DECODE if drawn else RowKind.PREFILL
            (output,) = engine.run([replace(segment(0, start, rows, 1, row_kind), sampling=SAMPLINGS[kind])])
            start, rows = start + len(rows), [token]
            drawn += output.drawn
        judged[kind] += [one == other for one, other in zip(drawn, answer, strict=True)]
    return {kind: statistics.fmean(found) for kind, found in judged.items()}


def speeds(parties: Mapping[str, Party], rounds: int) -> dict[str, float]:
    """Milliseconds of a step of so many rows, in turns."""
    engines = {name: engine_of(party) for name, party in parties.items()}
    for engine in engines.values():
        engine.run([segment(0, 0, list(range(100, 196)), 1)])
    use_huge_pages()  # as a node does
    steps: dict[str, Callable[[], object]] = {
        f"{name}_{rows}": lambda engine=engine, rows=rows: engine.run(  # type: ignore[misc]  # of the defaults
            [segment(0, 96, [100] * rows, 1, RowKind.DECODE)]
        )
        for name, engine in engines.items()
        for rows in ROWS
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()  # the weights of the others are in the caches
            began = time.process_time()
            step()
            times[name].append((time.process_time() - began) * 1000)
    for name, found in times.items():
        print(f"{name}: {spread(found)} ms, {spread(ratios(found, times['target_1']))} of a plain token", flush=True)
    return {f"{name}_ms": statistics.median(found) for name, found in times.items()}


def engine_of(party: Party, kv_tokens: int = _KV_TOKENS) -> PagedEngine:
    """The whole model on one thread."""
    model = ov.Core().read_model(party.ir / "openvino_model.xml")
    layers = map_layers(Graph.of(model)).layers
    vocabulary = model.output(0).get_partial_shape()[2].get_length()
    shortlist = models.shortlist(party.ir) if party.short else None
    shard, margins = Shard(cut(model, 0, layers)), party.short
    return PagedEngine(shard, "CPU", kv_tokens, vocabulary, 1, shortlist=shortlist, margins=margins)


if __name__ == "__main__":
    main()
