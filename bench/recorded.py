"""Recorded answers: what the 1.5B target says to prompts, and what its draft would say at each position.

With them the simulator runs on real texts without a model: drafts are right where they were, n-gram finds what it
found, and the same course of events comes out every time (`bench.simulated`).

``python -m bench.recorded`` records them anew, into ``bench/texts/answers.json``, and tells how often drafts are right
by how sure the model is of them; ``--kept`` tells it of those that are there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from bench import models
from bench.drafts import Party, engine_of
from bench.engines import Over
from bench.report import cores, on_core
from swarm.coordinator.times import LEVELS, MARGINS, confidence
from swarm.engine.base import Engine, Output
from swarm.engine.selftest import segment
from swarm.model.tokenizer import Tokenizer
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind, Segment
from tests.prompts import PROMPTS, REPEATING

TOKENS = 192
PATH = Path(__file__).parent / "texts" / "answers.json"


@dataclass(frozen=True, slots=True)
class Text:
    """One answer, greedy, that does not stop early."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    drafted: tuple[int, ...]
    """What the draft draws at each position of the answer, all before it being the target's."""
    margins: tuple[float, ...]
    """How far ahead of the next (`engine.sampling.draw_with_margin`)."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recorded", description=__doc__)
    parser.add_argument("--kept", action="store_true", help="record nothing")
    if not parser.parse_args().kept:
        record()
    tell(texts())


def record() -> None:
    found = on_core(cores()[-1], _record, TOKENS)
    lines = (f"{json.dumps(name)}: {json.dumps(asdict(text), separators=(',', ':'))}" for name, text in found.items())
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, text in found.items():
        right = sum(one == other for one, other in zip(text.answer, text.drafted, strict=True))
        print(f"{name}: {len(text.prompt)} tokens of prompt, {len(text.answer)} of answer, drafts right {right}")


def tell(told: Sequence[Text]) -> None:
    """How often drafts are right, by the margin that each is at least ahead."""
    verdicts: dict[int, list[bool]] = {}
    for text in told:
        for token, drafted, margin in zip(text.answer, text.drafted, text.margins, strict=True):
            verdicts.setdefault(confidence(margin), []).append(token == drafted)
    for least, source in zip((0.0, *MARGINS), LEVELS[1:], strict=True):
        right = verdicts.get(source, [])
        print(f"ahead by {least} or more: {sum(right)} of {len(right)} right")


def texts() -> tuple[Text, ...]:
    """Of the eight prompts, in the order of `tests.prompts.PROMPTS`."""
    return tuple(_kept()[name] for name in PROMPTS)


def repeating() -> tuple[Text, ...]:
    """Of the prompts whose answers repeat them (`tests.prompts.REPEATING`)."""
    return tuple(_kept()[name] for name in REPEATING)


@cache
def _kept() -> dict[str, Text]:
    kept = json.loads(PATH.read_text(encoding="utf-8"))
    return {name: Text(**{key: tuple(ids) for key, ids in one.items()}) for name, one in kept.items()}


def _record(tokens: int) -> dict[str, Text]:
    target, draft = engine_of(Party(models.qwen_int4())), engine_of(Party(models.draft_int4(), short=True))
    tokenizer = Tokenizer.load(models.qwen_int4())
    found = {}
    for number, (name, prompt) in enumerate((PROMPTS | REPEATING).items()):
        rows = tuple(tokenizer.encode(tokenizer.render_chat([("user", prompt)])))
        answer, drafted, margins = [], [], []
        start, kind, ids = 0, RowKind.PREFILL, rows
        for _ in range(tokens):
            step = segment(number, start, ids, 1, kind)
            (output,), (guess,) = target.run([step]), draft.run([step])
            start, kind, ids = start + len(ids), RowKind.DECODE, output.drawn
            answer += output.drawn
            drafted += guess.drawn
            margins += [round(margin, 3) for margin in guess.margins]
        for engine in (target, draft):
            engine.close_session(step.session)
        found[name] = Text(rows, tuple(answer), tuple(drafted), tuple(margins))
    return found


class Reading(Over[Engine]):
    """An engine that says what was recorded, over one that keeps the books.

    A session is known by its prompt. What follows a draft that was wrong is never judged: it may be anything.
    """

    def __init__(self, engine: Engine, texts: Sequence[Text], *, draft: bool = False) -> None:
        super().__init__(engine)
        self._texts = {text.prompt: text for text in texts}
        self._draft = draft
        self._rows: dict[SessionId, list[int]] = {}
        self._read: dict[SessionId, Text] = {}

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        outputs = self._engine.run(batch)
        return [self._say(one, output) for one, output in zip(batch, outputs, strict=True)]

    def _say(self, one: Segment, output: Output) -> Output:
        rows = self._rows.setdefault(one.session, [])
        del rows[one.start :]
        rows += one.tokens
        if not output.drawn:
            return output
        if one.session not in self._read:
            found = (text for prompt, text in self._texts.items() if tuple(rows[: len(prompt)]) == prompt)
            self._read[one.session] = next(found)
        text = self._read[one.session]
        end = len(rows) + 1 - len(text.prompt)
        said = slice(end - one.wanted, end)
        if self._draft:
            return Output(drawn=text.drafted[said], margins=text.margins[said])
        return Output(drawn=text.answer[said])

    def close_session(self, session: SessionId) -> None:
        self._rows.pop(session, None)
        self._read.pop(session, None)
        super().close_session(session)


if __name__ == "__main__":
    main()
