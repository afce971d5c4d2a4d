"""How the rows of a conversation were run is known after its cache is gone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from swarm.coordinator.histories import Histories
from swarm.coordinator.token_log import TokenLog, prompt_kinds
from swarm.protocol.messages import RowKind

P, D = bytes((RowKind.PREFILL,)), bytes((RowKind.DECODE,))


def turn(prompt: Sequence[int], answer: Sequence[int], kinds: bytes = b"") -> TokenLog:
    log = TokenLog()
    log.append_prompt(prompt, kinds)
    for token in answer:
        log.confirm(token)
    return log


def test_what_was_decoded_is_decoded_again_and_the_rest_prefilled() -> None:
    histories = Histories(600.0)
    histories.remember(turn([1, 2, 3], [4, 5]), 0.0)
    assert histories.kinds([1, 2, 3, 4, 5, 6, 7], 1.0) == P * 3 + D * 2
    assert histories.kinds([1, 2, 3, 4, 9, 6, 7], 1.0) == P * 3 + D
    assert histories.kinds([1, 2, 3, 9, 9], 1.0) == b""
    assert histories.kinds([9], 1.0) == b""


def test_the_same_question_again_is_prefilled_to_its_end() -> None:
    """Its last two rows always are, as in `TokenLog.reusable`."""
    histories = Histories(600.0)
    histories.remember(turn([1, 2, 3], [4, 5, 6]), 0.0)
    assert histories.kinds([1, 2, 3], 1.0) == b""
    assert histories.kinds([1, 2, 3, 4, 5], 1.0) == b""
    assert histories.kinds([1, 2, 3, 4, 5, 6], 1.0) == P * 3 + D


def test_the_longest_beginning_counts() -> None:
    histories = Histories(600.0)
    histories.remember(turn([1, 2], [3, 4, 5]), 0.0)
    histories.remember(turn([1, 2], [3, 9]), 0.0)
    assert histories.kinds([1, 2, 3, 4, 5, 6, 7], 1.0) == P * 2 + D * 3


def test_a_conversation_is_remembered_once_and_for_a_time() -> None:
    histories = Histories(seconds=10.0)
    histories.remember(turn([1, 2], [3]), 0.0)
    kinds = histories.kinds([1, 2, 3, 4, 5], 1.0)
    histories.remember(turn([1, 2, 3, 4, 5], [6], kinds), 5.0)
    assert len(histories) == 1
    assert histories.kinds([1, 2, 3, 4, 5, 6, 7, 8], 14.9) == P * 2 + D + P * 2 + D
    assert histories.kinds([1, 2, 3, 4, 5, 6, 7, 8], 15.0) == b""
    assert len(histories) == 0


def test_the_oldest_are_forgotten_where_there_are_too_many() -> None:
    histories = Histories(600.0, positions=10)
    for first in (10, 20, 30):
        histories.remember(turn([first, 1], [2, 3]), 0.0)
    assert len(histories) == 2
    assert histories.kinds([10, 1, 2, 3, 4, 5], 1.0) == b""
    assert histories.kinds([30, 1, 2, 3, 4, 5], 1.0) == P * 2 + D * 2


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 4)), max_size=6))
def test_a_prompt_is_never_told_to_prefill_a_lone_row(turns: list[tuple[list[int], int]]) -> None:
    histories, now = Histories(600.0), 0.0
    prompt: list[int] = []
    for more, answer in turns:
        prompt = prompt + more
        kinds = histories.kinds(prompt, now)
        log = turn(prompt, [1] * answer, kinds)
        log.check()
        assert bytes(log.kinds(0, len(prompt))) == prompt_kinds(len(prompt), kinds)
        histories.remember(log, now)
        prompt = prompt + [1] * answer
