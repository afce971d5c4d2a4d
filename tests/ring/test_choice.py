"""Which model, who leads, who acquires: from the member records alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.messages import DraftOffer, Member, MemberState
from swarm.protocol.plan import NO_PLAN, Plan, Stage
from swarm.ring.choice import Choice, DraftChoice, choose_draft, choose_model, leader, same_model

A, B = BlobId("a" * 64), BlobId("b" * 64)


def node(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def member(
    number: int,
    model: BlobId | None = None,
    model_name: str = "",
    wanted: str = "",
    state: MemberState = MemberState.ALIVE,
) -> Member:
    return Member(node(number), f"PC-{number}", 1, 1, state, (), 1, "CPU", 1.0, model, model_name, wanted)


def running(model: BlobId) -> Plan:
    return Plan(Epoch(1, node(1)), model, (Stage(node(1), "PC-1", 0, 4, "CPU", 1),))


def test_the_leader_is_the_lowest_that_stands() -> None:
    states = [MemberState.DEAD, MemberState.LEFT, MemberState.LEAVING, MemberState.SUSPECT, MemberState.ALIVE]
    assert leader([member(i, state=state) for i, state in enumerate(states, 1)]) == node(4)
    assert leader([member(1, state=MemberState.LEAVING)]) is None


def test_nobody_has_a_model_the_leader_acquires_the_default() -> None:
    assert choose_model([member(2), member(1)], NO_PLAN) == Choice(None, "", acquirer=node(1), wanted="")


def test_what_was_asked_for_is_acquired_by_who_asked() -> None:
    members = [member(1), member(3, wanted="big.gguf"), member(2, wanted="C:\\models\\small.gguf")]
    assert choose_model(members, NO_PLAN) == Choice(None, "", acquirer=node(2), wanted="C:\\models\\small.gguf")


def test_who_is_acquiring_goes_on() -> None:
    members = [member(1), member(5, model_name="smol")]
    assert choose_model(members, NO_PLAN).acquirer == node(5)


def test_an_acquirer_that_died_is_replaced() -> None:
    members = [member(1), member(5, model_name="smol", state=MemberState.DEAD)]
    assert choose_model(members, NO_PLAN).acquirer == node(1)


def test_where_the_one_that_named_it_fails_another_tries() -> None:
    asking, first, second = member(3, wanted="big"), member(1), member(2)
    assert choose_model([asking, first, second], NO_PLAN).acquirer == node(3)
    asking = replace(asking, failures=1)
    assert choose_model([asking, first, second], NO_PLAN) == Choice(None, "", acquirer=node(1), wanted="big")
    first = replace(first, failures=1)
    assert choose_model([asking, first, second], NO_PLAN).acquirer == node(2)
    second = replace(second, failures=1)  # all have: it is the first one's turn again
    assert choose_model([asking, first, second], NO_PLAN).acquirer == node(3)


def test_the_default_model_too_is_tried_by_another() -> None:
    members = [replace(member(1), failures=2), replace(member(2), failures=1)]
    assert choose_model(members, NO_PLAN) == Choice(None, "", acquirer=node(2), wanted="")


def test_one_that_leaves_does_not_begin() -> None:
    members = [member(1, wanted="big", state=MemberState.LEAVING), member(2)]
    assert choose_model(members, NO_PLAN) == Choice(None, "", acquirer=node(2), wanted="big")


def test_what_somebody_named_who_died_is_still_wanted() -> None:
    died = member(1, wanted="big", model_name="big", state=MemberState.DEAD)
    assert choose_model([died, member(2)], NO_PLAN) == Choice(None, "", acquirer=node(2), wanted="big")
    assert choose_model([died, member(2), member(3, wanted="small")], NO_PLAN).wanted == "small"
    assert choose_model([died, member(2, A, "a")], NO_PLAN).manifest == A
    left = replace(died, state=MemberState.LEFT)
    assert choose_model([left, member(2)], NO_PLAN).wanted == ""


def test_who_is_at_it_gets_what_is_wanted() -> None:
    members = [member(1, wanted="big"), member(2, model_name="big")]
    assert choose_model(members, NO_PLAN) == Choice(None, "", acquirer=node(2), wanted="big")


def test_the_running_model_stays_whatever_is_asked_for() -> None:
    members = [member(1, A, "a", wanted="a"), member(2, B, "b")]
    assert choose_model(members, running(B)).manifest == B


def test_a_running_model_that_nobody_holds_any_more_is_chosen_anew() -> None:
    assert choose_model([member(1, A, "a")], running(B)).manifest == A
    assert choose_model([member(2)], running(B)).acquirer == node(2)


def test_a_model_asked_for_comes_before_one_that_is_there() -> None:
    members = [member(1, A, "a"), member(2, wanted="b"), member(3, B, "b")]
    assert choose_model(members, NO_PLAN) == Choice(B, "b", (node(3),))


def test_of_models_that_are_there_the_lowest_ids_is_taken_and_all_holders_named() -> None:
    members = [member(3, B, "b"), member(2, A, "a"), member(4, A, "a"), member(1)]
    assert choose_model(members, NO_PLAN) == Choice(A, "a", (node(2), node(4)))


def test_a_plan_that_did_not_fit_keeps_its_model_where_nothing_is_asked_for() -> None:
    members = [member(1, A, "a"), member(2, B, "b")]
    assert choose_model(members, Plan(Epoch(1, node(1)), B, missing_bytes=5)).manifest == B


def test_a_leaving_node_still_hands_out() -> None:
    members = [member(1), member(2, A, "a", state=MemberState.LEAVING)]
    assert choose_model(members, NO_PLAN).holders == (node(2),)


def test_nobody_living_is_nobody_to_acquire() -> None:
    assert choose_model([member(1, state=MemberState.DEAD)], NO_PLAN) == Choice(None, "")


@pytest.mark.parametrize(
    ("wanted", "name", "same"),
    [
        ("OpenVINO/Qwen3-4B-int4-ov", "qwen3-4b-int4-ov", True),
        ("C:\\models\\Smol.gguf", "smol", True),
        ("/home/a/smol/", "smol", True),
        ("smol-2.gguf", "smol", False),
        ("org/smol", "smol", True),
        ("org/smol@v1.0", "smol", True),
        ("org/smol@refs/pr/7", "smol", True),
        ("org/models@main/gguf/smol.gguf", "smol", True),
        ("Qwen2.5-0.5B", "Qwen2.5-1.5B", False),
    ],
)
def test_a_model_is_known_by_the_last_part_of_its_name(wanted: str, name: str, same: bool) -> None:
    assert same_model(wanted, name) is same


def drafting(number: int, offer: DraftOffer | None, state: MemberState = MemberState.ALIVE) -> Member:
    return replace(member(number, state=state), draft=offer)


def test_nobody_says_anything_and_the_table_counts() -> None:
    assert choose_draft([member(1), member(2)], "small") == DraftChoice("small")
    assert choose_draft([member(1)], "") == DraftChoice("")


def test_the_lowest_that_wants_the_draft_gets_it_from_outside() -> None:
    members = [member(1), drafting(3, DraftOffer("small")), drafting(2, DraftOffer("small"))]
    assert choose_draft(members, "small") == DraftChoice("small", acquirer=node(2))
    members.append(drafting(1, DraftOffer("small"), MemberState.DEAD))
    assert choose_draft(members, "small").acquirer == node(2)


def test_who_has_it_hands_it_out() -> None:
    members = [drafting(1, DraftOffer("small")), drafting(5, DraftOffer("small", False, A, 70, 10**8))]
    assert choose_draft(members, "small") == DraftChoice("small", A, 70)
    assert choose_draft(members, "other") == DraftChoice("other")
    gone = [members[0], replace(members[1], state=MemberState.LEFT)]
    assert choose_draft(gone, "small") == DraftChoice("small", acquirer=node(1))


def test_a_draft_that_is_named_wins_and_its_node_gets_it() -> None:
    named, table = DraftOffer("mine.gguf", True), DraftOffer("small", False, A, 70)
    members = [drafting(1, DraftOffer("mine.gguf")), drafting(2, named), drafting(3, table)]
    assert choose_draft(members, "small") == DraftChoice("mine.gguf", acquirer=node(2))
    assert choose_draft([*members, drafting(0, DraftOffer("first", True))], "small").source == "first"
