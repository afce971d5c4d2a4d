"""mDNS discovery: reading what the LAN sends, and real multicast on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.errors import ProtocolError, UsageError
from swarm.protocol.ids import NodeId
from swarm.protocol.limits import MAX_NAME_CHARS
from swarm.protocol.version import PROTOCOL_VERSION
from swarm.ring import discovery as discovery_module
from swarm.ring.discovery import (
    Announcement,
    DiscoveredPeer,
    DiscoveredState,
    Discovery,
    DiscoveryEvent,
    Found,
    Lost,
    Trouble,
    instance_name,
    node_of,
    read_peer,
    try_multicast,
    write_txt,
)

LOOPBACK = IPv4Interface("127.0.0.1/8")
OWN = (IPv4Interface("192.168.1.20/24"), LOOPBACK)
NODE = NodeId("ab" * 16)
LAN_ADDRESS = IPv4Address("192.168.1.30")


def announcement(node: NodeId = NODE, port: int = 7420, name: str = "office") -> Announcement:
    return Announcement(node, name, "swarm", "0123456789abcdef", port)


def txt(**changes: str | bytes | None) -> dict[bytes, bytes | None]:
    fields: dict[str, str | bytes | None] = {**write_txt(announcement()), **changes}
    return {key.encode(): value.encode() if isinstance(value, str) else value for key, value in fields.items()}


# --- reading --------------------------------------------------------------------------------------------------------


def test_what_is_announced_is_read() -> None:
    peer = read_peer(NODE, txt(), [LAN_ADDRESS, IPv4Address("127.0.0.1")], 7420, OWN)
    assert peer == DiscoveredPeer(
        NODE, "office", "swarm", "0123456789abcdef", ("192.168.1.30:7420",), PROTOCOL_VERSION, DiscoveredState.FOUNDING
    )


def test_the_secret_itself_is_not_announced() -> None:
    assert set(write_txt(announcement())) == {"id", "v", "name", "swarm", "fp", "st"}


@given(st.text(min_size=1, max_size=MAX_NAME_CHARS))
def test_every_txt_string_fits(name: str) -> None:
    fields = write_txt(announcement(name=name.replace("\ud800", "?")))
    assert all(len(f"{key}={value}".encode()) <= 255 for key, value in fields.items())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        txt(id="cd" * 16),
        txt(id=None),
        txt(v=""),
        txt(v="one"),
        txt(v="9" * 10),
        txt(v="²"),
        txt(name=""),
        txt(name="x" * (MAX_NAME_CHARS + 1)),
        txt(name="a\x1b[2Jb"),
        txt(name=b"\xff\xfe"),
        txt(swarm=None),
        txt(fp="x" * 65),
        txt(fp="../"),
        txt(st="king"),
    ],
)
def test_garbage_is_refused(fields: dict[bytes, bytes | None]) -> None:
    with pytest.raises(ProtocolError):
        read_peer(NODE, fields, [LAN_ADDRESS], 7420, OWN)


@pytest.mark.parametrize("port", [None, 0, 65536])
def test_a_bad_port_is_refused(port: int | None) -> None:
    with pytest.raises(ProtocolError):
        read_peer(NODE, txt(), [LAN_ADDRESS], port, OWN)


@pytest.mark.parametrize("address", ["0.0.0.0", "224.0.0.251", "255.255.255.255"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(ProtocolError):
        read_peer(NODE, txt(), [IPv4Address(address)], 7420, OWN)


def test_addresses_are_bounded() -> None:
    many = [IPv4Address(n) for n in range(2**24, 2**24 + 100)]
    assert len(read_peer(NODE, txt(), many, 7420, OWN).addresses) == discovery_module.MAX_ADDRESSES


KEYS = st.sampled_from([b"id", b"v", b"name", b"swarm", b"fp", b"st", b"other"])


@given(
    st.dictionaries(KEYS, st.one_of(st.none(), st.binary(max_size=80), st.just(NODE.encode()), st.just(b"1"))),
    st.lists(st.ip_addresses(v=4), max_size=20),
    st.one_of(st.none(), st.integers(-1, 70000)),
)
def test_anything_else_is_refused_or_well_formed(
    fields: dict[bytes, bytes | None], addresses: list[IPv4Address], port: int | None
) -> None:
    with contextlib.suppress(ProtocolError):
        peer = read_peer(NODE, fields, addresses, port, OWN)
        assert peer.node == NODE
        assert 1 <= len(peer.addresses) <= discovery_module.MAX_ADDRESSES


def test_instance_names_are_node_ids() -> None:
    assert node_of(instance_name(NODE)) == NODE
    for name in ("x._swarm._tcp.local.", f"{NODE}._http._tcp.local.", NODE, "", f"x.{NODE}._swarm._tcp.local."):
        assert node_of(name) is None


# --- real multicast on loopback -------------------------------------------------------------------------------------


class Heard:
    """Events of one `Discovery`, and a way to wait for one."""

    def __init__(self) -> None:
        self.events: list[DiscoveryEvent] = []
        self._news = anyio.Event()

    def __call__(self, event: DiscoveryEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, wanted: Callable[[DiscoveryEvent], bool]) -> DiscoveryEvent:
        with anyio.fail_after(20):
            while True:
                for event in self.events:
                    if wanted(event):
                        return event
                self._news = anyio.Event()
                await self._news.wait()


def found(node: NodeId, name: str | None = None) -> Callable[[DiscoveryEvent], bool]:
    return lambda e: isinstance(e, Found) and e.peer.node == node and name in (None, e.peer.name)


def fresh() -> NodeId:
    """Other tests of this machine may announce at the same time: ids of this run only."""
    return NodeId(secrets.token_hex(16))


@contextlib.asynccontextmanager
async def discovering(
    node: NodeId, heard: Heard, port: int = 7421, scan: Callable[[], list[IPv4Interface]] = lambda: [LOOPBACK]
) -> AsyncIterator[Discovery]:
    discovery = Discovery(announcement(node, port, f"name of {node[:4]}"), scan, heard, rescan_s=0.1)
    async with anyio.create_task_group() as group:
        group.start_soon(discovery.run)
        yield discovery
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_two_nodes_hear_each_other_change_and_leave() -> None:
    a, b = fresh(), fresh()
    at_a, at_b = Heard(), Heard()
    async with discovering(a, at_a, 7421) as first:
        async with discovering(b, at_b, 7422) as second:
            event = await at_a.until(found(b))
            assert isinstance(event, Found)
            assert event.peer.addresses == ("127.0.0.1:7422",)
            await at_b.until(found(a))
            assert [peer for peer in first.peers if peer.node == b] == [event.peer]

            second.update(announcement(b, 7422, "renamed"))
            await at_a.until(found(b, "renamed"))
        await at_a.until(lambda e: e == Lost(b))
        assert first.heard_ourselves
    assert not any(isinstance(event, Trouble) for event in at_a.events)
    assert not any(found(a)(event) for event in at_a.events)


@pytest.mark.anyio
async def test_an_interface_that_appears_later_is_used() -> None:
    a, b = fresh(), fresh()
    at_a, interfaces = Heard(), list[IPv4Interface]()
    async with discovering(a, at_a, scan=lambda: list(interfaces)) as first, discovering(b, Heard()):
        await at_a.until(lambda e: isinstance(e, Trouble) and "no interface for mDNS" in e.text)
        assert first.addresses == ()
        interfaces.append(LOOPBACK)
        await at_a.until(found(b))
        assert first.addresses == (LOOPBACK,)


@pytest.mark.anyio
async def test_moving_to_other_interfaces_says_no_goodbye() -> None:
    a, b = fresh(), fresh()
    at_a, at_b = Heard(), Heard()
    interfaces = [LOOPBACK]
    async with discovering(a, at_a, 7421, lambda: list(interfaces)), discovering(b, at_b, 7422):
        await at_b.until(found(a))
        interfaces[:] = [IPv4Interface("127.0.0.2/8"), LOOPBACK]
        await at_b.until(lambda e: isinstance(e, Found) and "127.0.0.2:7421" in e.peer.addresses)
        assert Lost(a) not in at_b.events
        assert Lost(b) not in at_a.events


@pytest.mark.anyio
async def test_an_interface_that_fails_is_told_once_and_the_others_go_on() -> None:
    a, b = fresh(), fresh()
    at_a = Heard()
    broken = IPv4Interface("203.0.113.77/24")  # not of this machine
    async with discovering(a, at_a, scan=lambda: [broken, LOOPBACK]) as first, discovering(b, Heard()):
        await at_a.until(found(b))
        await anyio.sleep(0.5)  # several rescans: nothing more may come
        assert first.addresses == (LOOPBACK,)
    assert len([e for e in at_a.events if isinstance(e, Trouble) and "203.0.113.77" in e.text]) == 1


@pytest.mark.anyio
async def test_a_named_interface_that_is_gone_is_trouble_not_the_end() -> None:
    calls = 0

    def scan() -> list[IPv4Interface]:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise UsageError("no such interface", found="eth9")
        return [LOOPBACK]

    a, b = fresh(), fresh()
    at_a = Heard()
    async with discovering(a, at_a, scan=scan), discovering(b, Heard()):
        await at_a.until(lambda e: isinstance(e, Trouble) and "eth9" in e.text)
        await at_a.until(found(b))


@pytest.mark.anyio
async def test_a_copied_identity_is_told() -> None:
    a = fresh()
    heard = Heard()
    async with discovering(a, heard, 7421), discovering(a, Heard(), 7422):
        event = await heard.until(lambda e: isinstance(e, Trouble))
    assert isinstance(event, Trouble)
    assert "announces this node's identity" in event.text


@pytest.mark.anyio
async def test_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "MAX_DISCOVERED_PEERS", 0)
    a = fresh()
    heard = Heard()
    async with discovering(a, heard) as first, discovering(fresh(), Heard()):
        with anyio.fail_after(20):
            while first.ignored == 0:  # noqa: ASYNC110 - nothing is told about what is ignored
                await anyio.sleep(0.05)
    assert first.peers == ()


@pytest.mark.anyio
async def test_the_end_is_quick() -> None:
    a, b = fresh(), fresh()
    at_a = Heard()
    with anyio.fail_after(20):
        async with discovering(a, at_a), discovering(b, Heard()):
            await at_a.until(found(b))
            closing = anyio.current_time()
    assert anyio.current_time() - closing < 2 * discovery_module.CLOSE_TIMEOUT_S


def test_multicast_is_tried_without_sending() -> None:
    assert try_multicast(LOOPBACK.ip) == ""
    assert try_multicast(IPv4Address("203.0.113.77")) != ""


def test_two_processes_on_one_pc_find_each_other_on_loopback() -> None:
    script = Path(__file__).with_name("discovery_node.py")
    root = Path(__file__).parents[2]
    nodes = [fresh(), fresh()]
    processes = [
        subprocess.Popen(
            [sys.executable, script, node, str(7430 + n), "1", "127.0.0.1/8"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            text=True,
        )
        for n, node in enumerate(nodes)
    ]
    try:
        for process, other in zip(processes, reversed(nodes), strict=True):
            assert process.stdout is not None
            heard = (json.loads(line) for line in process.stdout)
            assert any(event.get("found") == other for event in heard)
    finally:
        for process in processes:
            process.communicate("", timeout=20)
