"""Every single segment of a second turn is lost in turn: rows of the first one must not stand in for it."""

from __future__ import annotations

import itertools

import pytest

from swarm.coordinator.events import Begin, Effect, Emit, Finish, SendSegment, Tick
from swarm.coordinator.pace import Speculation
from swarm.coordinator.session import Counters, Session, SessionLimits
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind
from tests.coordinator.fake_ring import FakeRing, next_token
from tests.coordinator.fake_stages import MODEL, NODE, make_plan, prompt_rows

LIMITS = SessionLimits(chunk_rows=4, sibling_rows=3, window=5)
STAGES = 3
FIRST = tuple(range(200, 230))
SECOND = (*FIRST[:6], *range(300, 320))
COUNT = 12


class Run:
    """A session whose ring loses segment `lost` on link `link` of the second turn."""

    def __init__(self, link: int, lost: int) -> None:
        self.ring = FakeRing(make_plan(1, STAGES))
        speculation = Speculation(fixed_k=2, fixed_depth=3)
        self.session = Session(
            SessionId("aaaaaaaa-1-00000000"), NODE, make_plan(1, STAGES), LIMITS, Counters(), speculation
        )
        self.link, self.lost = link, -1
        self.now = 0.0
        assert self.turn(FIRST) == plain(FIRST)
        self.lost = lost

    def turn(self, prompt: tuple[int, ...]) -> list[int]:
        self.tokens: list[int] = []
        self.carried = 0
        self.over = False
        self.carry_out(self.session.handle(Begin(prompt, MODEL, 1000, max_tokens=COUNT), self.now))
        while not self.over:
            if self.ring.answers:
                self.carry_out(self.session.handle(self.ring.answers.pop(0), self.now))
            elif self.ring.busy:
                self.move(self.ring.busy[0])
            else:
                assert self.session.deadline is not None
                self.now = self.session.deadline
                self.carry_out(self.session.handle(Tick(), self.now))
        return self.tokens

    def move(self, stage: int) -> None:
        if stage == self.link and self.ring.links[stage]:
            self.carried += 1
            if self.carried == self.lost:
                self.ring.links[stage].popleft()
                return
        self.ring.advance(stage)

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendSegment):
                self.ring.links[0].append(effect.segment)
            elif isinstance(effect, Emit):
                self.tokens += effect.tokens
            elif isinstance(effect, Finish):
                self.over = True
        self.session.validate_state()


def plain(prompt: tuple[int, ...]) -> list[int]:
    rows = prompt_rows(prompt)
    for _ in range(COUNT):
        rows.append((next_token(rows), RowKind.DECODE))
    return [token for token, _ in rows[len(prompt) :]]


@pytest.mark.parametrize("link", range(STAGES))
def test_a_lost_segment_is_noticed(link: int) -> None:
    for lost in itertools.count(1):
        run = Run(link, lost)
        assert run.turn(SECOND) == plain(SECOND), f"segment {lost} on link {link}"
        if run.carried < lost:
            assert lost > 10, "the test lost next to nothing"
            return
