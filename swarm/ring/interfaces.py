"""Which network interfaces a node announces itself on, and which addresses it gives away.

`choose` decides and says why; `gather` only reads the facts. Names are a hint, never a proof: an interface that looks
like a container bridge or a VPN is passed over only while a better one remains.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import psutil

from swarm.protocol.errors import UsageError

_PASSED_OVER = (
    (re.compile(r"docker|br-|podman|cni|flannel|cali|vEthernet \(nat\)", re.IGNORECASE), "a bridge of containers"),
    (re.compile(r"virbr|vboxnet|virtualbox|vmnet|vmware|lxcbr|lxdbr", re.IGNORECASE), "a network of virtual machines"),
    (re.compile(r"vEthernet \((WSL|Default Switch)", re.IGNORECASE), "a network of virtual machines"),
    (re.compile(r"tun\d|tap\d|wg|utun|zt|tailscale|ppp|wireguard|openvpn|nordlynx", re.IGNORECASE), "a VPN"),
)
"""Matched at the start of a name."""


@dataclass(frozen=True, slots=True)
class InterfaceFacts:
    """What the operating system says of one interface."""

    name: str
    up: bool
    addresses: tuple[IPv4Interface, ...]
    multicast: bool = True
    """False only where the system says that it cannot."""

    @property
    def loopback(self) -> bool:
        return any(address.is_loopback for address in self.addresses)


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """One interface, whether it is used, and why."""

    facts: InterfaceFacts
    chosen: bool
    reason: str
    rank: int
    """Order of its addresses among those given away: the likeliest to be reached first."""


def gather() -> tuple[InterfaceFacts, ...]:
    """The interfaces of this machine, as they are now."""
    stats = psutil.net_if_stats()
    facts = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        state = stats.get(name)
        flags = getattr(state, "flags", "")  # empty on Windows
        addresses = tuple(
            IPv4Interface(f"{entry.address}/{entry.netmask or '255.255.255.255'}")
            for entry in entries
            if entry.family == socket.AF_INET
        )
        facts.append(
            InterfaceFacts(name, state is not None and state.isup, addresses, not flags or "multicast" in flags)
        )
    return tuple(facts)


def choose(facts: Sequence[InterfaceFacts], wanted: Sequence[str] = ()) -> tuple[InterfaceChoice, ...]:
    """Decide for every interface, in the order given. Loopback is always in: two nodes on one PC find each other there.

    `wanted` names interfaces (by name or address) and overrides the choice; `UsageError` for one that does not exist.
    """
    for name in wanted:
        if not any(_is_named(one, name) for one in facts):
            known = ", ".join(f"{one.name} ({one.addresses[0].ip})" for one in facts if one.addresses)
            raise UsageError(
                "no such interface",
                expected=f"one of {known}" if known else "an interface with an IPv4 address",
                found=repr(name),
                action="Name one with --interface, or leave the option out.",
            )
    judged = [_judge(one, wanted) for one in facts]
    others = any(choice.chosen and not choice.facts.loopback for choice in judged)
    return tuple(_last_resort(choice) if not others and not wanted else choice for choice in judged)


def _is_named(facts: InterfaceFacts, name: str) -> bool:
    return facts.name == name or any(str(address.ip) == name for address in facts.addresses)


def _judge(facts: InterfaceFacts, wanted: Sequence[str]) -> InterfaceChoice:
    if not facts.up:
        return InterfaceChoice(facts, False, "it is down", 9)
    if not facts.addresses:
        return InterfaceChoice(facts, False, "it has no IPv4 address", 9)
    if facts.loopback:
        return InterfaceChoice(facts, True, "nodes on this PC meet here", 5)
    if wanted:
        named = any(_is_named(facts, name) for name in wanted)
        return InterfaceChoice(facts, named, "it was named" if named else "others were named", 0 if named else 9)
    for pattern, kind in _PASSED_OVER:
        if pattern.match(facts.name):
            return InterfaceChoice(facts, False, f"its name says {kind}", 4)
    if not facts.multicast:
        return InterfaceChoice(facts, False, "it has no multicast", 4)
    if all(address.is_link_local for address in facts.addresses):
        return InterfaceChoice(facts, True, "it is up, with a self-assigned address", 3)
    if any(address.is_private for address in facts.addresses):
        return InterfaceChoice(facts, True, "it is up, with a LAN address", 1)
    return InterfaceChoice(facts, True, "it is up, with a public address", 2)


def _last_resort(choice: InterfaceChoice) -> InterfaceChoice:
    """An interface that was passed over for its kind only, where nothing better is left."""
    if choice.chosen or choice.rank != 4:
        return choice
    return InterfaceChoice(choice.facts, True, f"nothing better is up, although {choice.reason}", choice.rank)


def chosen_addresses(choices: Iterable[InterfaceChoice]) -> tuple[IPv4Interface, ...]:
    """Addresses of the chosen interfaces, likeliest first, loopback last."""
    ranked = sorted((choice for choice in choices if choice.chosen), key=lambda choice: choice.rank)
    return tuple(address for choice in ranked for address in choice.facts.addresses)


def advertised(choices: Iterable[InterfaceChoice], port: int) -> tuple[str, ...]:
    """``host:port`` to give away, likeliest first, loopback last."""
    return tuple(f"{address.ip}:{port}" for address in chosen_addresses(choices))


def order_for_dialling(addresses: Iterable[IPv4Address], own: Sequence[IPv4Interface]) -> tuple[IPv4Address, ...]:
    """A peer's addresses in the order worth trying from here.

    Those in one of our own networks come first, loopback last. A peer with other addresses, none of them ours, sits on
    another PC: its loopback is not ours, and is dropped.
    """
    unique = list(dict.fromkeys(addresses))
    outside = [address for address in unique if not address.is_loopback]
    here = {interface.ip for interface in own}
    same_pc = not outside or any(address in here for address in outside)
    networks: list[IPv4Network] = [interface.network for interface in own if not interface.is_loopback]
    near = [address for address in outside if any(address in network for network in networks)]
    far = [address for address in outside if address not in near]
    return (*near, *far, *(address for address in unique if address.is_loopback and same_pc))
