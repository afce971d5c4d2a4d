"""Where layers fit: bytes and nothing else. Used by `plan`, which chooses among what fits.

For a fixed row of nodes, giving each in turn as many layers as it may take reaches furthest: whatever was reached
with less can be reached with more. So a row is checked in one pass, and with a bound on work as well as on memory the
same pass answers "is there a split with no stage above this time?".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from swarm.protocol.config import PAGED, STATEFUL
from swarm.protocol.ids import BlobId
from swarm.protocol.limits import MAX_SEGMENT_ROWS

WORKSPACE_FACTOR = 12
"""Activations alive at once in a layer, as multiples of the hidden row: the row and its residual, queries, keys, values
and attention's output (about 4), gate and up projections (about 3.5 each). Buffers are reused from layer to layer."""

DRAFT_KV_TOKENS = 8192
"""KV cache of a draft model, in positions: a long conversation, or some short ones."""

KV_ROOM = {PAGED: 1, STATEFUL: 2}
"""KV cache that an engine allocates for each position promised. A stateful cache that has to grow doubles; its masked
cells are within the promise."""

HEAD_WORK = 0.7
"""Of the time for a byte of a layer, that for one of the head. Layers of 4 bits have to be unpacked, and the head has
mostly 8: that of the 1.5B model takes as long as 5 layers (`bench.costs`) and is as large as 7."""

EXACT_NODES = 8
"""Up to this many nodes every order is looked at (256 sets of nodes); beyond, orders by memory."""

TRIED_ENDS = 6
"""Beyond `EXACT_NODES`, how many of the largest nodes are tried as the first and the last of the row."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What planning needs to know of a model; read from its manifest."""

    manifest: BlobId
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    """The head's own weights, final norm included; 0 or little where it is tied."""
    head_uses_embedding: bool
    """Tied: the last stage holds the embedding again, as its head."""
    kv_bytes_per_token: tuple[int, ...]
    """Per layer."""
    hidden_size: int
    context_tokens: int


UNBOUNDED = float("inf")
"""A bound on work that never binds."""


@dataclass(frozen=True, slots=True)
class Load:
    """A model under one promise of KV, as sums from layer 0 so that a range costs two look-ups."""

    layers: int
    memory: tuple[int, ...]
    """``[layers + 1]``: weights and KV of the layers before."""
    work: tuple[int, ...]
    """``[layers + 1]``: weights streamed for one token by the layers before."""
    workspace: int
    first_bytes: int
    last_bytes: int
    """Held by the last stage beside its layers."""

    @classmethod
    def of(cls, model: ModelShape, kv_tokens: int, engine: str = PAGED) -> Load:
        room = kv_tokens * KV_ROOM[engine]
        per_layer = [w + room * kv for w, kv in zip(model.layer_bytes, model.kv_bytes_per_token, strict=True)]
        return cls(
            layers=len(per_layer),
            memory=tuple(accumulate(per_layer, initial=0)),
            work=tuple(accumulate(model.layer_bytes, initial=0)),
            workspace=MAX_SEGMENT_ROWS * model.hidden_size * 4 * WORKSPACE_FACTOR,
            first_bytes=model.embedding_bytes,
            # Counted again even where one stage is both first and last: the plugin keeps a repacked copy for the head.
            last_bytes=model.head_bytes + (model.embedding_bytes if model.head_uses_embedding else 0),
        )

    @property
    def compute_total(self) -> int:
        return self.compute(0, self.layers, last=True)

    def compute(self, start: int, end: int, last: bool) -> int:
        """Bytes streamed for one token by ``[start, end)``, those of the head by what they cost. The embedding is a
        look-up of one row: nothing."""
        return self.work[end] - self.work[start] + (int(HEAD_WORK * self.last_bytes) if last else 0)

    def stage_memory(self, start: int, end: int) -> int:
        """Bytes a node needs for ``[start, end)``, everything counted."""
        ends = (self.first_bytes if start == 0 else 0) + (self.last_bytes if end == self.layers else 0)
        return self.memory[end] - self.memory[start] + self.workspace + ends

    def fits(self, memory: int, work: float, start: int, end: int) -> bool:
        """Whether a node with this memory, and time to stream `work` bytes a token, can take ``[start, end)``."""
        return self.stage_memory(start, end) <= memory and self.compute(start, end, end == self.layers) <= work

    def reach(self, memory: int, work: float, start: int) -> int:
        """The furthest `end` below the last layer's such that ``[start, end)`` fits; `start` where nothing does."""
        room = memory - self.workspace - (self.first_bytes if start == 0 else 0)
        end = bisect_right(self.memory, self.memory[start] + room) - 1
        if work != UNBOUNDED:
            end = min(end, bisect_right(self.work, self.work[start] + work) - 1)
        return max(start, min(end, self.layers - 1))


def draft_memory(draft: ModelShape) -> int:
    """Bytes that a node needs for a draft model beside its stage."""
    load = Load.of(draft, DRAFT_KV_TOKENS)
    return load.stage_memory(0, load.layers)


def arrange(
    load: Load, memory: Sequence[int], work: Sequence[float] | None = None
) -> list[tuple[int, int, int]] | None:
    """``(index of the node, start, end)`` of a split over a row of nodes in their order; None where there is none.

    Nodes that cannot take a layer in their place are passed over, and so are those behind the last one needed.
    """
    split: list[tuple[int, int, int]] = []
    start = 0
    for index, size in enumerate(memory):
        allowed = UNBOUNDED if work is None else work[index]
        if load.fits(size, allowed, start, load.layers):
            return [*split, (index, start, load.layers)]
        end = load.reach(size, allowed, start)
        if end > start:
            split.append((index, start, end))
            start = end
    return None


def fitting_order(load: Load, memory: Sequence[int]) -> list[int] | None:
    """Indices of nodes in an order whose memory holds the model; None where there is none.

    Exact up to `EXACT_NODES`. Beyond, orders are made of ranks by memory. Both never lose a fit by more memory: every
    rank's memory grows with any node's.
    """
    if len(memory) <= EXACT_NODES:
        return _fitting_set(load, memory)
    ranked = sorted(range(len(memory)), key=lambda i: (-memory[i], i))
    ends = ranked[:TRIED_ENDS]
    for last in ends:
        for first in ends:
            if first == last:
                continue
            order = [first, *(i for i in ranked if i not in (first, last)), last]
            if arrange(load, [memory[i] for i in order]):
                return order
    return None


def _fitting_set(load: Load, memory: Sequence[int]) -> list[int] | None:
    """The furthest layer every set of nodes reaches, in its best order, from smaller sets to larger ones."""
    reached = [0] * (1 << len(memory))
    latest = [-1] * (1 << len(memory))
    for members in range(1 << len(memory)):
        start = reached[members]
        for index, size in enumerate(memory):
            if members >> index & 1:
                continue
            if load.fits(size, UNBOUNDED, start, load.layers):
                return [*_unwind(latest, members), index]
            end = load.reach(size, UNBOUNDED, start)
            larger = members | 1 << index
            if end > reached[larger]:
                reached[larger], latest[larger] = end, index
    return None


def _unwind(latest: Sequence[int], members: int) -> list[int]:
    order: list[int] = []
    while members and latest[members] >= 0:
        order.append(latest[members])
        members &= ~(1 << latest[members])
    return order[::-1]


def shortfall(load: Load, memory: Sequence[int]) -> int:
    """The least memory that, added to the node with the most, lets the nodes hold the model. 0 where they do.

    Without nodes: what one needs to hold it alone.
    """
    ranked = sorted(memory, reverse=True) or [0]
    low, high = -1, max(0, load.stage_memory(0, load.layers) - ranked[0])
    while high - low > 1:
        middle = (low + high) // 2
        if fitting_order(load, [ranked[0] + middle, *ranked[1:]]) is None:
            low = middle
        else:
            high = middle
    return high
