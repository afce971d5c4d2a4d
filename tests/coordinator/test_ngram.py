from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.coordinator.ngram import CHAIN, MAX_MATCH, MIN_MATCH, Match, NgramIndex

IDS = st.lists(st.integers(0, 3), max_size=60)


def index(ids: list[int]) -> NgramIndex:
    built = NgramIndex()
    built.extend(ids)
    return built


def common(ids: list[int], place: int) -> int:
    """Tokens up to `place` that are the same as the last ones, by looking."""
    length = 0
    while length < min(MAX_MATCH, place + 1) and ids[place - length] == ids[len(ids) - 1 - length]:
        length += 1
    return length


def test_what_followed_is_drafted() -> None:
    assert index([1, 2, 3, 4, 5, 9, 2, 3]).match(3) == Match((4, 5, 9), 2)


def test_nothing_is_drafted_where_nothing_repeats() -> None:
    assert index([1, 2, 3, 4]).match(3) is None
    assert index([1]).match(3) is None
    assert index([]).match(3) is None
    assert index([1, 2, 1, 2]).match(0) is None


def test_the_longest_match_wins_and_of_equal_ones_the_newest() -> None:
    assert index([7, 1, 2, 50, 1, 2, 60, 7, 1, 2]).match(1) == Match((50,), 3)
    assert index([1, 2, 50, 1, 2, 60, 9, 1, 2]).match(1) == Match((60,), 2)


def test_a_repetition_is_repeated() -> None:
    assert index([5, 1, 2, 3, 1, 2, 3]).match(7) == Match((1, 2, 3, 1, 2, 3, 1), 3)
    assert index([8, 8, 8]).match(4) == Match((8, 8, 8, 8), 2)


@given(ids=IDS, count=st.integers(1, 5))
def test_a_match_is_what_a_search_by_hand_finds(ids: list[int], count: int) -> None:
    found = index(ids).match(count)
    places = [place for place in range(len(ids) - 2, -1, -1) if common(ids, place) >= MIN_MATCH][:CHAIN]
    if not places:
        assert found is None
        return
    best = max(places, key=lambda place: common(ids, place))
    whole = list(ids)
    for _ in range(count):
        whole.append(whole[best + 1 + len(whole) - len(ids)])
    assert found == Match(tuple(whole[len(ids) :]), common(ids, best))


@given(ids=IDS, more=IDS, cut=st.integers(0, 60))
def test_a_rewind_leaves_what_was_there_before(ids: list[int], more: list[int], cut: int) -> None:
    rewound = index(ids + more)
    rewound.truncate(min(cut, len(ids)))
    fresh = index(ids[: len(rewound)])
    assert vars(rewound) == vars(fresh)
