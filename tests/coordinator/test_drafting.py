"""What is drafted next: sources, probes, late and wrong answers, the account."""

from __future__ import annotations

import itertools

import pytest

from swarm.coordinator.drafting import PROBE_AFTER, Drafting, Step
from swarm.coordinator.events import Begin, Drafted
from swarm.coordinator.pace import PLAIN_WINDOWS, Speculation
from swarm.coordinator.times import LEVELS
from swarm.coordinator.token_log import TokenLog
from tests.coordinator.fake_stages import MODEL

PERIOD = (11, 12, 13, 14, 15)
PROMPT = PERIOD * 4
ROOM = 1000
UNSURE, SUREST = LEVELS[1], LEVELS[-1]


class Bench:
    """A log and its drafting, one window at a time; every window takes a second."""

    def __init__(
        self,
        settings: Speculation | None = None,
        *,
        model: bool = False,
        prompt: tuple[int, ...] = PROMPT,
        stop: int = 0,
    ) -> None:
        self.now = 0.0
        self.log = TokenLog()
        self.log.append_prompt(prompt)
        self.drafting = Drafting(settings or Speculation(), 1, 8)
        begin = Begin(prompt, MODEL, 1000, stop_tokens=frozenset({stop}), draft_model=model)
        self.drafting.begin(begin, self.log, 0)

    def next(self, in_flight: int = 0, room: int = ROOM) -> Step:
        step = self.drafting.next(self.log, in_flight, room)
        if not step.wait:
            self.log.append_drafted(step.tokens)
        return step

    def draw(self, *tokens: int) -> None:
        """The target's draws at the next positions; a window comes back."""
        sent, self.now = self.now, self.now + 1.0
        self.drafting.answered(len(tokens), sent, self.now)
        for token in tokens:
            position, drafted = self.log.certain, self.log.certain < len(self.log)
            agreed = self.log.confirm(token)
            self.drafting.drawn(position, token, drafted, self.now)
            if not agreed:
                self.drafting.rejected(1, 0)
                self.drafting.clear(self.log.certain)
                return

    def answer(
        self, start: int, *tokens: int, seconds: float = 0.1, current: bool = True, sources: tuple[int, ...] = ()
    ) -> None:
        self.drafting.drafted(Drafted(0, start, tokens, seconds, sources), current, self.log, self.now)

    def warm(self) -> None:
        """Past the plain windows, with a draft model that has read the prompt and costs 0.1 s a token."""
        for token in range(PLAIN_WINDOWS + 1):
            step = self.next()
            if step.ask:
                self.answer(len(self.log), 99)
            self.draw(100 + token)
        step = self.next()
        assert step.wait
        assert step.ask
        self.answer(len(self.log), 200)
        assert self.next().tokens == (200,)
        self.draw(200, 201)


def test_ngram_goes_on_with_what_repeats() -> None:
    bench = Bench()
    for token in PERIOD[:PLAIN_WINDOWS]:
        assert bench.next() == Step(), "plain at first"
        bench.draw(token)
    step = bench.next()
    assert len(step.tokens) >= 3
    assert step.tokens == (PERIOD * 3)[PLAIN_WINDOWS:][: len(step.tokens)]
    bench.draw(*step.tokens, (PERIOD * 3)[PLAIN_WINDOWS + len(step.tokens)])
    usage = bench.drafting.usage()
    assert (usage.windows, usage.rejected) == (1, 0)
    assert usage.ngram_drafted == usage.ngram_accepted == len(step.tokens)


def test_a_guess_that_was_not_sent_is_judged_too() -> None:
    """The plain windows at the beginning tell how good n-gram is."""
    believed, doubted = Bench(), Bench()
    for place in range(PLAIN_WINDOWS):
        for bench, token in ((believed, PERIOD[place]), (doubted, (77, 11)[place])):
            assert bench.next() == Step()
            bench.draw(token)
    doubted.draw(12)
    assert len(believed.next().tokens) > len(doubted.next().tokens)


def test_the_end_is_not_drafted() -> None:
    bench = Bench(Speculation(fixed_k=5), stop=14)
    bench.draw(11)
    assert bench.next().tokens == (12, 13), "the stop token's own row is never run"


def test_no_more_than_fits() -> None:
    bench = Bench(Speculation(fixed_k=5))
    bench.draw(11)
    assert bench.next(room=2).tokens == (12, 13)
    assert bench.next(in_flight=1, room=0).wait


def test_fixed_settings_hold_at_once() -> None:
    bench = Bench(Speculation(fixed_k=3, fixed_depth=2))
    bench.draw(11)
    assert bench.next().tokens == (12, 13, 14)
    assert bench.next(in_flight=1).tokens == (15, 11, 12)
    assert bench.next(in_flight=2).wait


@pytest.mark.parametrize("settings", [Speculation(enabled=False), Speculation(ngram=False, model=False)])
def test_what_is_switched_off_drafts_nothing(settings: Speculation) -> None:
    bench = Bench(settings, model=True)
    for token in PERIOD * 3:
        assert bench.next() == Step()
        bench.draw(token)
    assert bench.drafting.usage().drafted == 0


def test_the_model_reads_the_prompt_beside_the_first_windows_and_is_then_measured() -> None:
    bench = Bench(model=True, prompt=tuple(range(30)))
    assert bench.next() == Step(ask=1), "nothing waits for it"
    assert bench.next(in_flight=1).wait
    bench.draw(100)
    assert bench.next() == Step(), "it is asked once"
    bench.answer(30, 100)
    bench.draw(101)
    assert bench.next() == Step(ask=1, wait=True)
    assert bench.drafting.waiting


def test_a_good_model_is_asked_for_more() -> None:
    bench = Bench(model=True, prompt=tuple(range(30)))
    bench.warm()
    step = bench.next()
    assert step.wait
    assert step.ask >= 1
    assert step.chances == bench.drafting._pace.confidence_chances
    assert 0.0 < step.least < 1.0
    bench.answer(len(bench.log), *range(300, 300 + step.ask), sources=(SUREST,) * step.ask)
    assert bench.next().tokens == tuple(range(300, 300 + step.ask))


def test_what_the_model_doubts_is_not_sent() -> None:
    """Where a row costs a third of a window: what follows a doubtful token would be of little use."""
    bench = Bench(model=True, prompt=tuple(range(30)))
    bench.warm()
    for number in range(30):
        rows, sent = (2, 6, 10)[number % 3], 100.0 * (number + 1)
        bench.drafting.answered(rows, sent, sent + 1.0 + (rows - 2) / 3)
    assert bench.next().ask
    bench.answer(len(bench.log), 300, 301, 302, sources=(SUREST, UNSURE, SUREST))
    assert bench.next().tokens == (300,)


def test_how_sure_the_model_was_is_judged_by_what_the_target_draws() -> None:
    bench = Bench(model=True, prompt=tuple(range(30)))
    bench.warm()
    before = bench.drafting._pace.confidence_chances
    assert bench.next().ask
    bench.answer(len(bench.log), 300, 301, sources=(SUREST, UNSURE))
    sent = bench.next().tokens
    bench.draw(*sent[:1], 999)
    after = bench.drafting._pace.confidence_chances
    assert after[-SUREST] > before[-SUREST]
    assert after[-UNSURE] < before[-UNSURE]


def test_a_late_draft_is_compared_with_what_was_drawn_and_the_rest_is_used() -> None:
    bench = Bench(Speculation(fixed_k=3, fixed_depth=2), model=True, prompt=tuple(range(30)))
    bench.draw(50)
    start = len(bench.log)
    assert bench.next() == Step(ask=3, wait=True)
    bench.draw(60)
    bench.answer(start, 60, 61, 62)
    assert bench.next().tokens == (61, 62)


def test_a_late_draft_that_was_wrong_is_thrown_away() -> None:
    bench = Bench(Speculation(fixed_k=3, fixed_depth=2), model=True, prompt=tuple(range(30)))
    bench.draw(50)
    start = len(bench.log)
    assert bench.next().wait
    bench.draw(70)
    bench.answer(start, 60, 61, 62)
    assert bench.next().ask == 3


def test_an_answer_of_another_attempt_is_not_used() -> None:
    bench = Bench(Speculation(fixed_k=3), model=True, prompt=tuple(range(30)))
    bench.draw(50)
    start = len(bench.log)
    assert bench.next().wait
    bench.answer(start, 61, 62, 63, current=False)
    assert bench.drafting.waiting
    bench.answer(start - 1, 61, 62, 63)
    assert bench.drafting.waiting


def test_a_model_that_can_do_no_more_is_left_alone() -> None:
    bench = Bench(model=True, prompt=tuple(range(30)))
    bench.warm()
    assert bench.next().ask
    bench.answer(len(bench.log))
    for token in range(3 * PROBE_AFTER):
        assert bench.next() == Step()
        bench.draw(400 + token)


def test_a_model_that_expects_the_end_is_not_asked_twice() -> None:
    bench = Bench(Speculation(fixed_k=3), model=True, prompt=tuple(range(30)), stop=7)
    bench.draw(50)
    start = len(bench.log)
    assert bench.next().ask == 3
    bench.answer(start, 7, 8, 9)
    assert bench.next() == Step()


def ask_and_err(bench: Bench, tokens: int) -> list[int]:
    """Where the model is asked over so many tokens; it answers in half a window, always wrongly."""
    asked = []
    for number in range(tokens):
        step = bench.next()
        if step.ask:
            asked.append(number)
            bench.answer(len(bench.log), *[999] * step.ask, seconds=0.5 * step.ask)
            bench.next()
        bench.draw(400 + number)
    return asked


def test_a_model_that_does_not_pay_is_tried_again_and_then_given_up_for_this_turn() -> None:
    bench = Bench(model=True, prompt=tuple(range(30)))
    bench.warm()
    asked = ask_and_err(bench, 40 * PROBE_AFTER)
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert PROBE_AFTER in gaps
    assert max(gaps) == PROBE_AFTER
    assert asked[-1] < 30 * PROBE_AFTER
    begin = Begin((), MODEL, 1000, draft_model=True)
    bench.drafting.begin(begin, bench.log, len(bench.log))
    assert ask_and_err(bench, 20), "another text, another try"


def test_what_the_model_has_missed_is_no_drafting_time() -> None:
    bench = Bench(model=True, prompt=tuple(range(30)))
    bench.warm()
    ask_and_err(bench, 2)
    before = bench.drafting._pace._times.token_s
    bench.draw(*range(500, 500 + PROBE_AFTER))
    step = bench.next()
    assert step.ask
    bench.answer(len(bench.log), *[999] * step.ask, seconds=30.0)
    assert bench.drafting._pace._times.token_s == before


def test_a_new_turn_drafts_from_the_whole_conversation() -> None:
    bench = Bench(Speculation(fixed_k=2), prompt=(1, 2, 3, 4, 5))
    bench.draw(8, 9)
    bench.log.mark_fed(6)
    bench.log.truncate(6)
    bench.log.append_prompt((70, 3, 4))
    bench.drafting.begin(Begin((), MODEL, 1000), bench.log, 6)
    assert bench.next().tokens == (5, 8)
