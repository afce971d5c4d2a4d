from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.coordinator.token_log import Piece, TokenLog, prompt_kinds
from swarm.protocol.messages import RowKind

PREFILL, DECODE = RowKind.PREFILL, RowKind.DECODE
Turns = list[tuple[int, int, int]]
TURNS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=5)
"""(positions cut from the end, new prompt tokens, drawn tokens) of each turn"""


def draw(log: TokenLog, tokens: Iterable[int]) -> None:
    for token in tokens:
        log.confirm(token)


def build(turns: Turns) -> TokenLog:
    log = TokenLog()
    for cut, prompt, drawn in turns:
        log.truncate(max(0, len(log) - cut))
        log.append_prompt(range(len(log), len(log) + prompt))
        draw(log, range(len(log), len(log) + drawn))
        log.mark_fed(len(log))
    return log


def test_a_prompt_is_prefilled_and_a_lone_token_is_decoded() -> None:
    log = TokenLog()
    log.append_prompt([1])
    log.append_prompt([2, 3])
    draw(log, [4])
    assert log.kinds(0, 4) == (DECODE, PREFILL, PREFILL, DECODE)
    assert log.fed == 0


def test_prompts_that_touch_go_in_together() -> None:
    log = TokenLog()
    log.append_prompt([1, 2, 3])
    log.append_prompt([4, 5])
    draw(log, [6, 7])
    assert list(log.pieces(256, 16)) == [Piece(0, 5, PREFILL), Piece(5, 7, DECODE)]
    log.mark_fed(6)
    assert list(log.pieces(256, 16)) == [Piece(6, 7, DECODE)]


@given(turns=TURNS, chunk=st.integers(3, 9), siblings=st.integers(1, 5))
def test_pieces_repeat_every_position_with_its_kind(turns: Turns, chunk: int, siblings: int) -> None:
    log = build(turns)
    log.check()
    log.lose_caches()
    pieces = list(log.pieces(chunk, siblings))
    replayed = [kind for piece in pieces for kind in [piece.kind] * piece.rows]
    assert tuple(replayed) == log.kinds(0, len(log))
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    for piece in pieces:
        assert 2 <= piece.rows <= chunk if piece.kind is PREFILL else 1 <= piece.rows <= siblings


@given(turns=TURNS, cut=st.integers(0, 100))
def test_a_rewind_leaves_no_lone_prefilled_position(turns: Turns, cut: int) -> None:
    log = build(turns)
    length = max(0, len(log) - cut)
    log.truncate(length)
    log.check()
    assert length - 1 <= len(log) <= length
    assert log.fed == len(log)


@given(
    turns=TURNS, common=st.integers(0, 100), more=st.integers(0, 5), fed=st.integers(0, 100), known=st.integers(0, 100)
)
def test_a_turn_begins_behind_what_is_held_and_was_run_in_the_same_way(
    turns: Turns, common: int, more: int, fed: int, known: int
) -> None:
    log = build(turns)
    log.lose_caches()
    log.mark_fed(min(fed, len(log)))
    common = min(common, len(log))
    prompt = [*log.ids(0, common), *[-1] * more] or [-1]
    most = max(0, min(common, len(prompt) - 2))
    before = bytes(log.kinds(0, len(log)))
    kinds = before[: min(known, most)].rstrip(bytes((PREFILL,)))
    wanted = prompt_kinds(len(prompt), kinds)
    same = next((i for i in range(most) if before[i] != wanted[i]), most)
    held = min(same, log.fed)
    reused = log.begin(prompt, kinds)
    assert held - 2 <= reused <= held
    log.check()
    assert log.fed == reused
    assert log.ids(0, len(log)) == tuple(prompt)
    assert bytes(log.kinds(0, len(log))) == wanted
    assert all(piece.kind is not PREFILL or piece.rows >= 2 for piece in log.pieces(16, 4))


def test_long_prefixes_are_compared_to_the_last_id() -> None:
    log = TokenLog()
    log.append_prompt(range(5000))
    log.mark_fed(5000)
    assert log.reusable([*range(4321), -1, *range(4322, 6000)]) == 4321
    assert log.reusable(range(6000)) == 5000
    assert log.reusable(range(5000)) == 4998


def test_only_what_is_in_the_log_can_be_fed() -> None:
    log = TokenLog()
    log.append_prompt([1, 2])
    with pytest.raises(ValueError, match="outside"):
        log.mark_fed(3)


def test_the_same_prompt_again_is_run_as_it_was_the_first_time() -> None:
    """A lone last token would be a decoded row: the same seed would then draw another answer."""
    log = TokenLog()
    log.append_prompt(range(20))
    log.mark_fed(20)
    assert log.begin(range(20)) == 18
    assert {piece.kind for piece in log.pieces(256, 16)} == {RowKind.PREFILL}
