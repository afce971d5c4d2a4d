"""Choosing interfaces, with the reason for each."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.errors import UsageError
from swarm.ring.interfaces import (
    InterfaceFacts,
    advertised,
    choose,
    chosen_addresses,
    gather,
    order_for_dialling,
)


def facts(name: str, *addresses: str, up: bool = True, multicast: bool = True) -> InterfaceFacts:
    return InterfaceFacts(name, up, tuple(IPv4Interface(address) for address in addresses), multicast)


LO = facts("lo", "127.0.0.1/8", multicast=False)
LAN = facts("enp3s0", "192.168.1.20/24")
WIFI = facts("wlan0", "192.168.1.21/24")
DOCKER = facts("docker0", "172.17.0.1/16")
VPN = facts("tun0", "10.8.0.2/24", multicast=False)


def chosen(*all_facts: InterfaceFacts, wanted: tuple[str, ...] = ()) -> list[str]:
    return [choice.facts.name for choice in choose(all_facts, wanted) if choice.chosen]


def reason(name: str, *all_facts: InterfaceFacts, wanted: tuple[str, ...] = ()) -> str:
    return next(choice.reason for choice in choose(all_facts, wanted) if choice.facts.name == name)


@pytest.mark.parametrize(
    "name",
    [
        "docker0",
        "br-3f2a9c",
        "virbr0",
        "vboxnet0",
        "vmnet8",
        "vEthernet (WSL)",
        "vEthernet (WSL (Hyper-V firewall))",
        "vEthernet (Default Switch)",
        "VirtualBox Host-Only Network",
        "VMware Network Adapter VMnet8",
        "tun0",
        "tap1",
        "wg0",
        "utun3",
        "ztabcdef12",
        "tailscale0",
        "Tailscale",
    ],
)
def test_bridges_and_vpns_only_as_a_last_resort(name: str) -> None:
    one = facts(name, "10.1.2.3/24")
    assert chosen(LO, one, LAN) == ["lo", "enp3s0"]
    assert "its name says" in reason(name, LO, one, LAN)
    assert chosen(LO, one) == ["lo", name]
    assert "nothing better is up" in reason(name, LO, one)


@pytest.mark.parametrize("name", ["eth0", "enp0s31f6", "wlp2s0", "veth1a2b", "Ethernet", "WLAN", "Wi-Fi 2", "zebra"])
def test_ordinary_names_are_fine(name: str) -> None:
    assert chosen(LO, facts(name, "10.0.0.1/24"), LAN) == ["lo", name, "enp3s0"]


def test_several_cards_are_all_used() -> None:
    assert chosen(LO, LAN, WIFI, DOCKER) == ["lo", "enp3s0", "wlan0"]


def test_loopback_alone_will_do() -> None:
    assert chosen(LO) == ["lo"]


def test_what_is_down_or_has_no_address_is_never_used() -> None:
    down, bare = facts("eth1", "10.0.0.1/24", up=False), facts("eth2")
    assert chosen(LO, down, bare) == ["lo"]
    assert reason("eth1", LO, down, bare) == "it is down"
    assert reason("eth2", LO, down, bare) == "it has no IPv4 address"


def test_one_without_multicast_waits_behind_the_others() -> None:
    cellular = facts("wwan0", "10.0.0.1/30", multicast=False)
    assert chosen(LO, cellular, LAN) == ["lo", "enp3s0"]
    assert chosen(LO, cellular) == ["lo", "wwan0"]


@pytest.mark.parametrize("wanted", ["tun0", "10.8.0.2"])
def test_a_named_interface_overrides(wanted: str) -> None:
    assert chosen(LO, LAN, DOCKER, VPN, wanted=(wanted,)) == ["lo", "tun0"]
    assert reason("enp3s0", LO, LAN, VPN, wanted=(wanted,)) == "others were named"


def test_a_named_interface_that_does_not_exist() -> None:
    with pytest.raises(UsageError) as caught:
        choose([LO, LAN], ("eth7",))
    assert "lo (127.0.0.1), enp3s0 (192.168.1.20)" in caught.value.expected
    assert "eth7" in caught.value.found


def test_addresses_go_from_likely_to_loopback() -> None:
    public, odd = facts("eth1", "8.8.4.4/24"), facts("eth2", "169.254.7.7/16")
    choices = choose([LO, odd, public, LAN])
    assert advertised(choices, 7420) == (
        "192.168.1.20:7420",
        "8.8.4.4:7420",
        "169.254.7.7:7420",
        "127.0.0.1:7420",
    )
    assert chosen_addresses(choices)[0] == IPv4Interface("192.168.1.20/24")


def test_this_machine_has_loopback() -> None:
    assert any(one.loopback and one.up for one in gather())


# --- what to dial of what a peer gives away -------------------------------------------------------------------------

OWN = (IPv4Interface("192.168.1.20/24"), IPv4Interface("127.0.0.1/8"))


def order(*addresses: str) -> list[str]:
    return [str(one) for one in order_for_dialling([IPv4Address(address) for address in addresses], OWN)]


def test_our_own_network_comes_first() -> None:
    assert order("10.0.0.9", "192.168.1.30") == ["192.168.1.30", "10.0.0.9"]


def test_the_loopback_of_another_pc_is_dropped() -> None:
    assert order("127.0.0.1", "192.168.1.30") == ["192.168.1.30"]


def test_the_loopback_of_this_pc_is_kept_last() -> None:
    assert order("127.0.0.1", "192.168.1.20") == ["192.168.1.20", "127.0.0.1"]
    assert order("127.0.0.1") == ["127.0.0.1"]


NAMES = st.sampled_from(["lo", "eth0", "docker0", "tun0", "br-1", "wlan0", "x"])
ADDRESSES = st.lists(st.ip_addresses(v=4).map(lambda ip: IPv4Interface(f"{ip}/24")), max_size=3).map(tuple)
FACTS = st.builds(InterfaceFacts, NAMES, st.booleans(), ADDRESSES, st.booleans())


@given(st.lists(FACTS, max_size=6))
def test_something_is_chosen_wherever_something_can_be(all_facts: list[InterfaceFacts]) -> None:
    choices = choose(all_facts)
    assert [choice.facts for choice in choices] == all_facts
    usable = [one for one in all_facts if one.up and one.addresses]
    assert any(choice.chosen for choice in choices) == bool(usable)
    assert all(choice.chosen for choice in choices if choice.facts in usable and choice.facts.loopback)
    assert all(choice.facts in usable for choice in choices if choice.chosen)
    assert all(choice.reason for choice in choices)


@given(st.lists(st.ip_addresses(v=4), max_size=8))
def test_dialling_order_invents_nothing(addresses: list[IPv4Address]) -> None:
    ordered = order_for_dialling(addresses, OWN)
    assert set(ordered) <= set(addresses)
    assert len(set(ordered)) == len(ordered)
    assert set(ordered) >= {one for one in addresses if not one.is_loopback}
