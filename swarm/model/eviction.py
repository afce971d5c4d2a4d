"""What goes where a store outgrows its limit. Pure.

In this order, and no more than is needed: pieces of blobs that nobody fetches; blobs that belong to no model; whole
models, the longest unused first; compiled forms of the models in use; of the models in use the blobs that nobody here
works with, first those that another PC has. What somebody works with stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.protocol.ids import BlobId


@dataclass(frozen=True, slots=True)
class Held:
    """A model in the store."""

    id: BlobId
    used: float
    """When it was used last, seconds since the epoch."""
    blobs: frozenset[BlobId]
    """All of it, the manifest among them."""
    compiled_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """A store, as far as something may go."""

    held: Sequence[Held]
    sizes: Mapping[BlobId, int]
    """Blobs that are here and old enough to go."""
    partials: Mapping[BlobId, int] = field(default_factory=dict)
    """Blobs of which pieces are here, likewise."""
    models_in_use: Collection[BlobId] = ()
    blobs_in_use: Collection[BlobId] = ()
    elsewhere: Collection[BlobId] = ()
    """Blobs that other PCs are known to have."""


@dataclass(frozen=True, slots=True)
class Eviction:
    models: tuple[BlobId, ...] = ()
    """With their compiled forms."""
    blobs: tuple[BlobId, ...] = ()
    partials: tuple[BlobId, ...] = ()
    compiled: tuple[BlobId, ...] = ()
    """Models of which the compiled form alone goes."""
    freed_bytes: int = 0


def evict(contents: Contents, needed_bytes: int) -> Eviction:
    """What to remove so that `needed_bytes` come free; less than that where it is not possible."""
    return _Choice(contents, needed_bytes).made()


class _Choice:
    def __init__(self, contents: Contents, needed_bytes: int) -> None:
        self._contents = contents
        self._needed = needed_bytes
        self._freed = 0
        self._left = dict(contents.sizes)
        self._stays = set(contents.blobs_in_use)

    def made(self) -> Eviction:
        here, used = self._contents, [m for m in self._contents.held if m.id in self._contents.models_in_use]
        unused = sorted((m for m in here.held if m not in used), key=lambda model: (model.used, model.id))
        partials = self._some(here.partials, set(here.partials) - self._stays)
        of_models = {blob for model in here.held for blob in model.blobs}
        blobs = self._some(self._left, set(self._left) - self._stays - of_models)
        models: list[BlobId] = []
        for number, model in enumerate(unused):
            if self._freed < self._needed:
                models.append(model.id)
                self._freed += model.compiled_bytes
                blobs += self._all(only_of(model, [*unused[number + 1 :], *used], self._stays))
        compiled = self._some({m.id: m.compiled_bytes for m in used}, [m.id for m in used if m.compiled_bytes])
        spare = {blob for model in used for blob in model.blobs} - self._stays
        blobs += self._some(self._left, spare & set(here.elsewhere))
        blobs += self._some(self._left, spare - set(here.elsewhere))
        return Eviction(tuple(models), tuple(blobs), tuple(partials), tuple(compiled), self._freed)

    def _some(self, sizes: Mapping[BlobId, int], candidates: Iterable[BlobId]) -> list[BlobId]:
        """As many as are needed."""
        gone = []
        for blob in sorted(candidates):
            if self._freed < self._needed and blob in sizes:
                gone.append(blob)
                self._freed += sizes[blob]
        if sizes is self._left:
            for blob in gone:
                del self._left[blob]
        return gone

    def _all(self, blobs: Iterable[BlobId]) -> list[BlobId]:
        gone = [blob for blob in sorted(blobs) if blob in self._left]
        self._freed += sum(self._left.pop(blob) for blob in gone)
        return gone


def only_of(model: Held, others: Iterable[Held], in_use: Collection[BlobId]) -> set[BlobId]:
    """The blobs that go with `model`: those that no other model has and nobody works with."""
    return set(model.blobs) - {blob for other in others for blob in other.blobs} - set(in_use)
