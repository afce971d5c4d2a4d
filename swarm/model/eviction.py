"""What goes where a store outgrows its limit. Pure.

In this order, and no more than is needed: blobs that belong to no model; whole models, the longest unused first; of the
models in use the blobs that nobody here works with. What somebody works with stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.protocol.ids import BlobId


@dataclass(frozen=True, slots=True)
class Held:
    """A model in the store."""

    id: BlobId
    used: float
    """When it was used last, seconds since the epoch."""
    blobs: frozenset[BlobId]
    """All of it, the manifest among them."""


@dataclass(frozen=True, slots=True)
class Eviction:
    models: tuple[BlobId, ...] = ()
    blobs: tuple[BlobId, ...] = ()
    freed_bytes: int = 0


def evict(
    held: Sequence[Held],
    sizes: Mapping[BlobId, int],
    models_in_use: Collection[BlobId],
    blobs_in_use: Collection[BlobId],
    needed_bytes: int,
) -> Eviction:
    """What to remove so that `needed_bytes` come free; less than that where it is not possible.

    `sizes` are the blobs that are here and old enough to go.
    """
    left = dict(sizes)
    gone: list[BlobId] = []
    models: list[BlobId] = []

    def freed() -> int:
        return sum(sizes[blob] for blob in gone)

    def drop(blobs: Iterable[BlobId]) -> None:
        for blob in sorted(blobs):
            if blob in left:
                del left[blob]
                gone.append(blob)

    def drop_some(blobs: Iterable[BlobId]) -> None:
        for blob in sorted(blobs):
            if freed() >= needed_bytes:
                return
            drop([blob])

    stays = set(blobs_in_use)
    drop_some(set(left) - stays - {blob for model in held for blob in model.blobs})
    unused = sorted(
        (model for model in held if model.id not in models_in_use), key=lambda model: (model.used, model.id)
    )
    for number, model in enumerate(unused):
        if freed() >= needed_bytes:
            break
        others = [*unused[number + 1 :], *(other for other in held if other.id in models_in_use)]
        models.append(model.id)
        drop(only_of(model, others, stays))
    drop_some({blob for model in held if model.id in models_in_use for blob in model.blobs} - stays)
    return Eviction(tuple(models), tuple(gone), freed())


def only_of(model: Held, others: Iterable[Held], in_use: Collection[BlobId]) -> set[BlobId]:
    """The blobs that go with `model`: those that no other model has and nobody works with."""
    return set(model.blobs) - {blob for other in others for blob in other.blobs} - set(in_use)
