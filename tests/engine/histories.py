"""Any history of a few sessions on a chain of shards, drawn by hypothesis: every wanted row against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from swarm.engine.selftest import Chain, segment
from swarm.protocol.messages import RowKind, Segment
from tests.engine.chains import Plain, assert_same_bits


@dataclass(slots=True)
class Running:
    """One session on its way through `plain`: rows before `done` are in the caches."""

    session: int
    plain: Plain
    least: int
    """Rows of a prefill chunk."""
    done: int = 0

    @property
    def end(self) -> int:
        return len(self.plain.ids) - 1

    def advance(self, data: st.DataObject) -> Segment:
        """The next rows: a prefill chunk, or a window of decode rows."""
        prompt, start = len(self.plain.prompt), self.done
        if start < prompt:
            count = data.draw(chunk_sizes(prompt - start, self.least))
            kind = RowKind.PREFILL
        else:
            count = data.draw(st.integers(1, min(7, self.end - start)))
            kind = RowKind.DECODE
        self.done += count
        wanted = data.draw(st.sampled_from([1, count]))
        return segment(self.session, start, self.plain.ids[start : start + count], wanted, kind)

    def draft(self, data: st.DataObject) -> Segment:
        """A window whose first row is right and whose others will be rejected."""
        wrong = data.draw(st.lists(st.integers(0, 400), max_size=6))
        ids = [self.plain.ids[self.done], *wrong]
        return segment(self.session, self.done, ids, len(ids), RowKind.DECODE)

    def step_back(self, data: st.DataObject) -> None:
        """Forget decoded rows, or everything: they are run anew, as a replay does."""
        prompt = len(self.plain.prompt)
        self.done = data.draw(st.sampled_from([0, *range(prompt, self.done)])) if self.done > prompt else 0

    def adopt(self, chain: Chain) -> None:
        """Begin with what others computed, and leave two rows of the prompt to be run, as the coordinator does."""
        self.done = chain.adopt(self.session, self.plain.prompt[:-2])

    def check(self, asked: Segment, logits: np.ndarray) -> None:
        start, ids = asked.start, list(asked.tokens)
        right = len(ids) if ids == self.plain.ids[start : start + len(ids)] else 1
        first = len(ids) - asked.wanted
        expected = self.plain.logits[start + first : start + right]
        assert_same_bits(logits[: len(expected)], expected, f"session {self.session} from {start + first}")


def chunk_sizes(rest: int, least: int) -> st.SearchStrategy[int]:
    """Rows of the next chunk, so that no chunk has fewer than `least`."""
    return st.sampled_from([n for n in range(least, rest + 1) if rest == n or rest - n >= least])


def live(chain: Chain, references: Sequence[Plain], data: st.DataObject, least: int = 2) -> None:
    """Run all sessions to their end, together and in a drawn order, checking every wanted row."""
    for engine in chain.engines:
        engine.reset()
    sessions = [Running(number, one, least) for number, one in enumerate(references)]
    for _ in range(200):
        waiting = [one for one in sessions if one.done < one.end]
        if not waiting:
            return
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique_by=lambda one: one.session))
        batch = []
        for one in chosen:
            if one.done == 0 and data.draw(st.booleans()):
                one.adopt(chain)
            turn = data.draw(st.sampled_from(["on", "on", "on", "draft", "back"]))
            if turn == "back":
                one.step_back(data)
            drafts = turn == "draft" and len(one.plain.prompt) <= one.done
            batch.append(one.draft(data) if drafts else one.advance(data))
        _, logits = chain.run(batch)
        row = 0
        for one, asked in zip(chosen, batch, strict=True):
            one.check(asked, logits[row : row + asked.wanted])
            row += asked.wanted
    raise AssertionError("the sessions do not come to an end")
