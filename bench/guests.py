"""Who comes to a mix of sessions, what they ask, and when they go; drawn from a seed. The people of `bench.mixes`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import anyio
from anyio.abc import TaskGroup

from bench.office import Office, Steps
from swarm.coordinator.coordinator import Coordinator, CoordinatorLimits
from swarm.coordinator.idle import IdleLimits
from swarm.coordinator.pace import DEPTHS, MAX_K, Speculation
from swarm.coordinator.requests import ChatMessage, FinishReason, GenerateRequest, Usage
from swarm.coordinator.session import SessionLimits
from swarm.protocol.errors import SwarmError
from swarm.protocol.sampling import GREEDY, SamplingParams
from tests.prompts import PROMPTS

MOST = 16
"""People in a mix."""

SYSTEMS = (
    "You answer in one short sentence, calmly and without any lists, as a patient teacher would do it for a child. "
    "Where you do not know something you say so, and where a question has several meanings you ask which is meant. "
    "You never use words that a child of eight does not know, and you never speak of yourself or of how you work.",
    "You are the clerk of a small library in a town by the sea. You know every book by its place on the shelf and tell "
    "people where to find it, floor first, then room, then shelf. Books that are lent come back within a fortnight; "
    "who cannot wait may read them in the reading room, which is open from nine to six on all days but Sunday.",
)
"""Long enough that the blocks of one are shared by all who begin with it."""

SAMPLINGS = (
    GREEDY,
    GREEDY,
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=40),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.2, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, repetition_penalty=1.15),
)

SECONDS = ("And why?", "Say it again in other words.", "Who told you that?")

NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Guest:
    """One person. Times are forwards of the first stage."""

    number: int
    home: int
    """Which coordinator is asked."""
    question: tuple[ChatMessage, ...]
    second: str
    """What is asked after the answer; empty: nothing."""
    sampling: SamplingParams
    tokens: int
    to_the_limit: bool
    """Past the model's stop tokens."""
    arrives: int
    leaves_after: int = NEVER
    """After so long, wherever the answer is by then."""
    reads: int = NEVER
    """Tokens of an answer; then nobody listens any more."""
    stops_at: str = ""
    """A stop string."""

    def request(self, messages: Sequence[ChatMessage]) -> GenerateRequest:
        stops = (self.stops_at,) if self.stops_at else ()
        return GenerateRequest(tuple(messages), self.sampling, self.tokens, stops, self.to_the_limit)


@dataclass(frozen=True, slots=True)
class Mix:
    seed: int
    guests: tuple[Guest, ...]
    homes: tuple[CoordinatorLimits, ...]
    tight: bool
    """Too little KV cache for all at once."""
    announced: bool
    """Coordinators know how much there is."""


@dataclass(slots=True)
class Told:
    """What one person was told to one question."""

    guest: Guest
    messages: tuple[ChatMessage, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    usage: Usage | None = None
    waited: bool = False
    """In line for the KV cache."""
    error: str = ""


def invite(seed: int, tokens: int) -> Mix:
    """The mix of `seed`; answers have `tokens` at most."""
    random = Random(seed)
    homes = tuple(_home(random) for _ in range(random.randint(1, 4)))
    count = random.randint(2, MOST)
    last = random.choice((0, 20, 80))
    guests = tuple(_guest(random, number, len(homes), last, tokens) for number in range(count))
    return Mix(seed, guests, homes, tight=seed % 2 == 1, announced=random.random() < 0.7)


def other_question(mix: Mix) -> tuple[int, Mix]:
    """The same mix where one person, whose number comes first, asks something else."""
    changed = Random(mix.seed).randrange(len(mix.guests))
    *before, last = mix.guests[changed].question
    question = (*before, replace(last, content=f"Forget this: {last.content[::-1][:120]}\nWhat is left?"))
    guests = tuple(replace(g, question=question) if g.number == changed else g for g in mix.guests)
    return changed, replace(mix, guests=guests)


def _home(random: Random) -> CoordinatorLimits:
    k, depth = random.randint(1, MAX_K), random.choice(DEPTHS)
    speculation = random.choice(
        (
            Speculation(enabled=False),
            Speculation(),
            Speculation(model=False),
            Speculation(fixed_k=k, fixed_depth=depth, model=False),
            Speculation(fixed_k=min(k, 4), fixed_depth=depth, ngram=False),
        )
    )
    # Patience: an answer that is pushed out again and again on a busy PC is late, not wrong.
    session = SessionLimits(chunk_rows=random.choice((16, 64, 256)), wait_s=3600.0, answer_s=600.0)
    return CoordinatorLimits(session, IdleLimits(sessions=random.choice((0, 2, 8))), speculation)


def _guest(random: Random, number: int, homes: int, last: int, tokens: int) -> Guest:
    system = random.choice(("", *SYSTEMS))
    question = random.choice(tuple(PROMPTS.values()))
    if random.random() < 0.2:
        prose = (Path(__file__).parent / "texts" / "prose.txt").read_text(encoding="utf-8")
        start = random.randrange(0, len(prose) - 1200)
        question = f"What is this about?\n{prose[start : start + random.randint(200, 1000)]}"
    messages = [ChatMessage("system", system)] if system else []
    sampling = random.choice(SAMPLINGS)
    guest = Guest(
        number,
        random.randrange(homes),
        (*messages, ChatMessage("user", question)),
        random.choice(SECONDS) if random.random() < 0.35 else "",
        sampling if sampling.greedy else replace(sampling, seed=random.randrange(1 << 20)),
        random.randint(max(2, tokens // 6), tokens),
        random.random() < 0.7,
        random.randint(0, last),
    )
    leaving = random.random()
    if leaving < 0.1:
        return replace(guest, leaves_after=random.randint(0, 3))
    if leaving < 0.25:
        return replace(guest, leaves_after=random.randint(0, tokens))
    if leaving < 0.35:
        return replace(guest, reads=random.randint(1, guest.tokens))
    if leaving < 0.4:
        return replace(guest, stops_at=random.choice((" the", ".", "\n")))
    return guest


async def receive(office: Office, mix: Mix) -> list[Told]:
    """Let everybody come, ask and go: what they were told, first questions and second ones."""
    coordinators = list(office.coordinators.values())
    present: set[int] = set()
    told: list[Told] = []

    async def stay(guest: Guest, people: TaskGroup) -> None:
        try:
            told.extend(await _ask(guest, coordinators[guest.home], office.steps, people))
        finally:
            present.discard(guest.number)
            office.steps.look()

    async with anyio.create_task_group() as people:
        for guest in sorted(mix.guests, key=lambda one: one.arrives):
            # Where nobody is there no time passes: the next one comes at once.
            await office.steps.until(lambda arrives=guest.arrives: office.steps.number >= arrives or not present)
            present.add(guest.number)
            people.start_soon(stay, guest, people)
    return told


async def _ask(guest: Guest, coordinator: Coordinator, steps: Steps, people: TaskGroup) -> list[Told]:
    first = Told(guest, guest.question)
    answers = [first]
    with anyio.CancelScope() as patience:
        if guest.leaves_after < NEVER:
            people.start_soon(_leave, patience, steps, steps.number + guest.leaves_after)
        await _listen(first, coordinator)
        if guest.second and first.finish is not None:
            answer = ChatMessage("assistant", first.text)
            second = Told(guest, (*guest.question, answer, ChatMessage("user", guest.second)))
            answers.append(second)
            await _listen(second, coordinator)
    patience.cancel()
    steps.look()
    return answers


async def _leave(patience: anyio.CancelScope, steps: Steps, when: int) -> None:
    await steps.until(lambda: steps.number >= when or patience.cancel_called)
    patience.cancel()


async def _listen(told: Told, coordinator: Coordinator) -> None:
    guest = told.guest
    try:
        async with aclosing(coordinator.generate(guest.request(told.messages))) as deltas:
            async for delta in deltas:
                told.waited |= delta.place > 0
                told.tokens += delta.tokens
                told.text += delta.text
                told.finish, told.usage = delta.finish, delta.usage
                if len(told.tokens) >= guest.reads:
                    return
    except SwarmError as error:
        told.error = str(error)
