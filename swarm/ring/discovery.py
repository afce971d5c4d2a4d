"""Finding the other nodes of the LAN by mDNS (RFC 6762, RFC 6763), service ``_swarm._tcp.local.``.

A node's instance name is its id. The TXT record carries ``id``, ``v`` (protocol version), ``name``, ``swarm``, ``fp``
(the fingerprint of the secret, never the secret) and ``st`` (founding or member); the address records and the port say
where its links listen. What comes from the LAN is a hint: it is bounded here, and proved by the link's handshake.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv4Interface
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
from zeroconf import DNSQuestionType, IPVersion, ServiceStateChange
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from swarm.protocol.errors import ProtocolError, SwarmError, UsageError
from swarm.protocol.ids import NodeId, is_node_id
from swarm.protocol.limits import MAX_DISCOVERED_PEERS, MAX_NAME_CHARS
from swarm.protocol.version import PROTOCOL_VERSION
from swarm.ring.interfaces import order_for_dialling

SERVICE_TYPE = "_swarm._tcp.local."

RESCAN_S = 15.0
"""Between two looks at the interfaces: a cable or a dock that appears is used after at most this long."""

ASK_AGAIN_RESCANS = 2
"""Every so many rescans the browser starts anew: zeroconf asks four times in 14 s and then never again, so a switch
port that opens late would leave two nodes apart."""

RESOLVE_TIMEOUT_S = 3.0
RESOLVERS = 16
"""Names resolved at once: a name that nobody answers for must not hold up the others."""

CLOSE_TIMEOUT_S = 2.0
"""The goodbye: three packets within a quarter of a second."""

MAX_ADDRESSES = 16
"""Of one peer; an honest one has one for each interface."""

_MDNS_GROUP = "224.0.0.251"
_TTL_S = 120
_FINGERPRINT = re.compile(r"[0-9a-z]{1,64}")
_NAME_BYTES = 240  # one TXT string holds 255 bytes, key included


class DiscoveredState(Enum):
    FOUNDING = "founding"
    """No link to anybody yet."""
    MEMBER = "member"


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a node says of itself to the LAN."""

    node: NodeId
    name: str
    swarm: str
    fingerprint: str
    """Of the swarm's secret (`pairing.fingerprint`)."""
    port: int
    state: DiscoveredState = DiscoveredState.FOUNDING
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class DiscoveredPeer:
    node: NodeId
    name: str
    swarm: str
    fingerprint: str
    addresses: tuple[str, ...]
    """``host:port``, likeliest first."""
    protocol: int
    state: DiscoveredState


@dataclass(frozen=True, slots=True)
class Found:
    """A peer was heard for the first time, or says something else than before."""

    peer: DiscoveredPeer


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer said goodbye, or nobody answers for it any more."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something a person should know: an interface that fails, another PC with our identity."""

    text: str


DiscoveryEvent: TypeAlias = Found | Lost | Trouble
Listener: TypeAlias = Callable[[DiscoveryEvent], None]
Scan: TypeAlias = Callable[[], Sequence[IPv4Interface]]


# --- decisions ------------------------------------------------------------------------------------------------------


def instance_name(node: NodeId) -> str:
    return f"{node}.{SERVICE_TYPE}"


def node_of(instance: str) -> NodeId | None:
    """The node that an instance name belongs to; None where it is not one of ours."""
    node = instance.removesuffix(f".{SERVICE_TYPE}").lower()
    return NodeId(node) if instance.endswith(f".{SERVICE_TYPE}") and is_node_id(node) else None


def write_txt(announcement: Announcement) -> dict[str, str]:
    return {
        "id": announcement.node,
        "v": str(announcement.protocol),
        "name": _shorten(announcement.name),
        "swarm": _shorten(announcement.swarm),
        "fp": announcement.fingerprint,
        "st": announcement.state.value,
    }


def _shorten(text: str) -> str:
    return text[:MAX_NAME_CHARS].encode()[:_NAME_BYTES].decode(errors="ignore")


def read_peer(
    node: NodeId,
    txt: Mapping[bytes, bytes | None],
    addresses: Iterable[IPv4Address],
    port: int | None,
    own: Sequence[IPv4Interface],
) -> DiscoveredPeer:
    """A peer from its records. Raises `ProtocolError` for anything but a well-formed one."""
    if _text(txt, b"id") != node:
        raise ProtocolError("an announcement names another node", expected=node, found=_text(txt, b"id")[:40])
    if port is None or not 1 <= port <= 65535:
        raise ProtocolError("an announcement without a port", expected="1 to 65535", found=str(port))
    protocol = _text(txt, b"v")
    if not protocol.isascii() or not protocol.isdigit() or len(protocol) > 9:
        raise ProtocolError("bad protocol version", expected="a number", found=repr(protocol)[:40])
    fingerprint = _text(txt, b"fp")
    if _FINGERPRINT.fullmatch(fingerprint) is None:
        raise ProtocolError("bad fingerprint", expected="1 to 64 letters and digits", found=repr(fingerprint)[:40])
    try:
        state = DiscoveredState(_text(txt, b"st"))
    except ValueError:
        raise ProtocolError("bad state", expected="founding or member", found=repr(txt.get(b"st"))[:40]) from None
    usable = [one for one in addresses if not (one.is_multicast or one.is_unspecified or one.is_reserved)]
    ordered = order_for_dialling(usable[:MAX_ADDRESSES], own)
    if not ordered:
        raise ProtocolError("an announcement without an address that can be reached")
    where = tuple(f"{address}:{port}" for address in ordered)
    return DiscoveredPeer(node, _name(txt, b"name"), _name(txt, b"swarm"), fingerprint, where, int(protocol), state)


def _text(txt: Mapping[bytes, bytes | None], key: bytes) -> str:
    try:
        return (txt.get(key) or b"").decode()
    except UnicodeDecodeError:
        raise ProtocolError("an announcement is not UTF-8", found=f"{key.decode()} {txt[key]!r}"[:80]) from None


def _name(txt: Mapping[bytes, bytes | None], key: bytes) -> str:
    name = _text(txt, key)
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ProtocolError(f"bad {key.decode()}", expected=f"1 to {MAX_NAME_CHARS} characters", found=repr(name)[:80])
    return name


# --- the shell ------------------------------------------------------------------------------------------------------


def try_multicast(address: IPv4Address) -> str:
    """Why mDNS cannot be used on the interface with this address; empty where it can. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((str(address), 0))  # first: Windows refuses the membership of a socket that is not bound
            membership = socket.inet_aton(_MDNS_GROUP) + address.packed
            trial.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            trial.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, address.packed)
        except OSError as error:
            return error.strerror or str(error)
    return ""


@dataclass(slots=True)
class _Mdns:
    """One life of zeroconf: a fixed set of interfaces."""

    addresses: tuple[IPv4Interface, ...]
    zeroconf: AsyncZeroconf
    info: AsyncServiceInfo
    browser: AsyncServiceBrowser
    rescans: int = 0


class Discovery:
    """Announces this node and listens for others while `run` runs.

    `scan` gives the addresses of the chosen interfaces, likeliest first; it is called from a worker thread.
    `on_event` is called from the event loop and must return at once.
    """

    def __init__(
        self, announcement: Announcement, scan: Scan, on_event: Listener, *, rescan_s: float = RESCAN_S
    ) -> None:
        self._announcement = announcement
        self._scan = scan
        self._on_event = on_event
        self._rescan_s = rescan_s
        self._peers: dict[NodeId, DiscoveredPeer] = {}
        self._pending: dict[str, None] = {}
        self._wake_resolver = anyio.Event()
        self._changed = anyio.Event()
        self._troubles: set[str] = set()
        self._mdns: _Mdns | None = None
        self.heard_ourselves = False
        """Our own announcement came back: multicast works at least as far as this PC."""
        self.ignored = 0
        """Announcements that were malformed or beyond `MAX_DISCOVERED_PEERS`."""

    @property
    def peers(self) -> tuple[DiscoveredPeer, ...]:
        """The peers heard of, ourselves left out."""
        return tuple(self._peers.values())

    @property
    def addresses(self) -> tuple[IPv4Interface, ...]:
        """Where it announces now."""
        return self._mdns.addresses if self._mdns is not None else ()

    def update(self, announcement: Announcement) -> None:
        """Announce this from now on. The node id stays what it was."""
        if announcement.node != self._announcement.node:
            raise ValueError("a node keeps its id")
        if announcement != self._announcement:
            self._announcement = announcement
            self._changed.set()

    async def run(self) -> None:
        """Announce and listen until cancelled; then say goodbye, for at most `CLOSE_TIMEOUT_S`."""
        async with anyio.create_task_group() as group:
            for _ in range(RESOLVERS):
                group.start_soon(self._resolve_pending)
            try:
                while True:
                    await self._rescan()
                    with anyio.move_on_after(self._rescan_s):
                        await self._changed.wait()
                    if self._changed.is_set():
                        self._changed = anyio.Event()
                        await self._announce_again()
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT_S):
                    await self._close()

    async def _rescan(self) -> None:
        try:
            found = await anyio.to_thread.run_sync(self._usable)
        except UsageError as error:  # an interface that was named is gone for now
            self._report({str(error)})
            return
        usable, troubles = found
        mdns = self._mdns
        if mdns is None or mdns.addresses != usable:
            try:
                await self._reopen(usable)
            except (OSError, ZeroconfError) as error:
                await self._close()  # tried again at the next rescan
                troubles.add(
                    f"mDNS cannot use UDP port 5353: {error}. "
                    "Where another program holds it alone, stop that program, or name the other PCs with --peer."
                )
        elif mdns.rescans >= ASK_AGAIN_RESCANS:
            mdns.rescans = 0
            await mdns.browser.async_cancel()
            mdns.browser = self._browse(mdns.zeroconf)
        else:
            mdns.rescans += 1
        self._report(troubles)

    def _usable(self) -> tuple[tuple[IPv4Interface, ...], set[str]]:
        usable, troubles = [], set()
        for interface in self._scan():
            why = try_multicast(interface.ip)
            if why:
                troubles.add(f"no multicast on {interface.ip}: {why}; the other interfaces are used.")
            else:
                usable.append(interface)
        if not usable:
            troubles.add("no interface for mDNS. Connect to the network, or name the other PCs with --peer.")
        return tuple(usable), troubles

    def _report(self, troubles: set[str]) -> None:
        """Tell each trouble once, and again where it went and came back."""
        for text in sorted(troubles - self._troubles):
            self._on_event(Trouble(text))
        self._troubles = troubles

    async def _reopen(self, addresses: tuple[IPv4Interface, ...]) -> None:
        """Move to other interfaces. Nobody hears a goodbye in between: we are still here."""
        old, self._mdns = self._mdns, None
        if old is not None:
            await old.browser.async_cancel()
            old.zeroconf.zeroconf.registry.async_remove(old.zeroconf.zeroconf.registry.async_get_service_infos())
            await old.zeroconf.async_close()
        if not addresses:
            return
        zeroconf = AsyncZeroconf(interfaces=[str(one.ip) for one in addresses], ip_version=IPVersion.V4Only)
        info = self._info(addresses)
        self._mdns = _Mdns(addresses, zeroconf, info, self._browse(zeroconf))
        # Instance names are node ids, which cannot collide by chance: no need to probe for conflicts first.
        await (await zeroconf.async_register_service(info, cooperating_responders=True))
        for node in self._peers:
            self._queue(instance_name(node))

    def _browse(self, zeroconf: AsyncZeroconf) -> AsyncServiceBrowser:
        # Questions are multicast (QM): a unicast answer (QU) reaches only one of several nodes on a PC.
        return AsyncServiceBrowser(
            zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._heard], question_type=DNSQuestionType.QM
        )

    def _info(self, addresses: Sequence[IPv4Interface]) -> AsyncServiceInfo:
        return AsyncServiceInfo(
            SERVICE_TYPE,
            instance_name(self._announcement.node),
            port=self._announcement.port,
            properties=write_txt(self._announcement),
            server=f"{self._announcement.node}.local.",
            addresses=[one.ip.packed for one in addresses],
            host_ttl=_TTL_S,
            other_ttl=_TTL_S,
        )

    async def _announce_again(self) -> None:
        mdns = self._mdns
        if mdns is not None:
            mdns.info = self._info(mdns.addresses)
            await (await mdns.zeroconf.async_update_service(mdns.info))

    async def _close(self) -> None:
        mdns, self._mdns = self._mdns, None
        if mdns is not None:
            await mdns.browser.async_cancel()
            await mdns.zeroconf.async_close()

    def _heard(self, *, name: str, state_change: ServiceStateChange, **_: Any) -> None:
        node = node_of(name)
        if node is None:
            self.ignored += 1
        elif state_change is ServiceStateChange.Removed:
            self._pending.pop(name, None)
            self._lose(node)
        else:
            self._queue(name)

    def _queue(self, name: str) -> None:
        if len(self._pending) >= MAX_DISCOVERED_PEERS:
            self.ignored += 1
            return
        self._pending[name] = None
        self._wake_resolver.set()

    async def _resolve_pending(self) -> None:
        while True:
            while not self._pending:
                self._wake_resolver = anyio.Event() if self._wake_resolver.is_set() else self._wake_resolver
                await self._wake_resolver.wait()
            name = next(iter(self._pending))
            del self._pending[name]
            await self._resolve(name)

    async def _resolve(self, name: str) -> None:
        mdns, node = self._mdns, node_of(name)
        if mdns is None or node is None:
            return
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        try:
            answered = await info.async_request(mdns.zeroconf.zeroconf, RESOLVE_TIMEOUT_S * 1000, DNSQuestionType.QM)
        except ZeroconfError:
            return  # closed meanwhile
        if self._mdns is not mdns:
            return  # another set of interfaces meanwhile: everything is asked anew
        if not answered:
            self._lose(node)
            return
        addresses = [IPv4Address(packed) for packed in info.addresses_by_version(IPVersion.V4Only)]
        try:
            self._accept(read_peer(node, info.properties, addresses, info.port, mdns.addresses), mdns)
        except SwarmError:
            self.ignored += 1

    def _accept(self, peer: DiscoveredPeer, mdns: _Mdns) -> None:
        if peer.node == self._announcement.node:
            self._hear_ourselves(peer, mdns)
        elif peer.node not in self._peers and len(self._peers) >= MAX_DISCOVERED_PEERS:
            self.ignored += 1
        elif self._peers.get(peer.node) != peer:
            self._peers[peer.node] = peer
            self._on_event(Found(peer))

    def _hear_ourselves(self, peer: DiscoveredPeer, mdns: _Mdns) -> None:
        ours = {f"{one.ip}:{self._announcement.port}" for one in mdns.addresses}
        if ours & set(peer.addresses):
            self.heard_ourselves = True
            return
        text = f"another PC ({peer.addresses[0]}) announces this node's identity: its home folder is a copy of ours."
        self._on_event(Trouble(f"{text} Remove the file of the identity on one of them."))

    def _lose(self, node: NodeId) -> None:
        if self._peers.pop(node, None) is not None:
            self._on_event(Lost(node))
