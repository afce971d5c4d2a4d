"""The program as people run it: processes of ``node.py`` on PCs of one LAN, with the real default model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.model.manifest import Manifest
from swarm.model.store import Store
from tests.homes import give_model, give_store, whole_store
from tests.netns.lan import lan, needs_netns
from tests.netns.pc import READY_S, ROOT, Pc, Status, ended_at_last

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

QUESTION = "Write a short story about a lighthouse keeper and her cat."
SHORT, LONG = 48, 120
"""Tokens of an answer."""

EQUAL_PC = ROOT / "tests" / "netns" / "equal_pc.py"
LAYERS = 30
LEAVE_S = 30.0
"""Well above the drain time."""

CODE, WRONG_CODE = "K7QM-2RXW-9DFT", "K7QM-2RXW-9DFV"


@pytest.fixture(scope="module")
def store(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the whole default model, for homes that need not convert it again."""
    return whole_store(tmp_path_factory.mktemp("source"), smollm2_gguf)


def model_bytes(store: Path) -> int:
    place = Store(store)
    (found,) = place.manifests()
    return sum(blob.bytes for blob in Manifest.decode(place.read(found.blob)).blobs())


# --- what a ring has to be ------------------------------------------------------------------------------------------


def spread_over(*pcs: Pc) -> Status:
    """Wait until each of `pcs` says that the layers are spread over exactly these, and all say the same."""
    names = {pc.name for pc in pcs}

    def formed(found: Status) -> bool:
        return bool(found["ready"]) and {stage["name"] for stage in found["stages"]} == names

    first, *others = [pc.until(formed, f"ring of {', '.join(sorted(names))}") for pc in pcs]
    for other in others:
        assert (other["epoch"], other["stages"]) == (first["epoch"], first["stages"])
    ends = [stage["end"] for stage in first["stages"]]
    assert [stage["start"] for stage in first["stages"]] == [0, *ends[:-1]]
    assert ends[-1] == LAYERS
    return first


def states(found: Status) -> dict[str, str]:
    """By name; fails where a PC is there twice."""
    assert len({member["name"] for member in found["members"]}) == len(found["members"]), found["members"]
    return {member["name"]: member["state"] for member in found["members"]}


def fetched(found: Status) -> dict[str, int]:
    return {source["name"]: source["bytes"] for source in found["fetched"]}


def all_at_once(pcs: Sequence[Pc], tokens: int) -> list[str]:
    """The answers of all, asked together."""
    asking = [pc.asking(QUESTION, tokens) for pc in pcs]
    return [process.communicate(timeout=READY_S)[0].decode() for process in asking]


# --- scenes ---------------------------------------------------------------------------------------------------------


@needs_netns
def test_form_ask_leave_crash_come_back(tmp_path: Path, smollm2_gguf: Path, store: Path) -> None:
    with lan(3) as net:
        one, two, three = pcs = [
            Pc(space, tmp_path / f"pc-{number}", f"PC-{number}", "--open", script=EQUAL_PC)
            for number, space in enumerate(net.nodes, start=1)
        ]
        with ended_at_last(pcs):
            give_model(one.home, smollm2_gguf)
            one.start()
            spread_over(one)
            short, long = one.ask(QUESTION, SHORT), one.ask(QUESTION, LONG)
            assert long.startswith(short.rstrip("\n"))
            sampled = one.ask(QUESTION, SHORT, "--temperature", "0.9", "--seed", "7")
            assert sampled != short

            two.start()
            ring = spread_over(one, two)
            for pc in (one, two):
                shown = json.loads(pc.command("status", "--json").stdout)
                assert (shown["epoch"], shown["stages"]) == (ring["epoch"], ring["stages"])
                assert shown["node"]["name"] == pc.name
                assert states(shown) == {"PC-1": "alive", "PC-2": "alive"}
            found = fetched(two.until(lambda found: bool(found["fetched"]), "what it fetched"))
            assert set(found) == {"PC-1"}
            assert found["PC-1"] < model_bytes(store)
            assert all_at_once([one, two], SHORT) == [short, short]

            three.start()
            spread_over(one, two, three)
            assert all_at_once(pcs, SHORT) == [short] * 3
            assert [pc.ask(QUESTION, SHORT, "--temperature", "0.9", "--seed", "7") for pc in pcs] == [sampled] * 3

            leaves(two, others=(one, three))
            assert all_at_once([one, three], SHORT) == [short, short]

            two.start()
            identity, incarnation = who(two)
            spread_over(one, two, three)
            dies_in_the_middle(two, asked=one, others=(one, three), expected=long)

            two.start()
            found = spread_over(one, two, three)
            assert who(two) == (identity, incarnation + 1)
            assert states(found) == dict.fromkeys(("PC-1", "PC-2", "PC-3"), "alive")
            assert not found["missing_bytes"]
            assert two.ask(QUESTION, SHORT) == short


def leaves(pc: Pc, others: tuple[Pc, ...]) -> None:
    pc.interrupt()
    assert pc.ended(LEAVE_S) == 0, pc.tail()
    spread_over(*others)
    for other in others:
        other.until(lambda found: states(found)[pc.name] == "left", f"{pc.name} left")


def who(pc: Pc) -> tuple[str, int]:
    """Id and incarnation."""
    found = pc.until(lambda _: True, "an answer")
    return found["node"]["id"], int((pc.home / "identity" / "incarnation").read_text("utf-8"))


def dies_in_the_middle(pc: Pc, asked: Pc, others: tuple[Pc, ...], expected: str) -> None:
    """`pc` is killed while an answer that its layers are needed for is being written."""
    epoch = asked.until(lambda _: True, "an answer")["epoch"]
    answer = asked.asking(QUESTION, LONG)
    assert answer.stdout is not None
    begun = b""
    while len(begun) < 40:  # past the buffer, which `communicate` does not look into
        begun += os.read(answer.stdout.fileno(), 4096)
    pc.kill()
    rest, errors = answer.communicate(timeout=READY_S)
    assert answer.returncode == 0, errors.decode()
    assert len(begun) < len(expected) / 2, "the answer was over before"
    assert (begun + rest).decode() == expected
    assert spread_over(*others)["epoch"] > epoch


@needs_netns
def test_a_pc_takes_layers_with_it(tmp_path: Path, smollm2_gguf: Path, store: Path) -> None:
    with lan(2) as net:
        one, two = pcs = [
            Pc(space, tmp_path / f"pc-{number}", f"PC-{number}", "--open", script=EQUAL_PC)
            for number, space in enumerate(net.nodes, start=1)
        ]
        with ended_at_last(pcs):
            give_store(one.home, store)
            one.start()
            spread_over(one)
            answer = one.ask(QUESTION, SHORT)
            two.start()
            spread_over(one, two)

            one.kill()  # and nobody else has its layers, here or outside
            found = two.until(lambda found: "a piece of the model" in found["reason"], "what is missing")
            assert not found["ready"]
            assert not found["missing_bytes"]  # of memory
            assert states(found)["PC-2"] == "alive"

            one.start()
            spread_over(one, two)
            assert two.ask(QUESTION, SHORT) == answer

            give_model(two.home, smollm2_gguf)
            one.kill()
            spread_over(two)
            assert two.ask(QUESTION, SHORT) == answer


@needs_netns
def test_pairing(tmp_path: Path, store: Path) -> None:
    with lan(3) as net:
        one, two, three = pcs = [
            Pc(space, tmp_path / f"pc-{number}", f"PC-{number}") for number, space in enumerate(net.nodes, start=1)
        ]
        with ended_at_last(pcs):
            give_store(one.home, store)
            one.start("--code", CODE)
            two.start("--code", CODE)
            together(one, two)
            assert two.ask(QUESTION, 4)

            three.start("--code", WRONG_CODE)
            refused(three, "wrong pairing code")
            three.start()
            refused(three, "--code")

            three.start("--open")
            three.until(lambda found: any("pairing code" in notice for notice in found["notices"]), "the reason")
            assert set(states(one.until(lambda _: True, "an answer"))) == {"PC-1", "PC-2"}
            three.kill()

            two.interrupt()
            assert two.ended(LEAVE_S) == 0
            two.start()  # it remembers the code
            together(one, two)


def together(*pcs: Pc) -> None:
    """Wait until all are alive in the eyes of each, and answer; whoever holds the layers."""
    everybody = dict.fromkeys((pc.name for pc in pcs), "alive")
    for pc in pcs:
        pc.until(lambda found: found["ready"] and states(found) == everybody, "swarm of all")


def refused(pc: Pc, why: str) -> None:
    """It ends with one line that says why."""
    assert pc.ended(READY_S) == 2, pc.tail()
    lines = [line for line in pc.log.read_text("utf-8").splitlines() if line.startswith("swarm: ")]
    assert why in lines[-1]
    assert "Traceback" not in pc.log.read_text("utf-8")


@needs_netns
def test_memory(tmp_path: Path, store: Path) -> None:
    with lan(3) as net:
        one, two, three = pcs = [
            Pc(space, tmp_path / f"pc-{number}", f"PC-{number}", "--open", script=EQUAL_PC)
            for number, space in enumerate(net.nodes, start=1)
        ]
        with ended_at_last(pcs):
            give_store(one.home, store)
            one.start("--memory", "95MB")
            alone = lacks(one)
            two.start("--memory", "95MB")
            together = one.until(lambda found: 0 < found["missing_bytes"] < alone, "less that is missing")
            result = two.command("ask", QUESTION)
            assert result.returncode == 1
            assert "cannot hold the model" in result.stderr
            assert not result.stdout

            three.start("--memory", "95MB")
            within_memory(spread_over(*pcs))
            answer = one.ask(QUESTION, SHORT)

            three.interrupt()
            assert three.ended(LEAVE_S) == 0
            assert lacks(one) == together["missing_bytes"]

            two.interrupt()
            assert two.ended(LEAVE_S) == 0
            two.start("--memory", "150MB")
            within_memory(spread_over(one, two))
            assert all_at_once([one, two], SHORT) == [answer, answer]


def lacks(pc: Pc) -> int:
    """The bytes that are missing."""
    found = pc.until(lambda found: found["missing_bytes"] > 0, "what is missing")
    assert not found["ready"]
    assert "lacks" in found["reason"]
    return int(found["missing_bytes"])


def within_memory(ring: Status) -> None:
    offered = {member["id"]: member["memory_bytes"] for member in ring["members"]}
    for stage in ring["stages"]:
        assert 0 < stage["bytes"] <= offered[stage["node"]]
