"""Wrong bytes: which of a blob's pieces, and who sent them. Pure, one per blob.

Only the hash of a whole blob is certain. Where it is wrong, one peer after the other is the *reviewer*: it says the
hashes of its pieces, and those that differ from ours are fetched from it, so that the blob is as this peer has it. If
it is right then, the pieces that were replaced convict whoever sent them; if it is wrong, the reviewer is convicted.
Good pieces stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.protocol.ids import NodeId


class Review:
    def __init__(self) -> None:
        self._senders: dict[int, NodeId] = {}
        self._reviewed: set[NodeId] = set()
        self._reviewer: NodeId | None = None
        self._claimed: Sequence[bytes] = ()
        self._replaced: list[tuple[int, NodeId, bytes]] = []
        """Piece, sender, digest."""

    def next(self, able: Iterable[NodeId]) -> NodeId | None:
        """Who is to review; None where all have."""
        return next((node for node in able if node not in self._reviewed), None)

    def begin(self, node: NodeId, claimed: Sequence[bytes], ours: Sequence[bytes]) -> list[int]:
        """`node` says the digests of its pieces: which ones to replace by its own."""
        self._reviewed.add(node)
        self._reviewer, self._claimed = node, claimed
        disputed = [index for index, digest in enumerate(ours) if digest != claimed[index]]
        self._replaced += [(index, self._senders[index], ours[index]) for index in disputed if index in self._senders]
        return disputed

    def expected(self, node: NodeId, index: int) -> bytes | None:
        """The digest of a piece by `node`'s own word, where it is the reviewer."""
        return self._claimed[index] if node == self._reviewer else None

    def landed(self, node: NodeId, index: int) -> None:
        self._senders[index] = node
        if node != self._reviewer:
            self._reviewer = None  # the blob is not as one peer has it

    def wrong(self) -> NodeId | None:
        """The whole is wrong: who is convicted by that."""
        convicted, self._reviewer = self._reviewer, None
        return convicted

    def right(self, digests: Sequence[bytes]) -> set[NodeId]:
        """The whole is right, and these are its pieces: who is convicted by that."""
        return {node for index, node, digest in self._replaced if digests[index] != digest}
