"""The pairing code that a person carries from one PC to the next, and what is derived from it.

A swarm's secret is scrypt (RFC 7914) of its code, salted with its name. What leaves the node is derived from the secret
by HMAC-SHA256 under a label of its own, so that no value says anything about another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path

from swarm.protocol.errors import StoreError, UsageError
from swarm.protocol.ids import NodeId
from swarm.ring.identity import write_private

CODE_SYMBOLS = 12
"""Of 5 bits each: 60 random bits. At 50 ms a guess (scrypt) they take a thousand cores a million years."""

OPEN_SECRET = b""
"""The secret of a swarm that runs without one."""

OPEN_FINGERPRINT = "open"
UNDECIDED_FINGERPRINT = "undecided"
"""Of a PC that has no code yet and listens for a swarm to join."""

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base32: no I, L, O, which look like digits, and no U."""

_LOOKALIKES = str.maketrans({"O": "0", "I": "1", "L": "1"})


def new_code() -> str:
    """A fresh code in groups of four, such as ``K7QM-2RXW-9DFT``."""
    return _grouped("".join(secrets.choice(_ALPHABET) for _ in range(CODE_SYMBOLS)))


def parse_code(text: str) -> str:
    """A code as a person types it, in its one spelling. Raises `UsageError`."""
    symbols = "".join(c for c in text.upper() if c != "-" and not c.isspace()).translate(_LOOKALIKES)
    if len(symbols) != CODE_SYMBOLS or any(c not in _ALPHABET for c in symbols):
        raise UsageError(
            "not a pairing code",
            expected="12 letters and digits, such as K7QM-2RXW-9DFT",
            found=repr(text)[:40],
            action="The code is on the screen of every PC of the swarm.",
        )
    return _grouped(symbols)


def derive_secret(code: str, swarm: str) -> bytes:
    """32 bytes, the same on every PC with the same code and swarm name. Takes about 50 ms and 16 MB."""
    salt = b"swarm-inference pairing 1\0" + swarm.encode()
    return hashlib.scrypt(parse_code(code).encode(), salt=salt, n=2**14, r=8, p=1, dklen=32)


def fingerprint(secret: bytes) -> str:
    """16 hex digits that tell two swarms apart in the open (mDNS); ``open`` for a swarm without a secret."""
    if not secret:
        return OPEN_FINGERPRINT
    return keyed(secret, b"fingerprint").hex()[:16]


def http_token(secret: bytes, server: NodeId, client: NodeId) -> str:
    """What `client` shows `server` with an HTTP request. It is of no use at any other node, or to any other."""
    return keyed(secret, b"http", server.encode(), client.encode()).hex()


def check_http_token(secret: bytes, server: NodeId, client: NodeId, token: str) -> bool:
    """Whether `token` is right, in constant time."""
    return hmac.compare_digest(http_token(secret, server, client).encode(), token.encode("utf-8", "replace"))


def keyed(secret: bytes, label: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over a label and length-prefixed parts, 32 bytes: no two lists of parts read the same."""
    return hmac.digest(secret, framed(label, *parts), "sha256")


def framed(label: bytes, *parts: bytes) -> bytes:
    """The bytes that are signed and hashed: every part behind its length."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in (b"swarm-inference 1", label, *parts))


def load_code(home: Path, swarm: str) -> str | None:
    """The code this home remembers for a swarm; None where it never joined it. Raises `StoreError`."""
    code = _read(_path(home)).get(swarm)
    return None if code is None else parse_code(code)


def save_code(home: Path, swarm: str, code: str) -> None:
    """Remember the code of a swarm, beside those of others. Raises `StoreError`."""
    path = _path(home)
    codes = {**_read(path), swarm: parse_code(code)}
    try:
        home.mkdir(parents=True, exist_ok=True)
        write_private(path, json.dumps(codes, indent=2).encode())
    except OSError as error:
        raise _damaged(path, str(error)) from error


def _path(home: Path) -> Path:
    return home / "secrets.json"


def _read(path: Path) -> dict[str, str]:
    try:
        codes = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(codes, dict):
            raise ValueError("not an object")
        return {str(swarm): parse_code(str(code)) for swarm, code in codes.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, UsageError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, found: str) -> StoreError:
    return StoreError(
        "cannot use the file of pairing codes",
        expected=f"codes by swarm name in {path}",
        found=found,
        action="Check or delete it and give the code again with --code.",
    )


def _grouped(symbols: str) -> str:
    return "-".join(symbols[i : i + 4] for i in range(0, CODE_SYMBOLS, 4))
