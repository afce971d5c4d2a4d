"""Which swarm a PC belongs to: the decisions as a table, and two PCs that listen on loopback."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from ipaddress import IPv4Interface

import anyio
import pytest

from swarm.cli import founding
from swarm.cli.founding import FOUND_S, LISTEN_S, MAX_TRIES, Look, check_code, find_swarm, look, look_for, obtain_code
from swarm.protocol.errors import UsageError
from swarm.protocol.ids import NodeId
from swarm.protocol.version import PROTOCOL_VERSION
from swarm.ring.discovery import Announcement, DiscoveredPeer, DiscoveredState, Discovery
from swarm.ring.pairing import OPEN_FINGERPRINT, UNDECIDED_FINGERPRINT, derive_secret, fingerprint

A, B, C, D = (NodeId(digit * 32) for digit in "abcd")
CODE, OTHER = "K7QM-2RXW-9DFT", "K7QM-2RXW-9DFV"


def peer(node: NodeId, print_: str, swarm: str = "office") -> DiscoveredPeer:
    state = DiscoveredState.MEMBER
    return DiscoveredPeer(node, f"pc-{node[0]}", swarm, print_, (), PROTOCOL_VERSION, state)


A_WAITS, C_WAITS = peer(A, UNDECIDED_FINGERPRINT), peer(C, UNDECIDED_FINGERPRINT)
C_PAIRED, D_PAIRED, C_OPEN = peer(C, "ours"), peer(D, "theirs"), peer(C, OPEN_FINGERPRINT)
C_ELSEWHERE = peer(C, "ours", swarm="lab")


@pytest.mark.parametrize(
    ("peers", "waited_s", "expected"),
    [
        ([], 0.0, Look()),
        ([], LISTEN_S - 0.1, Look()),
        ([], LISTEN_S, Look(found=True)),
        ([C_PAIRED], 0.0, Look(join=C_PAIRED)),
        ([D_PAIRED, C_PAIRED], 0.0, Look(join=C_PAIRED)),
        ([C_OPEN], 0.0, Look(join=C_OPEN)),
        ([C_ELSEWHERE], LISTEN_S, Look(found=True)),
        ([C_WAITS], LISTEN_S, Look(found=True)),  # it waits for us
        ([A_WAITS], LISTEN_S, Look()),  # we wait for it
        ([A_WAITS], FOUND_S - 0.1, Look()),
        ([A_WAITS], FOUND_S, Look(found=True)),
        ([A_WAITS, D_PAIRED], LISTEN_S, Look(join=D_PAIRED)),
    ],
)
def test_without_a_code(peers: Sequence[DiscoveredPeer], waited_s: float, expected: Look) -> None:
    assert look(B, "office", peers, waited_s) == expected


@pytest.mark.parametrize(
    ("peers", "waited_s", "expected"),
    [
        ([], 0.0, Look()),
        ([], LISTEN_S, Look(found=True)),
        ([C_PAIRED], 0.0, Look(join=C_PAIRED)),
        ([D_PAIRED], LISTEN_S - 0.1, Look()),  # ours may still be heard
        ([D_PAIRED], LISTEN_S, Look(join=D_PAIRED)),  # a wrong code
        ([D_PAIRED, C_PAIRED], LISTEN_S, Look(join=C_PAIRED)),
        ([A_WAITS], LISTEN_S, Look(found=True)),
        ([C_ELSEWHERE], LISTEN_S, Look(found=True)),
        ([C_OPEN], LISTEN_S, Look(join=C_OPEN)),
    ],
)
def test_with_a_code(peers: Sequence[DiscoveredPeer], waited_s: float, expected: Look) -> None:
    assert look_for("ours", "office", peers, waited_s) == expected


# --- asking the person ----------------------------------------------------------------------------------------------


class Person:
    """Types these, one after the other."""

    def __init__(self, *typed: str) -> None:
        self._typed = list(typed)
        self.lines: list[str] = []

    async def __call__(self, line: str) -> str:
        self.lines.append(line)
        return self._typed.pop(0)


def paired(code: str = CODE) -> DiscoveredPeer:
    return peer(C, fingerprint(derive_secret(code, "office")))


def test_the_code_as_people_type_it() -> None:
    person = Person("k7qm 2rxw 9dft")
    assert anyio.run(obtain_code, paired(), "office", person) == CODE
    assert 'shown on "pc-c"' in person.lines[0]


def test_a_wrong_code_is_asked_again() -> None:
    person = Person(OTHER, "what?", CODE)
    assert anyio.run(obtain_code, paired(), "office", person) == CODE
    assert "not the code" in person.lines[1]
    assert "not a pairing code" in person.lines[2]


def test_three_wrong_codes_end_it() -> None:
    person = Person(*[OTHER] * MAX_TRIES)
    with pytest.raises(UsageError, match="wrong pairing code"):
        anyio.run(obtain_code, paired(), "office", person)


def test_an_open_swarm_has_no_code_to_ask_for() -> None:
    person = Person()
    with pytest.raises(UsageError, match="--open"):
        anyio.run(obtain_code, C_OPEN, "office", person)
    assert not person.lines


# --- listening ------------------------------------------------------------------------------------------------------


def loopback() -> Sequence[IPv4Interface]:
    return [IPv4Interface("127.0.0.1/8")]


@pytest.mark.anyio
async def test_a_pc_that_listens_finds_the_swarm_and_checks_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, me, them = f"test-{secrets.token_hex(4)}", NodeId(secrets.token_hex(16)), NodeId(secrets.token_hex(16))
    announced = Announcement(them, "pc-c", swarm, fingerprint(derive_secret(CODE, swarm)), 7420, DiscoveredState.MEMBER)
    monkeypatch.setattr(founding, "LISTEN_S", 20.0)  # a busy machine hears late
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Discovery(announced, loopback, lambda _: None).run)
        with anyio.fail_after(30):
            found = await find_swarm(me, "pc-b", swarm, 7421, loopback)
            assert await check_code(CODE, me, "pc-b", swarm, 7421, loopback)
        assert found is not None
        assert found.node == them
        monkeypatch.setattr(founding, "LISTEN_S", 5.0)
        with anyio.fail_after(30), pytest.raises(UsageError, match="wrong pairing code"):
            await check_code(OTHER, me, "pc-b", swarm, 7421, loopback)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(founding, "LISTEN_S", 0.5)
    swarm, me = f"test-{secrets.token_hex(4)}", NodeId(secrets.token_hex(16))
    with anyio.fail_after(20):
        assert await find_swarm(me, "pc-b", swarm, 7421, loopback) is None
        assert not await check_code(CODE, me, "pc-b", swarm, 7421, loopback)
