from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.errors import StoreError, UsageError
from swarm.protocol.ids import NodeId
from swarm.ring import pairing

A, B, C = NodeId("a" * 32), NodeId("b" * 32), NodeId("c" * 32)


def test_a_code_is_60_random_bits_one_can_read_aloud() -> None:
    codes = {pairing.new_code() for _ in range(200)}
    assert len(codes) == 200
    assert all(re.fullmatch(r"([0-9A-HJKMNP-TV-Z]{4}-){2}[0-9A-HJKMNP-TV-Z]{4}", code) for code in codes)
    assert len(set("".join(codes)) - {"-"}) == 32


@pytest.mark.parametrize(
    "typed",
    [
        "K7QM-2RXW-9D10",
        "k7qm2rxw9d10",
        " K7QM 2RXW 9DIO ",
        "k7qm-2rxw-9dlo",
        "K-7-Q-M-2-R-X-W-9-D-1-O",
        "k7qm\t2rxw\n9d1o",
    ],
)
def test_codes_are_read_as_people_type_them(typed: str) -> None:
    assert pairing.parse_code(typed) == "K7QM-2RXW-9D10"


@pytest.mark.parametrize(
    "typed", ["", "K7QM-2RXW-9DF", "K7QM-2RXW-9DFT0", "K7QM-2RXW-9DFU", "K7QM_2RXW_9DFT", "ß" * 12]
)
def test_what_is_no_code_is_refused(typed: str) -> None:
    with pytest.raises(UsageError, match="12 letters and digits"):
        pairing.parse_code(typed)


@given(st.text(max_size=30))
def test_any_text_for_a_code(text: str) -> None:
    try:
        code = pairing.parse_code(text)
    except UsageError:
        return
    assert pairing.parse_code(code) == code


def test_the_secret_is_scrypt_of_code_and_swarm() -> None:
    secret = pairing.derive_secret("k7qm 2rxw 9dft", "office")
    expected = hashlib.scrypt(
        b"K7QM-2RXW-9DFT", salt=b"swarm-inference pairing 1\x00office", n=16384, r=8, p=1, dklen=32
    )
    assert secret == expected == pairing.derive_secret("K7QM-2RXW-9DFT", "office")
    assert secret != pairing.derive_secret("K7QM-2RXW-9DFT", "office 2")
    assert secret != pairing.derive_secret("K7QM-2RXW-9DFV", "office")


def test_fingerprints_tell_swarms_apart_and_give_nothing_away() -> None:
    one, two = b"1" * 32, b"2" * 32
    assert re.fullmatch("[0-9a-f]{16}", pairing.fingerprint(one))
    assert pairing.fingerprint(one) != pairing.fingerprint(two)
    assert pairing.fingerprint(one) not in one.hex()
    assert pairing.fingerprint(pairing.OPEN_SECRET) == "open"


def test_codes_are_kept_by_swarm(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert pairing.load_code(home, "office") is None
    pairing.save_code(home, "office", "k7qm2rxw9dft")
    pairing.save_code(home, "lab", "0000-0000-0000")
    assert pairing.load_code(home, "office") == "K7QM-2RXW-9DFT"
    assert pairing.load_code(home, "lab") == "0000-0000-0000"
    assert pairing.load_code(home, "other") is None
    if os.name != "nt":
        assert (home / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == ["secrets.json"]


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b"\xff\xfe", json.dumps({"office": 7}).encode(), b'{"a": "short"}']
)
def test_a_damaged_file_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secrets.json").write_bytes(content)
    with pytest.raises(StoreError, match="--code"):
        pairing.load_code(tmp_path, "office")
    with pytest.raises(StoreError, match="--code"):
        pairing.save_code(tmp_path, "office", "0000-0000-0000")


def test_a_token_serves_one_client_at_one_server() -> None:
    secret = b"s" * 32
    token = pairing.http_token(secret, A, B)
    assert pairing.check_http_token(secret, A, B, token)
    for other in (
        pairing.http_token(secret, B, A),
        pairing.http_token(secret, A, C),
        pairing.http_token(b"t" * 32, A, B),
        "",
        token[:-1],
        token.upper(),
        "ä" + token[1:],
        "\ud800",
    ):
        assert not pairing.check_http_token(secret, A, B, other)


def test_parts_do_not_run_together() -> None:
    assert pairing.keyed(b"k", b"l", b"ab", b"c") != pairing.keyed(b"k", b"l", b"a", b"bc")
    assert pairing.keyed(b"k", b"l", b"ab") != pairing.keyed(b"k", b"la", b"b")
    assert pairing.keyed(b"k", b"l", b"") != pairing.keyed(b"k", b"l")
