"""An answer that is cancelled at every possible point: after each event of a session, at each turn of the event loop.

Whoever cancels leaves nothing behind: what comes of it later moves nobody, others are not disturbed, and the next
turn on what is left of the cache is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import pytest

from swarm.coordinator.coordinator import CoordinatorLimits
from swarm.coordinator.events import (
    AskDraft,
    Begin,
    CloseEverywhere,
    Drafted,
    Effect,
    Emit,
    End,
    Event,
    Finish,
    LinkLost,
    PlanChanged,
    SendSegment,
    Tick,
)
from swarm.coordinator.pace import Speculation
from swarm.coordinator.requests import FinishReason
from swarm.coordinator.session import RUNNING, Counters, Session, SessionLimits, State
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Refused, RowKind
from swarm.protocol.plan import Plan
from tests.coordinator.fake_ring import FakeRing, next_token
from tests.coordinator.fake_stages import MODEL, NODE, PLAIN, Row, make_plan, prompt_rows
from tests.coordinator.house import LIMITS, House, ask, collect, expected, house, until, until_blocked
from tests.coordinator.test_coordinator_drafts import Oracle

PROMPT = (98, 99, 100, 101, 102, 98, 99, 100, 101)
ANSWER = 14


@dataclass(frozen=True)
class Setting:
    """What is recorded: who drafts and how far ahead, how many stages, and what goes wrong after which event."""

    stages: int
    speculation: Speculation = PLAIN
    right: int = 10
    """Drafted tokens of each draft that the target draws too; the others are wrong."""
    held: int = 0
    faults: dict[int, str] = field(default_factory=dict)


def drafting(k: int, depth: int, ngram: bool = True, model: bool = True) -> Speculation:
    return Speculation(fixed_k=k, fixed_depth=depth, ngram=ngram, model=model)


SETTINGS = {
    "plain": Setting(1),
    "plain, three stages": Setting(3),
    "held by the stages": Setting(2, held=5),
    "n-gram": Setting(2, drafting(3, 1, model=False)),
    "model, always right": Setting(2, drafting(3, 2, ngram=False)),
    "model, wrong at times": Setting(3, drafting(3, 4, ngram=False), right=1),
    "both": Setting(3, drafting(5, 2), right=2),
    "as it measures": Setting(2, Speculation()),
    "refused": Setting(2, drafting(2, 2), faults={3: "refuse", 9: "refuse"}),
    "another ring": Setting(3, drafting(3, 2), faults={2: "plan", 8: "plan"}),
    "no ring for a while": Setting(2, faults={4: "no ring", 5: "plan"}),
    "lost link": Setting(2, drafting(3, 2), faults={1: "link", 7: "link"}),
}


class World:
    """A session, its ring and its draft model, one move at a time; always the same moves."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.plan = make_plan(1, setting.stages)
        self.ring = FakeRing(self.plan)
        self.counters = Counters()
        self.now = 0.0
        self.events = 0
        self.opened = 0
        self.running = False
        self.open_session()

    def open_session(self) -> None:
        self.opened += 1
        limits = SessionLimits(chunk_rows=4, sibling_rows=3, window=5)
        name = SessionId(f"aaaaaaaa-{self.opened:x}-00000000")
        self.session = Session(name, NODE, self.plan, limits, self.counters, self.setting.speculation)
        self.truth: list[Row] = []
        self.drafts: AskDraft | None = None

    def begin(self, prompt: tuple[int, ...], held: int = 0) -> None:
        for stage in self.ring.stages if held else ():
            stage.caches[self.session.id] = prompt_rows(prompt)[:held]
        self.running = True
        effects = self.session.handle(Begin(prompt, MODEL, 60, max_tokens=ANSWER, held=held, draft_model=True), 0.0)
        reused = self.session.reused
        self.truth = (self.truth or prompt_rows(prompt))[:reused] + prompt_rows(prompt[reused:])
        self.carry_out(effects)

    def handle(self, event: Event) -> list[Effect]:
        self.events += 1
        effects = self.session.handle(event, self.now)
        self.session.validate_state()
        self.carry_out(effects)
        return effects

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                for token in effect.tokens:
                    assert token == next_token(self.truth), "not the token of plain decoding"
                    self.truth.append((token, RowKind.DECODE))
            elif isinstance(effect, SendSegment):
                self.ring.links[0].append(effect.segment)
            elif isinstance(effect, AskDraft):
                self.drafts = effect
            elif isinstance(effect, Finish):
                self.running, self.drafts = False, None

    def step(self) -> None:
        """The next event of the run, faults at their places."""
        self.now += 0.01
        fault = self.setting.faults.get(self.events)
        if fault is not None:
            self.go_wrong(fault)
        elif self.ring.answers:
            answer = self.ring.answers.pop(0)
            if answer.session == self.session.id:  # a coordinator hands a session its own messages only
                self.handle(answer)
        elif self.ring.busy:
            self.ring.advance(self.ring.busy[-1])
        elif self.drafts is not None:
            self.handle(self.draft())
        else:
            assert self.session.deadline is not None
            self.now = max(self.now, self.session.deadline)
            self.handle(Tick())

    def go_wrong(self, fault: str) -> None:
        if fault in ("plan", "no ring"):
            stages = self.setting.stages if fault == "plan" else 0
            self.plan = make_plan(self.plan.epoch.number + 1, stages)
            self.ring = FakeRing(self.plan)
            self.handle(PlanChanged(self.plan))
        elif fault == "link":
            self.ring.links[0].clear()
            self.handle(LinkLost(self.session.attempt, "closed"))
        else:
            self.handle(Refused(self.session.id, self.plan.epoch, self.session.attempt, "full", fatal=False))

    def draft(self) -> Drafted:
        asked, self.drafts = self.drafts, None
        assert asked is not None
        rows = self.truth + [(token, RowKind.DECODE) for token in asked.tokens[len(self.truth) :]]
        for i in range(asked.count):
            rows.append((next_token(rows) + (i >= self.setting.right), RowKind.DECODE))
        return Drafted(asked.attempt, asked.start, tuple(token for token, _ in rows[asked.start :]), 0.01)

    def finish(self) -> None:
        for _ in range(2000):
            if not self.running:
                return
            self.step()
        raise AssertionError(f"no end: {self.session.state}")

    def let_everything_land(self) -> None:
        """Whatever was under way arrives, and moves nobody."""
        while self.ring.busy or self.ring.answers:
            while self.ring.busy:
                self.ring.advance(self.ring.busy[0])
            if self.ring.answers:
                assert not self.handle(self.ring.answers.pop(0)), "an answer of a turn that is over did something"


def run_to(setting: Setting, events: int) -> World:
    """The recorded run up to so many events, or to its end."""
    world = World(setting)
    world.begin(PROMPT, setting.held)
    while world.running and world.events < events:
        world.step()
    return world


def cancelled(setting: Setting) -> Iterator[World]:
    """The run broken off after every one of its events."""
    whole = run_to(setting, 10**6)
    for events in range(whole.events):
        world = run_to(setting, events)
        effects = world.session.handle(End(FinishReason.CANCELLED), world.now)
        world.session.validate_state()
        world.carry_out(effects)
        closes = any(isinstance(effect, CloseEverywhere) for effect in effects)
        assert Finish(FinishReason.CANCELLED) in effects
        assert not any(isinstance(effect, SendSegment | AskDraft | Emit) for effect in effects)
        assert world.session.state is (State.DONE if closes else State.IDLE)
        assert world.session.deadline is None
        yield world


@pytest.mark.parametrize("name", SETTINGS)
def test_what_lands_after_the_end_moves_nobody(name: str) -> None:
    points = 0
    for world in cancelled(SETTINGS[name]):
        points += 1
        world.let_everything_land()
        if world.session.state is State.IDLE:
            fed = world.session.log.fed
            for stage in world.ring.stages:
                assert stage.caches[world.session.id][:fed] == world.truth[:fed], "kept means held by all"
    assert points >= 8


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("instead", [False, True])
def test_the_next_turn_is_that_of_plain_decoding(name: str, landed: bool, instead: bool) -> None:
    """Begun before what was under way has landed, or after; it goes on behind what was said, or changes its end."""
    for world in cancelled(SETTINGS[name]):
        if landed:
            world.let_everything_land()
        said = tuple(token for token, _ in world.truth)
        prompt = (*said[:-1], said[-1] + 1) if instead else (*said, 98, 99, 100)
        if world.session.state is State.DONE:
            world.open_session()
        if not world.plan.stages:
            continue
        world.setting = replace(world.setting, faults={})
        world.begin(prompt)
        world.finish()
        assert len(world.truth) == len(prompt) + ANSWER
        assert world.counters.mismatches == 0


def test_runs_pass_through_every_state() -> None:
    """Else the points at which they are broken off would not be all there are."""
    seen, in_flight = set(), 0
    for setting in SETTINGS.values():
        world = run_to(setting, 0)
        while world.running:
            world.step()
            seen.add(world.session.state)
            in_flight = max(in_flight, sum(map(len, world.ring.links)) + len(world.ring.answers))
    assert seen >= {*RUNNING, State.WAITING}
    assert in_flight > 1


# --- the coordinator, at each turn of the event loop ----------------------------------------------------------------

QUESTION = "a question that is long enough to be asked about, with some words more"


async def without_thread(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """In place of a thread, which would take a number of turns that nobody knows."""
    await anyio.lowlevel.checkpoint()
    return function(*args)


async def cancel_after(h: House, turns: int) -> bool:
    """Ask beside another, and give up after so many turns of the loop; whether the answer was whole by then."""
    whole = False
    with anyio.CancelScope() as scope:

        async def give_up() -> None:
            for _ in range(turns):
                await anyio.lowlevel.cancel_shielded_checkpoint()
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            text, *_ = await collect(h.coordinator, ask(QUESTION, max_tokens=6))
            assert text == expected(ask(QUESTION), 6)
            whole = True
            tasks.cancel_scope.cancel()
    return whole


COORDINATORS = {
    "plain": (make_plan(1, 2), replace(LIMITS, speculation=PLAIN)),
    "windows in flight": (make_plan(1, 2), replace(LIMITS, speculation=drafting(2, 2, ngram=False))),
    "in line": (make_plan(1, 2, kv_tokens=170), replace(LIMITS, speculation=PLAIN)),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", COORDINATORS)
async def test_a_question_given_up_at_any_turn_of_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anyio.to_thread, "run_sync", without_thread)
    turns, whole = 0, False
    while not whole:
        whole = await give_up_beside_another(*COORDINATORS[name], turns)
        turns += 1
    assert turns > 20


async def give_up_beside_another(plan: Plan, limits: CoordinatorLimits, turns: int) -> bool:
    other = ask("another question", max_tokens=12)
    async with house(plan, limits) as h:
        h.coordinator.set_drafter(Oracle(ask(QUESTION)))
        texts: list[str] = []

        async def neighbour() -> None:
            texts.append((await collect(h.coordinator, other))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(neighbour)
            await until(lambda: h.coordinator.stats().running == 1)
            whole = await cancel_after(h, turns)
        assert texts == [expected(other, 12)]
        await until_blocked()
        stats = h.coordinator.stats()
        assert (stats.running, stats.queued, h.coordinator._requests, stats.mismatches) == (0, 0, 0, 0)
        kept = {session.id for session in h.coordinator._idle.clear()}
        closed = {session for _, session in h.ring.closed}
        assert set(h.ring.stages.caches) <= kept | closed, "a session that nobody owns"
        async with aclosing(h.coordinator.generate(ask(QUESTION, max_tokens=6))) as deltas:
            assert "".join([delta.text async for delta in deltas]) == expected(ask(QUESTION), 6)
    return whole
