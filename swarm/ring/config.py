"""What a node of the ring is, decided before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.protocol.config import DRAFT_NONE, PAGED
from swarm.protocol.messages import Member, MemberState
from swarm.ring.handshake import Credentials


@dataclass(frozen=True, slots=True)
class RingConfig:
    """What a node is, decided before it starts."""

    home: Path
    credentials: Credentials
    incarnation: int
    memory_bytes: int
    device: str
    speed: float
    engine: str = PAGED
    """One of `protocol.config.ENGINES`."""
    wanted: str = ""
    """As given with ``--model``."""
    draft: str = DRAFT_NONE
    """As given with ``--draft``; `DRAFT_NONE` too where nothing is speculated."""
    port: int | None = None
    peers: tuple[tuple[str, int], ...] = ()
    interfaces: tuple[str, ...] = ()
    code_given: bool = False
    """The pairing code was given for this start: where the first peer refuses it, the node ends with that error."""


def first_record(config: RingConfig, addresses: tuple[str, ...]) -> Member:
    """What a node says of itself at its start; `addresses` are ``host:port`` of its links, most likely first."""
    return Member(
        node=config.credentials.node,
        name=config.credentials.name,
        incarnation=config.incarnation,
        version=1,
        state=MemberState.ALIVE,
        addresses=addresses,
        memory_bytes=config.memory_bytes,
        device=config.device,
        speed=config.speed,
        model=None,
        model_name="",
        wanted=config.wanted,
        engine=config.engine,
    )
