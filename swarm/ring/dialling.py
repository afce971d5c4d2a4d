"""Whom to dial and when: a full mesh without both ends dialling at once; sans-I/O, part of `membership`."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from random import Random

from swarm.protocol import limits
from swarm.protocol.ids import NodeId
from swarm.ring.events import Dial

DIAL_GRACE_S = 2.0
"""Of two nodes the one with the lower id dials; the other waits this long, then tries as well (firewalls, one-way
routes). Longer than gossip needs to tell the lower one of the higher."""

BACKOFF_S = 0.5
"""Wait after the first failure; doubled after each further one, and spread by half so that nobody dials in step."""

BACKOFF_MAX_S = 15.0
"""A PC that comes back without being discovered is found within this."""

HOPELESS_S = 60.0
"""Wait where the other end refuses us for good (version, swarm, code): a person has to change something first."""

ANSWER_S = limits.HANDSHAKE_TIMEOUT_S + 5.0
"""A dial that the shell has not answered by then counts as failed."""

MAX_PENDING = 32
"""Dials under way at once: a newcomer to a swarm of 200 does not open 200 sockets in one go."""


@dataclass(slots=True)
class _Target:
    node: NodeId | None
    addresses: tuple[str, ...]
    due_at: float
    failures: int = 0
    turn: int = 0
    """Which address is next."""
    pending_until: float | None = None


class DialBook:
    def __init__(self, me: NodeId, random: Random) -> None:
        self._me = me
        self._random = random
        self._members: dict[NodeId, _Target] = {}
        self._found: dict[str, _Target] = {}
        """By address, from discovery and ``--peer``."""

    def met(self, node: NodeId, addresses: tuple[str, ...], now: float) -> None:
        """A member is new, is back, or has other addresses."""
        self._members[node] = _Target(node, addresses, now + self._patience(node))

    def forgotten(self, node: NodeId) -> None:
        self._members.pop(node, None)

    def found(self, address: str, node: NodeId | None, now: float) -> None:
        known = self._found.get(address)
        if known is None and len(self._found) >= limits.MAX_DISCOVERED_PEERS:
            return
        if known is None or (node is not None and known.node != node):
            self._found[address] = _Target(node, (address,), now + self._patience(node))
        elif known.pending_until is None:
            known.due_at = min(known.due_at, now + BACKOFF_S)

    def lost(self, address: str) -> None:
        self._found.pop(address, None)

    def connected(self, node: NodeId, address: str) -> None:
        for target in (self._members.get(node), self._found.get(address)):
            if target is not None:
                target.node, target.failures, target.pending_until = node, 0, None

    def disconnected(self, node: NodeId, now: float) -> None:
        for target in (self._members.get(node), *(t for t in self._found.values() if t.node == node)):
            if target is not None:
                target.due_at = now + self._patience(node)

    def failed(self, address: str, node: NodeId | None, retry: bool, now: float) -> None:
        target = self._members.get(node) if node is not None else None
        target = target or self._found.get(address)
        if target is not None and target.pending_until is not None:
            self._back_off(target, retry, now)

    def due(self, now: float, settled: Set[NodeId]) -> list[Dial]:
        """Dials to begin now. `settled`: nodes that have a link, or left."""
        dials: list[Dial] = []
        found = [target for target in self._found.values() if target.node not in self._members]
        # Where only an address is known, a member may say that it is its own.
        owned = {address for target in self._members.values() for address in target.addresses} if found else set()
        targets = [*self._members.values(), *(target for target in found if owned.isdisjoint(target.addresses))]
        pending = 0
        for target in targets:
            if target.pending_until is not None and target.pending_until <= now:
                self._back_off(target, True, now)
            pending += target.pending_until is not None
        for target in targets:
            if pending >= MAX_PENDING:
                break
            if target.pending_until is not None or target.due_at > now or target.node in settled:
                continue
            addresses = self._addresses(target)
            if not addresses:
                continue
            address = addresses[target.turn % len(addresses)]
            target.turn, target.pending_until = target.turn + 1, now + ANSWER_S
            pending += 1
            dials.append(Dial(address, target.node))
        return dials

    def _addresses(self, target: _Target) -> tuple[str, ...]:
        """The member's own, and where discovery saw it."""
        if target.node is None:
            return target.addresses
        seen = [address for address, other in self._found.items() if other.node == target.node]
        return tuple(dict.fromkeys([*target.addresses, *seen]))

    def _back_off(self, target: _Target, retry: bool, now: float) -> None:
        wait = min(BACKOFF_MAX_S, BACKOFF_S * 2 ** min(target.failures, 10)) if retry else HOPELESS_S
        target.failures += 1
        target.pending_until = None
        target.due_at = now + wait * (0.5 + self._random.random())

    def _patience(self, node: NodeId | None) -> float:
        return 0.0 if node is None or self._me < node else DIAL_GRACE_S

    def validate_state(self) -> None:
        """Raises ``AssertionError`` where the state contradicts itself; for tests."""
        assert len(self._found) <= limits.MAX_DISCOVERED_PEERS, "more found peers than allowed"
        for node, target in self._members.items():
            assert target.node == node, "a dial target under another's id"
