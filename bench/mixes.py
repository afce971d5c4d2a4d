"""Many sessions at once against each of them alone: the same tokens, drawn from the same bits.

Real coordinators and stage workers with real engines, in one process (`bench.office`). A mix is 2 to 16 people, from a
seed: what they ask and how it is sampled, from which PC and how that one drafts, when they come, and when they leave
without their answer's end. Some ask once more. In every other mix the KV cache is so small that people wait in line,
are pushed out and replayed. Each mix runs on 1, 2 and 3 stages, paged and stateful, and once more with one person's
question changed.

What must hold: every answer is the one that plain decoding by the whole model gives to the same person alone, what was
told of one broken off is its beginning; all logits behind equal histories are equal (`bench.ledger`); nobody but the
one with the other question notices; and afterwards nothing is held at any stage.

``python -m bench.mixes [--model smollm2|qwen]… [--engine paged|stateful] [--stages N…] [--seeds FIRST:END] [--quick]``.
Exit status 1 where something differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product, takewhile
from random import Random

import anyio

from bench import models
from bench.drafts import Party, engine_of
from bench.exactness import ENGINES, STAGES, add_parts, engines_of, part_of
from bench.guests import Guest, Mix, Told, invite, other_question, receive
from bench.ledger import Ledger, Recorded, Row
from bench.office import MODEL, open_office
from bench.report import report
from bench.simulator import Forgetful
from swarm.coordinator.chunks import MIN_PREFILL_ROWS
from swarm.coordinator.coordinator import CoordinatorStats
from swarm.coordinator.draft_model import DraftModel
from swarm.coordinator.language import LanguageModel, TextCodec
from swarm.coordinator.requests import FinishReason, SpeculationUsage
from swarm.coordinator.token_log import TokenLog, common_prefix, prompt_kinds
from swarm.engine.base import Engine
from swarm.engine.kinds import ExactEngine
from swarm.engine.selftest import segment
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.config import PAGED
from swarm.protocol.messages import RowKind

SEEDS: dict[str, Sequence[int]] = {"smollm2": (0, 2, 4, 6, 8, 10, 1, 9, 11, 13, 17, 21), "qwen": (8, 9, 12, 16, 3, 20)}
"""SmolLM2 runs each on every ring, the 1.5B on one, with fewer people: the rings take turns."""

LONGEST = 640
"""Positions of a session at most."""

POOLS = {"roomy": 16 * LONGEST, "tight": LONGEST + 64}
"""Positions of KV cache at every stage."""

MIX_S = 900.0
"""For one mix; then it hangs."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A mix on a ring."""

    engine: str
    stages: int
    pool: str
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one question."""

    setting: Setting
    told: Told
    left: bool
    """Broken off by the one who asked: what was told must be the beginning."""
    difference: str
    """Empty where it is what the same person is told alone."""
    second_run: bool
    """The mix with another question of somebody else."""


@dataclass(slots=True)
class Course:
    """What happened to one mix beside its answers."""

    faults: list[str]
    stats: list[CoordinatorStats]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, how its shards are made, and what reads and writes its ids."""

    engines: Callable[[str, int, int], Sequence[ExactEngine]]
    """(kind of engine, stages, positions of KV cache) -> a chain."""
    codec: TextCodec
    tokens: int
    """Of an answer at most."""
    draft: Callable[[], Engine] | None = None

    def prompt(self, told: Told) -> list[int]:
        messages = [(message.role, message.content) for message in told.messages]
        return list(self.codec.encode(self.codec.render_chat(messages)))


class Alone:
    """Plain decoding by the whole model: one session, one row at a time, nobody else in the batch."""

    def __init__(self, subject: Subject, kind: str, ledger: Ledger) -> None:
        self._subject = subject
        self._ledger = ledger
        (engine,) = subject.engines(kind, 1, 2 * LONGEST)
        self._engine = Recorded(engine, ledger, "alone")
        self._known: dict[tuple[object, ...], tuple[list[int], list[bytes]]] = {}

    def answer(self, log: TokenLog, guest: Guest) -> tuple[list[int], list[bytes]]:
        """What follows the prompt in `log`, and the histories behind which each token is drawn.

        The rows of the prompt are run as `log` says: of a second question some may have been decoded, as an answer.
        """
        rows = list(zip(log.ids(0, len(log)), log.kinds(0, len(log)), strict=True))
        key = (*rows, guest.sampling, guest.tokens, guest.to_the_limit)
        if key not in self._known:
            self._known[key] = self._decode(log, rows, guest)
        return self._known[key]

    def _decode(self, log: TokenLog, rows: list[Row], guest: Guest) -> tuple[list[int], list[bytes]]:
        stops = frozenset() if guest.to_the_limit else self._subject.codec.stop_tokens
        prompt, answer = len(rows), []
        pieces = [(piece.start, rows[piece.start : piece.end]) for piece in log.pieces(LONGEST, 1)]
        while pieces:
            start, piece = pieces.pop(0)
            tokens, kind = [token for token, _ in piece], piece[0][1]
            wanted = int(start + len(piece) == len(rows))
            (output,) = self._engine.run([replace(segment(0, start, tokens, wanted, kind), sampling=guest.sampling)])
            if wanted and output.drawn[0] not in stops:
                answer.append(output.drawn[0])
                rows.append((output.drawn[0], RowKind.DECODE))
                if len(answer) < guest.tokens:
                    pieces.append((len(rows) - 1, rows[-1:]))
        return answer, self._ledger.histories(rows)[prompt - 1 : -1]


def run(subject: Subject, settings: Iterable[Setting]) -> Iterator[tuple[list[Found], Course]]:
    """Let every mix happen, twice, and hold each answer against the one that is given alone."""
    alone: dict[str, tuple[Ledger, Alone]] = {}
    draft = subject.draft() if subject.draft else None
    for (kind, stages, pool), group in _by_ring(settings).items():
        if kind not in alone:
            ledger = Ledger(kinds=kind == PAGED)
            alone[kind] = ledger, Alone(subject, kind, ledger)
        engines = subject.engines(kind, stages, POOLS[pool])
        for setting in group:
            yield _happen(subject, setting, engines, *alone[kind], draft)


def _by_ring(settings: Iterable[Setting]) -> dict[tuple[str, int, str], list[Setting]]:
    rings: dict[tuple[str, int, str], list[Setting]] = {}
    for setting in settings:
        rings.setdefault((setting.engine, setting.stages, setting.pool), []).append(setting)
    return rings


def _happen(
    subject: Subject,
    setting: Setting,
    engines: Sequence[ExactEngine],
    ledger: Ledger,
    alone: Alone,
    draft: Engine | None,
) -> tuple[list[Found], Course]:
    mix = invite(setting.seed, subject.tokens)
    changed, other = other_question(mix)
    recorded = Recorded(engines[-1], ledger, str(setting))
    chain = [*engines[:-1], recorded]
    found: list[Found] = []
    course = Course([], [])
    answers: list[dict[tuple[int, int], Told]] = []
    for second_run, one in ((False, mix), (True, other)):
        recorded.drawn_from.clear()
        told = anyio.run(_live, subject, one, chain, POOLS[setting.pool], draft, course)
        answers.append({(each.guest.number, len(each.messages)): each for each in told})
        for each in told:
            difference = _difference(subject, alone, recorded, answers[-1], each)
            found.append(Found(setting, each, _left(each), difference, second_run))
    before, after = answers
    for key in sorted(before.keys() & after.keys()):
        same = min(len(before[key].tokens), len(after[key].tokens))
        if key[0] != changed and before[key].tokens[:same] != after[key].tokens[:same]:
            course.faults.append(f"guest {key[0]} was told something else when guest {changed} asked something else")
    course.faults += ledger.conflicts
    ledger.conflicts.clear()
    return found, course


async def _live(
    subject: Subject, mix: Mix, engines: Sequence[ExactEngine], kv_tokens: int, draft: Engine | None, course: Course
) -> list[Told]:
    """One mix from the first who comes to the last block that is put away."""
    for engine in (*engines, *([draft] if draft else [])):
        engine.reset()
    free = [engine.free_tokens for engine in engines]
    model = LanguageModel(MODEL, subject.codec, LONGEST)
    drafter = DraftModel(draft) if draft else None
    announced = kv_tokens if mix.announced else 0
    async with open_office(engines, mix.homes, announced, model, Random(mix.seed), drafter) as office:
        with anyio.fail_after(MIX_S):
            told = await receive(office, mix)
        course.stats += [one.stats() for one in office.coordinators.values()]
        try:
            await office.rest()
            office.validate_state()
            await office.close(free)
            office.validate_state()
        except TimeoutError:
            held = {node[:8]: len(worker.sessions) for node, worker in office.workers.items()}
            now = [engine.free_tokens for engine in engines]
            course.faults.append(f"left behind: sessions {held}, free {now} instead of {free}")
    return told


def _left(told: Told) -> bool:
    return told.finish is None or (told.guest.stops_at != "" and told.finish is FinishReason.STOP)


def _difference(
    subject: Subject, alone: Alone, recorded: Recorded, answers: dict[tuple[int, int], Told], told: Told
) -> str:
    """What was told otherwise than alone; empty where nothing was."""
    if told.error:
        return told.error
    expected, histories = alone.answer(_log(subject, answers, told), told.guest)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(told.tokens, expected, strict=False)))
    if same < len(told.tokens) or (same < len(expected) and not _left(told)):
        return f"{len(told.tokens)} tokens against {len(expected)} alone, the first {same} equal"
    if not recorded.drawn_from.issuperset(histories[:same]):
        return "drawn behind rows that were run in another way"
    return ""


def _log(subject: Subject, answers: dict[tuple[int, int], Told], told: Told) -> TokenLog:
    """How the prompt's rows are run alone: prefilled, but for an answer of ours that it repeats. That was decoded."""
    prompt, kinds = subject.prompt(told), b""
    first = answers[told.guest.number, len(told.guest.question)]
    if told is not first:
        before = subject.prompt(first)
        # The last token of an answer that was full was never run.
        known = [*before, *first.tokens][: len(before) + len(first.tokens) - (first.finish is FinishReason.LENGTH)]
        same = common_prefix(known, prompt, min(len(known), len(prompt) - MIN_PREFILL_ROWS))
        kinds = (prompt_kinds(len(before)) + bytes((RowKind.DECODE,)) * len(first.tokens))[:same]
    log = TokenLog()
    log.append_prompt(prompt, kinds)
    return log


# --- the command ------------------------------------------------------------------------------------------------------


def settings_of(seeds: Iterable[int], *, every: bool) -> list[Setting]:
    """`every` mix on every ring; otherwise the rings take turns."""
    rings = list(product(ENGINES, STAGES))
    return [
        Setting(engine, count, "tight" if seed % 2 else "roomy", seed)
        for number, seed in enumerate(seeds)
        for engine, count in (rings if every else [rings[number % len(rings)]])
    ]


def subject_of(model: str, tokens: int) -> Subject:
    """SmolLM2 with itself as a draft that is often wrong, or the 1.5B with its 0.5B draft."""
    ir = models.smollm2() if model == "smollm2" else models.qwen_int4()

    def draft() -> Engine:
        if model == "qwen":
            return engine_of(Party(models.draft_int4(), short=True), 32 * LONGEST)
        (engine,) = engines_of(ir)(PAGED, 1, 32 * LONGEST)
        return Forgetful(engine, 0.67)

    return Subject(engines_of(ir), Tokenizer.load(ir), tokens, draft)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mixes", description=__doc__)
    add_parts(parser)
    parser.add_argument("--seeds", type=_seeds, help="FIRST:END; default: as many as the model has")
    parser.add_argument("--quick", action="store_true", help="SmolLM2, two seeds, short answers, nothing kept")
    arguments = parser.parse_args()
    chosen = ["smollm2"] if arguments.quick else arguments.model or list(SEEDS)
    figures: dict[str, float] = {}
    for model in chosen:
        seeds = range(2) if arguments.quick else arguments.seeds or SEEDS[model]
        settings = settings_of(seeds, every=model == "smollm2")
        settings = [one for one in settings if one.engine in arguments.engine and one.stages in arguments.stages]
        found, courses = [], []
        for number, (answers, course) in enumerate(run(subject_of(model, 12 if arguments.quick else 32), settings), 1):
            found += answers
            courses.append(course)
            _tell(number, len(settings), answers, course)
        show(model, found)
        figures |= {f"{model}_{name}": value for name, value in count(found, courses).items()}
    seeds_text = f"{arguments.seeds.start}-{arguments.seeds.stop}" if arguments.seeds else "all"
    part = part_of(arguments) + (f"_seeds{seeds_text}" if arguments.seeds else "")
    parts = {"engines": arguments.engine, "stages": arguments.stages, "seeds": seeds_text}
    report(f"mixes{part}", figures, {"models": chosen, **parts}, keep=not arguments.quick)
    sys.exit(any(value for name, value in figures.items() if name.endswith(("_different", "_faults", "_mismatches"))))


def _seeds(text: str) -> range:
    first, end = text.split(":")
    return range(int(first), int(end))


def _tell(number: int, mixes: int, answers: Sequence[Found], course: Course) -> None:
    different = [one for one in answers if one.difference]
    print(
        f"{number} of {mixes}: {answers[0].setting}: {len(answers)} answers, {len(different)} different, "
        f"{len(course.faults)} faults, {sum(one.replays for one in course.stats)} replays",
        file=sys.stderr,
        flush=True,
    )
    for one in different:
        which = f"run {1 + one.second_run}, guest {one.told.guest.number}, {len(one.told.messages)} messages"
        print(f"  {which}: {one.difference}", file=sys.stderr)
    for fault in course.faults[:20]:
        print(f"  {fault}", file=sys.stderr, flush=True)


def count(found: Sequence[Found], courses: Sequence[Course]) -> dict[str, float]:
    ended = [(one.told, one.told.usage) for one in found if one.told.usage is not None]
    use = sum((usage.speculation for _, usage in ended), SpeculationUsage())
    second = [usage.reused_tokens > 0 for told, usage in ended if _is_second(told)]
    stats = [one for course in courses for one in course.stats]
    return {
        "mixes": 2 * len(courses),
        "answers": len(found),
        "whole": sum(not one.left for one in found),
        "different": sum(bool(one.difference) for one in found),
        "tokens": sum(len(one.told.tokens) for one in found),
        "faults": sum(len(course.faults) for course in courses),
        "shared": sum(usage.reused_tokens > 0 for told, usage in ended if not _is_second(told)),
        "continued": sum(second),
        "begun_anew": len(second) - sum(second),
        "waited": sum(one.told.waited for one in found),
        "replays": sum(one.replays for one in stats),
        "mismatches": sum(one.mismatches for one in stats),
        "drafted": use.drafted,
        "rejected": use.rejected,
    }


def _is_second(told: Told) -> bool:
    return len(told.messages) > len(told.guest.question)


def show(model: str, found: Sequence[Found]) -> None:
    """Answers and identical ones, by each value of each setting."""
    print(f"{model:28}{'answers':>9}{'whole':>9}{'broken off':>12}{'identical':>11}{'tokens':>9}")
    print(_row("all", found))
    for field in fields(Setting)[:-1]:
        for value in sorted({getattr(one.setting, field.name) for one in found}):
            print(_row(f"{field.name} {value}", [one for one in found if getattr(one.setting, field.name) == value]))
    for name, sampled in (("greedy", False), ("sampled", True)):
        print(_row(name, [one for one in found if one.told.guest.sampling.greedy is not sampled]))
    print(_row("second questions", [one for one in found if _is_second(one.told)]))
    print(_row("beside another question", [one for one in found if one.second_run]), flush=True)


def _row(name: str, found: Sequence[Found]) -> str:
    left, identical = sum(one.left for one in found), sum(not one.difference for one in found)
    tokens = sum(len(one.told.tokens) for one in found)
    return f"{name:28}{len(found):9}{len(found) - left:9}{left:12}{identical:11}{tokens:9}"


if __name__ == "__main__":
    main()
