"""Names for things: nodes, sessions, epochs, blobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

NodeId = NewType("NodeId", str)
"""32 hex digits: the first half of the SHA-256 of the node's certificate, so an id cannot be borrowed."""

SessionId = NewType("SessionId", str)
"""``<first 8 digits of the coordinator's NodeId>-<counter in hex>-<8 random hex digits>``; unique across the swarm."""

BlobId = NewType("BlobId", str)
"""64 hex digits: the SHA-256 of the blob's bytes."""

_NODE_ID = re.compile(r"[0-9a-f]{32}")
_BLOB_ID = re.compile(r"[0-9a-f]{64}")
_SESSION_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{1,12}-[0-9a-f]{8}")


def is_node_id(text: str) -> bool:
    return _NODE_ID.fullmatch(text) is not None


def is_blob_id(text: str) -> bool:
    return _BLOB_ID.fullmatch(text) is not None


def is_session_id(text: str) -> bool:
    return _SESSION_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """The ring's word: which agreed layout a segment belongs to.

    Ordered by number, then by proposer, so two proposers after a partition never mean the same epoch.
    """

    number: int
    proposer: NodeId

    def __str__(self) -> str:
        return f"{self.number}.{self.proposer[:4]}" if self.number else "none"


NO_EPOCH = Epoch(0, NodeId("0" * 32))
