"""What a node remembers of the others' last words."""

from __future__ import annotations

from dataclasses import replace

from swarm.protocol.ids import NO_EPOCH, Epoch, NodeId
from swarm.protocol.limits import MAX_SESSIONS_PER_STAGE
from swarm.protocol.messages import Member, MemberState, Phase, Progress, StageReport
from swarm.protocol.plan import Plan, Stage
from swarm.ring.board import NOTICES_KEPT, Board

A, B = NodeId("a" * 32), NodeId("b" * 32)


def member(node: NodeId) -> Member:
    return Member(node, f"pc-{node[0]}", 1, 1, MemberState.ALIVE, (), 1000, "CPU", 1.0, None, "", "")


def report(node: NodeId, step_ms: float) -> StageReport:
    return StageReport(node, NO_EPOCH, step_ms, 0.0, 0.0, 2.5, 3, 4, 5000)


def test_a_member_of_which_nothing_was_heard() -> None:
    (view,) = Board().views([member(A)], {})
    assert (view.node, view.name, view.state, view.memory_bytes) == (A, "pc-a", MemberState.ALIVE, 1000)
    assert (view.phase, view.step_ms, view.hop_ms, view.round_trip_ms) == (Phase.IDLE, None, None, None)


def test_the_last_word_of_each() -> None:
    board = Board()
    for done in (1, 2):
        board.progress[A] = Progress(A, Phase.FETCH, "layers", done, 10, 5.0)
    board.reports[B] = report(B, 12.5)
    a, b = board.views([member(A), member(B)], {A: None, B: 0.7})
    assert (a.phase, a.label, a.done, a.total, a.rate) == (Phase.FETCH, "layers", 2, 10, 5.0)
    assert (b.step_ms, b.tokens_per_second, b.sessions, b.waiting, b.resident_bytes) == (12.5, 2.5, 3, 4, 5000)
    assert b.round_trip_ms == 0.7


def test_a_stage_that_has_not_run_yet_has_no_step_time() -> None:
    board = Board(reports={A: report(A, 0.0)})
    assert board.views([member(A)], {})[0].step_ms is None


def test_who_is_gone_is_forgotten() -> None:
    board = Board()
    for node in (A, B):
        board.progress[node] = Progress(node, Phase.FETCH, "", 0, 0, 0.0)
        board.reports[node] = report(node, 1.0)
    board.keep_only({B})
    assert list(board.progress) == list(board.reports) == [B]


def test_notices_are_kept_once_in_a_row_and_not_for_ever() -> None:
    board = Board()
    for text in ("one", "one", "two", "one"):
        board.notice(text)
    assert list(board.notices) == ["one", "two", "one"]
    for number in range(100):
        board.notice(str(number))
    assert len(board.notices) == NOTICES_KEPT
    assert board.notices[-1] == "99"


def test_sessions_on_a_ring_are_those_of_the_others_in_this_epoch() -> None:
    nodes = [NodeId(f"{number:032x}") for number in range(5)]
    told = [(2, 1), (1, 0), (), (-5, 10**9), (7, 7)]
    reports = {n: replace(report(n, 1.0), ring_sessions=counts) for n, counts in zip(nodes, told, strict=True)}
    reports[nodes[4]] = replace(reports[nodes[4]], epoch=Epoch(9, A))
    board = Board(reports=reports)
    assert board.sessions_on(NO_EPOCH, 0, besides=nodes[0]) == 1
    assert board.sessions_on(NO_EPOCH, 0, besides=A) == 3
    assert board.sessions_on(NO_EPOCH, 1, besides=A) == 1 + MAX_SESSIONS_PER_STAGE
    assert board.sessions_on(NO_EPOCH, 2, besides=A) == 0


def test_the_links_of_a_ring_are_those_on_a_tokens_way_round() -> None:
    """Half a round trip to the first stage, what each stage says of its own, half a round trip from the last."""
    a, b, c = (NodeId(letter * 32) for letter in "abc")
    stages = tuple(Stage(node, "", i, i + 1, "CPU", 1) for i, node in enumerate((a, b, c)))
    board = Board(reports={a: replace(report(a, 1.0), hop_ms=3.0), b: replace(report(b, 1.0), hop_ms=5.0)})
    plan, trips = Plan(NO_EPOCH, None, stages), {a: 20.0, c: 2.0}
    assert board.load(plan, 0, b, trips.get).transit_ms == 10.0 + 3.0 + 5.0 + 1.0
    assert board.load(plan, 0, a, trips.get).transit_ms == 0.0 + 3.0 + 5.0 + 1.0
    assert board.load(plan, 0, c, {}.get).transit_ms == 3.0 + 5.0
    board.reports[b] = replace(report(b, 1.0), hop_ms=-1.0)
    assert board.load(plan, 0, c, {}.get).transit_ms == 3.0
