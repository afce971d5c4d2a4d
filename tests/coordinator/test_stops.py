from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.coordinator.stops import StopMatcher

TEXT = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4)


def cut_at_first(text: str, stops: list[str]) -> str:
    return text[: min((place for place in map(text.find, stops) if place >= 0), default=len(text))]


@given(pieces=st.lists(TEXT, max_size=12), stops=STOPS)
def test_streaming_shows_what_a_search_of_the_whole_text_shows(pieces: list[str], stops: list[str]) -> None:
    matcher, whole, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        whole += piece
        shown += matcher.push(piece)
        assert cut_at_first(whole, stops).startswith(shown), "never more than may be shown"
        if not matcher.found:
            assert len(whole) - len(shown) < max([1, *map(len, stops)]), "never held back for longer than needed"
    shown += matcher.flush()
    assert shown == cut_at_first(whole, stops)
    assert matcher.found == (shown != whole)


def test_a_beginning_is_held_back_and_released() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("so E") == "so "
    assert matcher.push("N") == ""
    assert matcher.push("TRY") == "ENTRY"
    assert not matcher.found


def test_a_longer_stop_that_began_earlier_wins() -> None:
    matcher = StopMatcher(["b", "abc"])
    assert matcher.push("xab") == "x"
    assert not matcher.found
    assert matcher.push("c") == ""
    assert matcher.found
    assert matcher.push("more") == matcher.flush() == ""
