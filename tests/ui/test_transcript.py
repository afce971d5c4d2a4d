"""Wrapping and scrolling of what was said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from swarm.ui.transcript import MAX_ENTRIES, Kind, Transcript


def shown(transcript: Transcript, width: int = 20, height: int = 10) -> list[str]:
    return [text for _, text in transcript.view(width, height)]


def test_who_speaks_is_marked_and_words_stay_whole() -> None:
    transcript = Transcript()
    transcript.add(Kind.YOU, "what is a swarm\nof office PCs?")
    transcript.add(Kind.ANSWER)
    transcript.extend("A swarm is ")
    transcript.extend("many of them.")
    assert shown(transcript) == [
        "> what is a swarm",
        "  of office PCs?",
        "",
        "  A swarm is many of",
        "  them.",
        "",
    ]


def test_code_keeps_its_indent() -> None:
    transcript = Transcript()
    transcript.add(Kind.ANSWER, "def f(x):\n    return x\n\tif y")
    assert shown(transcript)[:3] == ["  def f(x):", "      return x", "      if y"]


def test_it_follows_the_end_until_someone_scrolls_and_then_stays() -> None:
    transcript = Transcript()
    for number in range(20):
        transcript.add(Kind.NOTE, str(number))
    assert shown(transcript, height=4) == ["  18", "", "  19", ""]
    transcript.scroll(-1)
    before = shown(transcript, height=4)
    assert before == ["", "  17", "", "  18"]
    assert transcript.scrolled
    transcript.add(Kind.NOTE, "20")
    assert shown(transcript, height=4) == before
    transcript.scroll(1)
    transcript.scroll(1)
    assert not transcript.scrolled
    assert shown(transcript, height=4)[-2] == "  20"
    transcript.scroll(-100)
    assert shown(transcript, height=4)[0] == "  0"
    transcript.follow()
    assert shown(transcript, height=4)[-2] == "  20"


def test_what_goes_on_stands_at_the_end() -> None:
    transcript = Transcript()
    transcript.add(Kind.YOU, "hi")
    transcript.activity = "waiting: \x1b[31mPC-2"
    assert shown(transcript)[-1] == "  waiting: [31mPC-2"


def test_empty_answers_are_taken_away() -> None:
    transcript = Transcript()
    transcript.add(Kind.YOU, "hi")
    transcript.add(Kind.ANSWER, "  ")
    transcript.drop_empty()
    transcript.drop_empty()
    assert shown(transcript) == ["> hi", ""]


def test_old_entries_are_forgotten() -> None:
    transcript = Transcript()
    for number in range(MAX_ENTRIES + 5):
        transcript.add(Kind.NOTE, str(number))
    transcript.view(20, 4)
    transcript.scroll(-(10**6))
    assert shown(transcript, height=1) == ["  5"]


@given(st.text(max_size=300), st.integers(4, 100), st.integers(1, 30))
def test_every_line_fits(text: str, width: int, height: int) -> None:
    transcript = Transcript()
    transcript.add(Kind.ANSWER, text)
    lines = shown(transcript, width, height)
    assert len(lines) <= height
    for line in lines:
        assert cell_len(line) <= width
        assert "\x1b" not in line
        assert "\n" not in line
