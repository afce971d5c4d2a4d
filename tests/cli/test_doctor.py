"""The doctor: how its lines read, and real checks on this machine."""

from __future__ import annotations

import io
import secrets
import socket
from ipaddress import IPv4Interface
from pathlib import Path

import anyio
import pytest

from swarm.cli.doctor import (
    Check,
    Multicast,
    check_devices,
    check_interfaces,
    check_memory,
    check_multicast,
    check_openvino,
    check_python,
    firewall,
    home_checks,
    line,
    multicast_checks,
    node_that_runs,
    port_checks,
    reached_by,
    run_doctor,
)
from swarm.protocol.config import DEFAULT_PORT, Settings
from swarm.protocol.ids import NodeId
from swarm.ring.discovery import Announcement, DiscoveredPeer, DiscoveredState, Discovery, Found
from swarm.ring.identity import hold_home, load_or_create
from swarm.ring.interfaces import InterfaceFacts, choose
from swarm.ring.machine import Memory
from swarm.ring.pairing import new_code, save_code

GB = 1000**3
LOOPBACK = IPv4Interface("127.0.0.1/8")
ETH0 = IPv4Interface("192.168.1.20/24")


def peer(*addresses: str) -> DiscoveredPeer:
    return DiscoveredPeer(NodeId("ab" * 16), "anna", "office", "00", addresses, 1, DiscoveredState.MEMBER)


# --- lines ----------------------------------------------------------------------------------------------------------


def test_lines() -> None:
    assert line(Check(True, "python", "3.12", "never shown")) == "ok  python     3.12"
    assert line(Check(False, "memory", "0 MB", "Buy some.")) == "!!  memory     0 MB  -> Buy some."


@pytest.mark.parametrize(("version", "ok"), [((3, 9), False), ((3, 10), True), ((3, 13), True), ((3, 14), False)])
def test_python(version: tuple[int, int], ok: bool) -> None:
    assert check_python(version).ok is ok


def test_openvino_and_devices() -> None:
    assert check_openvino("2026.4.1-22982-e213a147257").ok
    assert not check_openvino("2026.40.0").ok
    assert [check.detail for check in check_devices([("CPU", "Some CPU"), ("GPU.0", "Arc")])] == [
        "CPU: Some CPU",
        "GPU.0: Arc",
    ]
    assert not check_devices([])[0].ok


def test_memory() -> None:
    good = check_memory(Memory(16 * GB, 10 * GB), None)
    assert good.ok
    assert good.detail == "16.0 GB, 10.0 GB available, 8.7 GB offered to the swarm"
    assert not check_memory(Memory(2 * GB, GB), None).ok
    asked_too_much = check_memory(Memory(16 * GB, 10 * GB), 12 * GB)
    assert "swap" in line(asked_too_much)


def test_interfaces_say_why() -> None:
    lan = InterfaceFacts("enp3s0", True, (ETH0,))
    bridge = InterfaceFacts("docker0", True, (IPv4Interface("172.17.0.1/16"),))
    lo = InterfaceFacts("lo", True, (LOOPBACK,))
    assert [line(check) for check in check_interfaces(choose([lan, bridge, lo]))] == [
        "ok  interface  enp3s0 (192.168.1.20) chosen: it is up, with a LAN address",
        "ok  interface  docker0 (172.17.0.1) left out: its name says a bridge of containers",
        "ok  interface  lo (127.0.0.1) chosen: nodes on this PC meet here",
    ]
    alone = check_interfaces(choose([lo]))
    assert not alone[-1].ok


def test_multicast_that_is_blocked_names_the_firewall() -> None:
    (check,) = check_multicast([Multicast("eth0", ETH0, False, ())], 7420, "linux")
    assert not check.ok
    assert "not even ourselves" in check.detail
    assert "ufw allow 5353/udp" in check.action
    assert "ufw allow 7420/tcp" in check.action


def test_multicast_that_cannot_be_tried_says_why() -> None:
    (check,) = check_multicast([Multicast("eth0", ETH0, False, (), ("UDP port 5353 is held",))], 7420, "linux")
    assert not check.ok
    assert "5353 is held" in check.detail


def test_multicast_that_works() -> None:
    heard = Multicast("eth0", ETH0, True, (peer("192.168.1.9:7420"),))
    quiet = Multicast("lo", LOOPBACK, False, ())
    checks = check_multicast([heard, quiet], 7420, "linux")
    assert all(check.ok for check in checks)
    assert checks[0].detail == "eth0 (192.168.1.20) heard anna of office at 192.168.1.9:7420"


def test_loopback_alone_that_hears_nothing_is_not_ok() -> None:
    assert not check_multicast([Multicast("lo", LOOPBACK, False, ())], 7420, "linux")[0].ok


def test_a_peer_is_counted_where_it_can_have_been_heard() -> None:
    assert reached_by(peer("192.168.1.9:7420"), ETH0)
    assert not reached_by(peer("192.168.1.9:7420"), LOOPBACK)
    assert reached_by(peer("127.0.0.1:7420"), LOOPBACK)


def test_firewall_commands_of_windows() -> None:
    text = firewall("win32", 7420)
    assert "protocol=UDP localport=5353" in text
    assert "protocol=TCP localport=7420" in text


# --- the home folder ------------------------------------------------------------------------------------------------


def test_an_empty_home_is_fine_and_stays_empty(tmp_path: Path) -> None:
    home = tmp_path / "none"
    assert [check.what for check in home_checks(Settings(home)) if check.ok] == ["store", "identity", "pairing"]
    assert node_that_runs(home) == ""
    assert not home.exists()


def test_a_home_that_was_used(tmp_path: Path) -> None:
    node = load_or_create(tmp_path).node
    save_code(tmp_path, "swarm", new_code())
    checks = {check.what: check for check in home_checks(Settings(tmp_path))}
    assert checks["identity"].detail == f"node {node[:8]}"
    assert "the code is known" in checks["pairing"].detail
    assert "no code here yet" in home_checks(Settings(tmp_path, swarm="other"))[-1].detail
    assert "is open" in home_checks(Settings(tmp_path, open=True))[-1].detail


def test_a_damaged_home_says_what_to_do(tmp_path: Path) -> None:
    load_or_create(tmp_path)
    (tmp_path / "identity" / "key.pem").write_text("rubbish", encoding="utf-8")
    (tmp_path / "secrets.json").write_text("{", encoding="utf-8")
    checks = {check.what: check for check in home_checks(Settings(tmp_path))}
    assert not checks["identity"].ok
    assert not checks["pairing"].ok
    assert all(check.action for check in checks.values() if not check.ok)


# --- the network ----------------------------------------------------------------------------------------------------

LO_ONLY = choose([InterfaceFacts("lo", True, (LOOPBACK,))])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.anyio
async def test_port_is_tried_for_real(tmp_path: Path) -> None:
    port = free_port()
    checks = await port_checks(Settings(tmp_path, port=port), [LOOPBACK])
    assert [line(check) for check in checks] == [
        f"ok  port       {port} is free",
        f"ok  port       127.0.0.1:{port} answers",
    ]


@pytest.mark.anyio
async def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        (check,) = await port_checks(Settings(tmp_path, port=port), [LOOPBACK])
    assert not check.ok
    assert check.detail.startswith(f"{port}: ")
    assert "--port" in check.action


@pytest.mark.anyio
async def test_a_node_that_runs_is_told(tmp_path: Path) -> None:
    with hold_home(tmp_path):
        (check,) = await port_checks(Settings(tmp_path), [LOOPBACK])
    assert check.ok
    assert "a node runs with this home" in check.detail


@pytest.mark.anyio
async def test_multicast_hears_the_nodes_that_are_there() -> None:
    own = Announcement(NodeId(secrets.token_hex(16)), "berta", "office", "00", 7499)
    witness = Announcement(NodeId(secrets.token_hex(16)), "witness", "office", "00", 7498)
    heard = anyio.Event()
    berta = Discovery(own, lambda: [LOOPBACK], lambda _: None)
    other = Discovery(
        witness, lambda: [LOOPBACK], lambda e: heard.set() if isinstance(e, Found) and e.peer.node == own.node else None
    )
    async with anyio.create_task_group() as group:
        group.start_soon(berta.run)
        group.start_soon(other.run)
        with anyio.fail_after(20):
            await heard.wait()
        (check,) = await multicast_checks(LO_ONLY, DEFAULT_PORT)
        group.cancel_scope.cancel()
    assert check.ok
    assert "berta of office at 127.0.0.1:7499" in check.detail


@pytest.mark.anyio
async def test_all_of_it(tmp_path: Path) -> None:
    out = io.StringIO()
    status = await run_doctor(Settings(tmp_path, port=free_port()), out, [Check(True, "self-test", "CPU: exact")])
    lines = out.getvalue().splitlines()
    assert {text[4:].split()[0] for text in lines} >= {
        "python", "openvino", "device", "self-test", "memory", "interface", "multicast", "port", "store", "identity",
        "pairing",
    }  # fmt: skip
    assert status == (1 if any(text.startswith("!!") for text in lines) else 0)
    assert all(text.startswith(("ok  ", "!!  ")) for text in lines)
    assert all(" -> " in text for text in lines if text.startswith("!!"))


@pytest.mark.anyio
async def test_bad_news_gives_status_1(tmp_path: Path) -> None:
    out = io.StringIO()
    settings = Settings(tmp_path, port=free_port(), interfaces=("nosuch0",))
    assert await run_doctor(settings, out, [Check(False, "self-test", "CPU: 0.1 off", "Say so.")]) == 1
    assert "!!  self-test  CPU: 0.1 off  -> Say so." in out.getvalue()
    assert "nosuch0" in out.getvalue()
