from __future__ import annotations

import re

import pytest

from swarm.protocol import errors
from swarm.protocol.errors import HandshakeError, LimitError, ProtocolError, SwarmError, UsageError

TREE = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SwarmError)
}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SwarmError("no room"), "no room"),
        (SwarmError("bad port", expected="1 to 65535"), "bad port; expected 1 to 65535"),
        (SwarmError("bad port", found="'x'"), "bad port; found 'x'"),
        (
            SwarmError("bad port", expected="1 to 65535", found="'x'", action="Name another."),
            "bad port; expected 1 to 65535; found 'x'. Name another.",
        ),
        (UsageError("no node runs", action="Start one."), "no node runs. Start one."),
    ],
)
def test_one_line_says_it_all(error: SwarmError, text: str) -> None:
    assert str(error) == text


def test_the_parts_are_kept_apart() -> None:
    error = HandshakeError("p", expected="e", found="f", action="a")
    assert (error.problem, error.expected, error.found, error.action) == ("p", "e", "f", "a")


def test_the_tree_is_drawn_as_it_is() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^[ │├└─]*(\w+Error)\b", errors.__doc__.replace("::", ""), re.MULTILINE)
    assert sorted(drawn) == sorted(TREE)


def test_a_limit_is_a_breach_of_the_protocol_and_usage_is_not() -> None:
    assert issubclass(LimitError, ProtocolError)
    assert not issubclass(UsageError, ProtocolError)
