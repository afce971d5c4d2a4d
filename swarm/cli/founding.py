"""Which swarm this PC belongs to, decided before it starts: found one, join one, and with which pairing code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from swarm.protocol.errors import UsageError
from swarm.protocol.ids import NodeId
from swarm.ring.discovery import Announcement, DiscoveredPeer, DiscoveredState, Discovery, Scan
from swarm.ring.pairing import OPEN_FINGERPRINT, UNDECIDED_FINGERPRINT, derive_secret, fingerprint, parse_code

LISTEN_S = 3.0
"""A PC without a code listens this long for a swarm to join before it founds one: mDNS answers in about a second."""

FOUND_S = 10.0
"""Where several PCs start at once without a code, the lowest id founds the swarm; the others wait this long for it."""

MAX_TRIES = 3
"""Wrong codes typed before the node gives up."""

_FOUNDING = DiscoveredState.FOUNDING

AskCode = Callable[[str], Awaitable[str]]
"""Ask the person; given is the line to show. Raises `UsageError` where nobody can be asked."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is to be done after a look at who is there."""

    join: DiscoveredPeer | None = None
    found: bool = False
    """Nobody to join and nobody to wait for."""


def look(me: NodeId, swarm: str, peers: Sequence[DiscoveredPeer], waited_s: float) -> Look:
    """Decide, for a PC without a code, `waited_s` seconds after it began to listen. Pure."""
    ours = [peer for peer in peers if peer.swarm == swarm]
    decided = sorted((peer for peer in ours if peer.fingerprint != UNDECIDED_FINGERPRINT), key=lambda peer: peer.node)
    if decided:
        return Look(join=decided[0])
    before = any(peer.node < me for peer in ours)
    return Look(found=waited_s >= (FOUND_S if before else LISTEN_S))


def look_for(ours: str, swarm: str, peers: Sequence[DiscoveredPeer], waited_s: float) -> Look:
    """The same for a PC that was given a code, with the fingerprint `ours`. Pure.

    Where only PCs with another fingerprint were found in time, `join` is one of them: the code is wrong.
    """
    decided = [peer for peer in peers if peer.swarm == swarm and peer.fingerprint != UNDECIDED_FINGERPRINT]
    mate = next((peer for peer in decided if peer.fingerprint == ours), None)
    if mate is not None or waited_s < LISTEN_S:
        return Look(join=mate)
    stranger = min(decided, key=lambda peer: peer.node, default=None)
    return Look(join=stranger, found=stranger is None)


async def find_swarm(me: NodeId, name: str, swarm: str, port: int, scan: Scan) -> DiscoveredPeer | None:
    """Listen for a swarm named `swarm`; one of its PCs, or None where this PC founds it."""

    def decide(peers: Sequence[DiscoveredPeer], waited_s: float) -> Look:
        return look(me, swarm, peers, waited_s)

    return await _listen(Announcement(me, name, swarm, UNDECIDED_FINGERPRINT, port, _FOUNDING), scan, decide)


async def check_code(code: str, me: NodeId, name: str, swarm: str, port: int, scan: Scan) -> bool:
    """Listen whether `code` is that of the swarm on this network; False where there is none to be heard.

    Raises `UsageError` for another.
    """
    ours = fingerprint(await anyio.to_thread.run_sync(derive_secret, code, swarm))

    def decide(peers: Sequence[DiscoveredPeer], waited_s: float) -> Look:
        return look_for(ours, swarm, peers, waited_s)

    peer = await _listen(Announcement(me, name, swarm, UNDECIDED_FINGERPRINT, port, _FOUNDING), scan, decide)
    if peer is not None and peer.fingerprint == OPEN_FINGERPRINT:
        raise _is_open(swarm, peer.name)
    if peer is not None and peer.fingerprint != ours:
        raise wrong_code(swarm, peer.name)
    return peer is not None


async def _listen(
    announcement: Announcement, scan: Scan, decide: Callable[[Sequence[DiscoveredPeer], float], Look]
) -> DiscoveredPeer | None:
    """Announce and listen until `decide` has decided; its `join`."""
    changed = anyio.Event()

    def on_event(_event: object) -> None:
        changed.set()

    discovery = Discovery(announcement, scan, on_event)
    began = anyio.current_time()
    seen = Look()
    async with anyio.create_task_group() as group:
        group.start_soon(discovery.run)
        while seen.join is None and not seen.found:
            seen = decide(discovery.peers, anyio.current_time() - began)
            with anyio.move_on_after(0.25):
                await changed.wait()
            changed = anyio.Event()
        group.cancel_scope.cancel()
    return seen.join


async def obtain_code(peer: DiscoveredPeer, swarm: str, ask: AskCode) -> str:
    """The code of the swarm that `peer` is in, from the person. Raises `UsageError`."""
    if peer.fingerprint == OPEN_FINGERPRINT:
        raise _is_open(swarm, peer.name)
    line = f'Pairing code of swarm "{swarm}" (shown on "{peer.name}"): '
    for _ in range(MAX_TRIES):
        try:
            code = parse_code(await ask(line))
        except UsageError as error:
            line = f"{error}\nPairing code: "
            continue
        secret = await anyio.to_thread.run_sync(derive_secret, code, swarm)
        if fingerprint(secret) == peer.fingerprint:
            return code
        line = f'That is not the code shown on "{peer.name}".\nPairing code: '
    raise wrong_code(swarm, peer.name)


def _is_open(swarm: str, where: str) -> UsageError:
    return UsageError(
        f'swarm "{swarm}" on "{where}" is open: it has no pairing code and anyone can join',
        action="Start with --open to join it, or with --swarm and another name.",
    )


def wrong_code(swarm: str, shown_on: str) -> UsageError:
    return UsageError(
        f'wrong pairing code for swarm "{swarm}"',
        expected=f'the code shown on "{shown_on}"',
        found="another one",
        action="Start again with --code and that code, or with --swarm and another name.",
    )
