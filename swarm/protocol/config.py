"""What a person can set: the command line and `SWARM_…` environment end in one frozen `Settings`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from swarm.protocol.errors import UsageError
from swarm.protocol.limits import MAX_NAME_CHARS

DEFAULT_PORT = 7420
"""Links listen here; the next free port where it is taken and none was named."""

DEFAULT_API_PORT = 7480
"""The HTTP API listens here, on loopback; likewise."""

DEFAULT_SWARM = "swarm"

DRAFT_AUTO = "auto"
"""Draft with the small model that is known to go with the swarm's."""

DRAFT_NONE = "none"
"""Draft without a model: from the text itself."""

PAGED, STATEFUL = "paged", "stateful"
ENGINES = (PAGED, STATEFUL)
"""What runs a node's layers. All stages of a ring run the same one: their last bits differ."""

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_NAME = re.compile(r"[\w .()+-]+")


@dataclass(frozen=True, slots=True)
class Settings:
    """One node's settings. None means: the default, chosen when the node starts."""

    home: Path
    model: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    port: int | None = None
    api_port: int | None = None
    swarm: str = DEFAULT_SWARM
    code: str | None = None
    open: bool = False
    peers: tuple[tuple[str, int], ...] = ()
    interfaces: tuple[str, ...] = ()
    device: str | None = None
    engine: str | None = None
    """One of `ENGINES`."""
    headless: bool = False
    disk_bytes: int | None = None
    """What the models may take on the disk."""
    draft: str = DRAFT_AUTO
    """`DRAFT_AUTO`, `DRAFT_NONE`, or what `model` may be."""
    speculation: bool = True


def parse_size(text: str) -> int:
    """``8GB``, ``6.5 GiB``, ``900m``: bytes. K, M, G, T are powers of 1,000; Ki, Mi, Gi, Ti of 1,024."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError("cannot read a size", expected="a number and a unit, such as 8GB or 512MiB", found=repr(text))
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    size = int(float(number) * base ** " kmgt".index(unit.lower() or " "))
    if size <= 0:
        raise UsageError("a size must be positive", expected="such as 8GB", found=repr(text))
    return size


def parse_port(text: str) -> int:
    """A TCP port, 1 to 65535."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise UsageError("port out of range", expected="1 to 65535", found=repr(text))
    return int(text)


def parse_engine(text: str) -> str:
    """One of `ENGINES`."""
    if text not in ENGINES:
        raise UsageError("no such engine", expected=" or ".join(ENGINES), found=repr(text)[:80])
    return text


def parse_peer(text: str) -> tuple[str, int]:
    """``HOST:PORT``, ``HOST`` (the default port), ``[V6]:PORT``."""
    host, separator, port = text.rpartition(":")
    if (text.startswith("[") and text.endswith("]")) or not separator or (":" in host and not host.startswith("[")):
        host, separator, port = text, "", ""
    host = host.strip("[]")
    if not host or any(c.isspace() for c in host):
        raise UsageError("cannot read a peer", expected="HOST:PORT", found=repr(text))
    return host, parse_port(port) if separator else DEFAULT_PORT


def parse_switch(flag: str, text: str) -> bool:
    """``on`` or ``off``, and what else people write for them."""
    word = text.strip().lower()
    if word in ("on", "1", "true", "yes"):
        return True
    if word in ("off", "0", "false", "no"):
        return False
    raise UsageError(f"cannot read {flag}", expected="on or off", found=repr(text)[:80])


def parse_name(text: str) -> str:
    """A node's or a swarm's name: letters, digits, spaces and ``. _ - + ( )``."""
    name = text.strip()
    if not name or len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
        raise UsageError(
            "bad name", expected=f"1 to {MAX_NAME_CHARS} letters, digits, spaces or .-_+()", found=repr(text)[:80]
        )
    return name
