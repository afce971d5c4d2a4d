from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.protocol.config import DEFAULT_PORT, parse_name, parse_peer, parse_port, parse_size
from swarm.protocol.errors import UsageError
from swarm.protocol.limits import MAX_NAME_CHARS


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8_000_000_000),
        ("8g", 8_000_000_000),
        ("6.5 GiB", 6_979_321_856),
        ("900m", 900_000_000),
        ("512 MiB", 536_870_912),
        ("1T", 10**12),
        (" 4096 ", 4096),
        ("4096b", 4096),
        ("1Ki", 1024),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "1 2 GB", "1e3", "1,5GB", "0", "0.0GB", "8 bananas", "1PB", "nan", "9" * 400 + "GB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="8GB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1", "7420", "65535"])
def test_ports(text: str) -> None:
    assert parse_port(text) == int(text)


@pytest.mark.parametrize("text", ["", "0", "65536", "-1", "80a", " 80", "٣", "1" * 5000, "0" * 5000 + "1"])
def test_what_is_no_port(text: str) -> None:
    with pytest.raises(UsageError, match="1 to 65535"):
        parse_port(text)


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("10.0.0.7:7000", ("10.0.0.7", 7000)),
        ("office-pc", ("office-pc", DEFAULT_PORT)),
        ("[fe80::1]:7000", ("fe80::1", 7000)),
        ("[fe80::1]", ("fe80::1", DEFAULT_PORT)),
        ("fe80::1", ("fe80::1", DEFAULT_PORT)),
        ("::1", ("::1", DEFAULT_PORT)),
    ],
)
def test_peers(text: str, peer: tuple[str, int]) -> None:
    assert parse_peer(text) == peer


@pytest.mark.parametrize("text", ["", ":7000", "a b", "host:", "host:0", "host:x", "[]:80"])
def test_what_is_no_peer(text: str) -> None:
    with pytest.raises(UsageError):
        parse_peer(text)


@pytest.mark.parametrize("text", ["Büro 3", "a", "pc-7.lan (old)", "名前", " trimmed ", "x" * MAX_NAME_CHARS])
def test_names(text: str) -> None:
    assert parse_name(text) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "   ", "x" * (MAX_NAME_CHARS + 1), "a\nb", "esc\x1b[0m", 'quo"te', "a/b", "a\u202eb"]
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        parse_name(text)


@given(st.text(max_size=40) | st.from_regex(r"\s*\d+(\.\d+)?\s*[kmgtKMGT]?i?[bB]?\s*"))
@example("9" * 18 + "." + "9" * 18 + "TiB")
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_size, parse_port, parse_peer, parse_name):
        try:
            parse(text)
        except UsageError as error:
            assert "\n" not in str(error)  # noqa: PT017 - one line, whatever was typed
