"""Wrong bytes: whoever sent them is found, nobody else is, and good pieces stay."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol.ids import NodeId
from swarm.ring.review import Review

TRUE = [bytes([index]) * 4 for index in range(4)]
LIE = b"lie"
A, B = NodeId("a" * 32), NodeId("b" * 32)

SOME = st.frozensets(st.integers(0, 3))


def with_lies(indices: frozenset[int]) -> list[bytes]:
    return [LIE + digest if index in indices else digest for index, digest in enumerate(TRUE)]


PEERS = st.lists(st.tuples(SOME.map(with_lies), SOME.map(with_lies)), min_size=1, max_size=5)
"""Digests of what a peer sends, and those that it says."""


@given(PEERS, st.data())
@settings(max_examples=300)
def test_liars_are_found_and_honest_peers_are_not(
    peers: list[tuple[list[bytes], list[bytes]]], data: st.DataObject
) -> None:
    nodes = [NodeId(f"{number:032x}") for number in range(len(peers))]
    sent, said = ({node: peer[part] for node, peer in zip(nodes, peers, strict=True)} for part in (0, 1))
    honest = {node for node in nodes if sent[node] == said[node] == TRUE}
    review = Review()
    convicted: set[NodeId] = set()
    ours = list(TRUE)

    def bring(node: NodeId, index: int) -> None:
        ours[index] = sent[node][index]
        review.landed(node, index)

    for index in range(len(ours)):
        bring(data.draw(st.sampled_from(nodes)), index)
    while ours != TRUE:
        culprit = review.wrong()
        convicted |= {culprit} if culprit is not None else set()
        reviewer = review.next(node for node in nodes if node not in convicted)
        if reviewer is None:
            break
        for index in review.begin(reviewer, said[reviewer], tuple(ours)):
            giver: NodeId | None = reviewer
            if reviewer in convicted or review.expected(reviewer, index) not in (None, sent[reviewer][index]):
                convicted.add(reviewer)
                giver = next((node for node in nodes if node not in convicted), None)
            if giver is None:
                return  # nobody to ask any more
            bring(giver, index)
    convicted |= review.right(tuple(ours)) if ours == TRUE else set()
    assert not convicted & honest
    assert ours == TRUE or not honest


def test_a_replaced_piece_convicts_its_sender() -> None:
    review = Review()
    review.landed(A, 0)
    review.landed(B, 1)
    assert review.wrong() is None  # it may be either
    assert review.begin(B, TRUE[:2], (LIE, TRUE[1])) == [0]
    assert review.expected(B, 0) == TRUE[0]
    assert review.expected(A, 0) is None
    review.landed(B, 0)
    assert review.right(TRUE[:2]) == {A}


def test_who_has_all_of_it_wrong_is_convicted() -> None:
    review = Review()
    review.landed(A, 0)
    assert review.begin(A, [LIE], (LIE,)) == []
    assert review.wrong() == A
    assert review.next([A]) is None
    assert review.next([A, B]) == B


def test_a_piece_of_somebody_else_leaves_it_open() -> None:
    review = Review()
    review.landed(A, 0)
    review.begin(B, [TRUE[0]], (LIE,))
    review.landed(A, 0)  # B could not give it after all
    assert review.wrong() is None
