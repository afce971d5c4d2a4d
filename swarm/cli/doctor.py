"""``swarm doctor``: what this PC brings, what the network lets through, and what to do where something is missing.

The checks look and try; how a line reads is `line`'s alone. Nothing is changed on the PC, and no node is started.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface
from pathlib import Path
from typing import TextIO

import anyio
import anyio.abc
import anyio.to_thread
import openvino as ov

from swarm.engine.devices import usable_devices
from swarm.engine.selftest import self_test
from swarm.model.store import Store
from swarm.protocol.config import DEFAULT_PORT, PAGED, Settings
from swarm.protocol.errors import SwarmError, UsageError
from swarm.protocol.ids import NodeId
from swarm.ring.discovery import Announcement, DiscoveredPeer, Discovery, Trouble
from swarm.ring.identity import hold_home, load_or_create
from swarm.ring.interfaces import InterfaceChoice, choose, chosen_addresses, gather
from swarm.ring.machine import Memory, advertised_memory, memory
from swarm.ring.pairing import load_code
from swarm.ring.websocket import PORTS_TRIED

LISTEN_S = 2.0
"""Announce and listen on each interface for this long; on a healthy LAN nodes answer within half a second."""

CONNECT_S = 2.0
STORE_FOLDER = "store"
LOW_DISK_BYTES = 5 * 1000**3
LOW_MEMORY_BYTES = 1000**3
TRIED_OPENVINO = "2026.4"

PROBE_SWARM = "doctor"
"""The swarm that a doctor announces: a node sees that it is not its own, and a doctor knows its kind."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    ok: bool
    what: str
    """The thing looked at, in one or two words."""
    detail: str
    action: str = ""
    """What to do, where it is not ok."""


async def run_doctor(settings: Settings, out: TextIO, device_checks: Sequence[Check] = ()) -> int:
    """Check everything and print a line for each, as soon as it is known. 0 when all is ok, 1 otherwise.

    `device_checks` are the engine's own: whether the exactness rules hold on each device.
    """
    all_ok = True

    def show(checks: Iterable[Check]) -> None:
        nonlocal all_ok
        for check in checks:
            all_ok = all_ok and check.ok
            print(line(check), file=out, flush=True)

    show([check_python(sys.version_info[:2]), *await anyio.to_thread.run_sync(openvino_checks), *device_checks])
    show([check_memory(memory(), settings.memory_bytes)])
    choices, failed = _choose(settings)
    show(failed or check_interfaces(choices))
    port = settings.port or DEFAULT_PORT
    show(await multicast_checks(choices, port))
    show(await port_checks(settings, chosen_addresses(choices)))
    show(await anyio.to_thread.run_sync(home_checks, settings))
    return 0 if all_ok else 1


def line(check: Check) -> str:
    """``ok  what  detail`` or ``!!  what  detail  -> what to do``."""
    head = f"{'ok' if check.ok else '!!'}  {check.what:<10} {check.detail}"
    return f"{head}  -> {check.action}" if check.action and not check.ok else head


# --- this PC --------------------------------------------------------------------------------------------------------


def check_python(version: tuple[int, ...]) -> Check:
    found = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if (3, 10) <= version < (3, 14):
        return Check(True, "python", found)
    return Check(False, "python", found, "Install Python 3.10 to 3.13.")


def openvino_checks() -> list[Check]:
    """OpenVINO's version and every device with its name. Blocking."""
    try:
        core = ov.Core()
        devices = [(name, str(core.get_property(name, "FULL_DEVICE_NAME"))) for name in core.available_devices]
    except RuntimeError as error:
        return [Check(False, "openvino", str(error).strip().splitlines()[-1][:200], "Reinstall the package openvino.")]
    return [check_openvino(ov.get_version()), *check_devices(devices)]


def check_openvino(version: str) -> Check:
    if version.startswith(f"{TRIED_OPENVINO}."):
        return Check(True, "openvino", version)
    action = f"Install openvino=={TRIED_OPENVINO}.*; the self-test of the device says whether this one serves too."
    return Check(False, "openvino", f"{version}, tried with {TRIED_OPENVINO}", action)


def check_devices(devices: Sequence[tuple[str, str]]) -> list[Check]:
    if not any(name == "CPU" for name, _ in devices):
        return [Check(False, "device", "OpenVINO finds no CPU", "Reinstall the package openvino.")]
    return [Check(True, "device", f"{name}: {full_name}") for name, full_name in devices]


def check_memory(found: Memory, wanted: int | None) -> Check:
    """`wanted` is ``--memory``."""
    offered = advertised_memory(found.total, found.available) if wanted is None else wanted
    detail = f"{size(found.total)}, {size(found.available)} available, {size(offered)} offered to the swarm"
    if offered > found.available:
        return Check(False, "memory", detail, "Name less with --memory, or close other programs: the PC would swap.")
    if offered < LOW_MEMORY_BYTES:
        return Check(False, "memory", detail, "Close other programs; so little holds no layers worth the hop.")
    return Check(True, "memory", detail)


def size(count: int) -> str:
    """Bytes for people, in powers of 1,000 as `config.parse_size` reads them."""
    return f"{count / 1000**3:.1f} GB" if count >= 1000**3 else f"{count / 1000**2:.0f} MB"


# --- the network ----------------------------------------------------------------------------------------------------


def _choose(settings: Settings) -> tuple[tuple[InterfaceChoice, ...], list[Check]]:
    facts = gather()
    try:
        return choose(facts, settings.interfaces), []
    except UsageError as error:
        return choose(facts), [Check(False, "interface", f"{error.problem}: {error.found}", f"Use {error.expected}.")]


def check_interfaces(choices: Sequence[InterfaceChoice]) -> list[Check]:
    checks = []
    for choice in choices:
        addresses = ", ".join(str(address.ip) for address in choice.facts.addresses)
        name = f"{choice.facts.name} ({addresses})" if addresses else choice.facts.name
        verb = "chosen" if choice.chosen else "left out"
        checks.append(Check(True, "interface", f"{name} {verb}: {choice.reason}"))
    if not any(choice.chosen and not choice.facts.loopback for choice in choices):
        action = "Connect this PC to the network; until then it works alone."
        checks.append(Check(False, "interface", "none leads to other PCs", action))
    return checks


@dataclass(frozen=True, slots=True)
class Multicast:
    """What mDNS gave on one interface."""

    name: str
    address: IPv4Interface
    echo: bool
    """Our own announcement came back."""
    peers: tuple[DiscoveredPeer, ...]
    troubles: tuple[str, ...] = ()


async def multicast_checks(choices: Sequence[InterfaceChoice], port: int) -> list[Check]:
    """Announce and listen on each chosen interface, all at once."""
    tried: list[Multicast] = []
    async with anyio.create_task_group() as group:
        for choice in choices:
            for address in choice.facts.addresses if choice.chosen else ():
                group.start_soon(_try_multicast, choice.facts.name, address, port, tried)
    order = [choice.facts.name for choice in choices]
    return check_multicast(sorted(tried, key=lambda one: order.index(one.name)), port, sys.platform)


async def _try_multicast(name: str, address: IPv4Interface, port: int, tried: list[Multicast]) -> None:
    troubles: list[str] = []

    def listener(event: object) -> None:
        if isinstance(event, Trouble):
            troubles.append(event.text)

    own = Announcement(NodeId(secrets.token_hex(16)), "doctor", PROBE_SWARM, PROBE_SWARM, port)
    discovery = Discovery(own, lambda: (address,), listener)
    with anyio.move_on_after(LISTEN_S):
        await discovery.run()
    peers = tuple(peer for peer in discovery.peers if peer.swarm != PROBE_SWARM and reached_by(peer, address))
    tried.append(Multicast(name, address, discovery.heard_ourselves, peers, tuple(troubles)))


def reached_by(peer: DiscoveredPeer, interface: IPv4Interface) -> bool:
    """Whether a peer can have been heard on this interface: a socket hears what arrives on the others too."""
    hosts = [address.rpartition(":")[0] for address in peer.addresses]
    return any(IPv4Interface(host).ip in interface.network for host in hosts)


def check_multicast(tried: Sequence[Multicast], port: int, system: str) -> list[Check]:
    works_somewhere = any(one.echo and not one.address.is_loopback for one in tried)
    return [_check_one_multicast(one, port, system, works_somewhere) for one in tried]


def _check_one_multicast(one: Multicast, port: int, system: str, works_somewhere: bool) -> Check:
    where = f"{one.name} ({one.address.ip})"
    if one.peers:
        names = ", ".join(f"{peer.name} of {peer.swarm} at {peer.addresses[0]}" for peer in one.peers)
        return Check(True, "multicast", f"{where} heard {names}")
    if one.echo:
        return Check(True, "multicast", f"{where} heard ourselves, and no other node in {LISTEN_S:g} s")
    if one.address.is_loopback and works_somewhere:
        return Check(True, "multicast", f"{where} heard nothing; nodes on this PC meet on the other interfaces")
    found = one.troubles[0] if one.troubles else "heard nothing, not even ourselves"
    return Check(False, "multicast", f"{where} {found}", f"Open the firewall: {firewall(system, port)}; or use --peer.")


def firewall(system: str, port: int) -> str:
    """The commands that let mDNS and the links in. `system` is ``sys.platform``."""
    if system == "win32":
        rule = "netsh advfirewall firewall add rule dir=in action=allow name=swarm"
        return f"{rule} protocol=UDP localport=5353 & {rule} protocol=TCP localport={port} (as administrator)"
    ufw = f"sudo ufw allow 5353/udp && sudo ufw allow {port}/tcp"
    return f"{ufw} (ufw), or sudo firewall-cmd --add-port=5353/udp --add-port={port}/tcp (firewalld)"


async def port_checks(settings: Settings, addresses: Sequence[IPv4Interface]) -> list[Check]:
    """Listen where the links would, and connect to it through every address that is given away."""
    running = await anyio.to_thread.run_sync(node_that_runs, settings.home)
    if running:
        return [Check(True, "port", f"a node runs with this home ({running}); ask it with: swarm status")]
    last = DEFAULT_PORT + PORTS_TRIED - 1
    candidates = [settings.port] if settings.port is not None else [*range(DEFAULT_PORT, last + 1)]
    for port in candidates:
        try:
            listener = await anyio.create_tcp_listener(local_host="0.0.0.0", local_port=port)
        except OSError as error:
            failure = error.strerror or str(error)
            continue
        async with listener, _answering(listener):
            taken = f"; {DEFAULT_PORT} is taken" if port != candidates[0] else ""
            first = Check(True, "port", f"{port} is free{taken}")
            return [first, *[await _check_reachable(str(one.ip), port) for one in addresses]]
    action = "Stop the program that uses it, or name another port with --port."
    return [
        Check(False, "port", f"{' to '.join(map(str, sorted({candidates[0], candidates[-1]})))}: {failure}", action)
    ]


@contextlib.asynccontextmanager
async def _answering(listener: anyio.abc.Listener[anyio.abc.SocketStream]) -> AsyncIterator[None]:
    async def close(stream: anyio.abc.SocketStream) -> None:
        await stream.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(functools.partial(listener.serve, close))
        yield
        group.cancel_scope.cancel()


async def _check_reachable(host: str, port: int) -> Check:
    found = f"no answer in {CONNECT_S:g} s"
    with anyio.move_on_after(CONNECT_S):
        try:
            await (await anyio.connect_tcp(host, port)).aclose()
            return Check(True, "port", f"{host}:{port} answers")
        except OSError as error:
            found = str(error)
    return Check(False, "port", f"{host}:{port}: {found}", f"Open the firewall: {firewall(sys.platform, port)}.")


# --- the home folder ------------------------------------------------------------------------------------------------


def node_that_runs(home: Path) -> str:
    """The process of the node that runs with this home; empty where none does."""
    if not (home / "running.lock").exists():
        return ""
    try:
        with hold_home(home):
            return ""
    except UsageError as error:
        return error.found


def home_checks(settings: Settings) -> list[Check]:
    """Store, identity and pairing. Blocking."""
    steps: tuple[Callable[[Settings], Check], ...] = (_check_store, _check_identity, _check_pairing)
    checks = []
    for step in steps:
        try:
            checks.append(step(settings))
        except SwarmError as error:
            what = step.__name__.removeprefix("_check_")
            checks.append(Check(False, what, f"{error.problem}: {error.found}", error.action))
        except OSError as error:
            checks.append(Check(False, step.__name__.removeprefix("_check_"), str(error), "Name another with --home."))
    return checks


def _check_store(settings: Settings) -> Check:
    root = settings.home / STORE_FOLDER
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    used = size(Store(root).usage_bytes()) if root.exists() else "nothing yet"
    detail = f"{root} holds {used}, {size(free)} free on its disk"
    if free < LOW_DISK_BYTES:
        return Check(False, "store", detail, "Make room, or choose a place on another disk with --home.")
    return Check(True, "store", detail)


def _check_identity(settings: Settings) -> Check:
    if not (settings.home / "identity").exists():
        return Check(True, "identity", "none yet; it is made at the first start")
    return Check(True, "identity", f"node {load_or_create(settings.home).node[:8]}")


def _check_pairing(settings: Settings) -> Check:
    name = f'swarm "{settings.swarm}"'
    if settings.open:
        return Check(True, "pairing", f"{name} is open: every PC in the network may join and read along")
    if settings.code is not None or load_code(settings.home, settings.swarm) is not None:
        return Check(True, "pairing", f"{name}: the code is known here")
    return Check(True, "pairing", f"{name}: no code here yet; the first PC makes one, a later one asks for it once")


def device_checks(engine: str = PAGED) -> list[Check]:
    """The self-test of `engine` on every device it can drive; blocking, about two seconds each."""
    checks = []
    for device in usable_devices():
        try:
            found = self_test(device, kind=engine)
        except SwarmError as error:
            checks.append(Check(False, f"self-test {device}", str(error), "Use another --device."))
            continue
        off = {name: value for name, value in found.differences.items() if value}
        detail = f"exact: {', '.join(found.differences)} equal plain decoding bit for bit"
        if off:
            detail = "not exact: " + ", ".join(f"{name} differs by {value:.2g}" for name, value in off.items())
        detail += f" ({engine} engine, {found.seconds:.1f} s)"
        action = "Answers may depend on how the layers are shared; use --device CPU for exact ones." if off else ""
        checks.append(Check(not off, f"self-test {device}", detail, action))
    return checks
