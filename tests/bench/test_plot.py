"""The plot is a well-formed file that shows every point and name."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.plot import HEIGHT, WIDTH, Line, Plot, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_every_line_point_and_name_is_there() -> None:
    lines = [
        Line("plain", [(0, 10.0), (50, 4.0), (100, 2.5)]),
        Line("plain", [(0, 11.0), (50, 4.2), (100, 2.6)], dashed=True),
        Line("windows <in flight>", [(0, 18.0), (50, 15.0), (100, 12.0)]),
    ]
    root = ElementTree.fromstring(Plot("Speed & delay", "note", "ms", "tok/s", lines).svg())
    assert len(root.findall(f"{SVG}polyline")) == 3
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == 6
    assert all(0 < float(c.attrib["cx"]) < WIDTH and 0 < float(c.attrib["cy"]) < HEIGHT for c in circles)
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert texts.count("plain") == 1
    assert {"Speed & delay", "windows <in flight>", "0", "50", "100"} <= set(texts)


@pytest.mark.parametrize(("most", "last"), [(0.7, 0.8), (6.0, 6.0), (18.0, 20.0), (101.0, 120.0)])
def test_ticks_are_round_and_reach_the_top(most: float, last: float) -> None:
    found = ticks(most)
    assert found[0] == 0
    assert found[-1] == pytest.approx(last)
    assert len(found) <= 8
