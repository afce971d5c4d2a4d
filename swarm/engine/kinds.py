"""The engines that run real models, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from swarm.engine.base import Engine
from swarm.engine.paged import PagedEngine
from swarm.engine.stateful import StatefulEngine
from swarm.model.shard import Shard
from swarm.protocol.config import PAGED, STATEFUL
from swarm.protocol.tensors import Array


class ExactEngine(Engine, Protocol):
    """An engine whose logits can be compared, and whose books can be checked."""

    def logits(self) -> Array:
        """Of the last batch's wanted rows, ``[rows, vocabulary]`` f32 in batch order; a view until the next one."""

    def validate_state(self) -> None:
        """Assert the invariants; for tests and debugging."""


def make_engine(
    kind: str,
    shard: Shard,
    device: str,
    kv_tokens: int,
    vocabulary: int,
    threads: int | None = None,
    cache: Path | None = None,
) -> ExactEngine:
    """The engine `kind` with `shard`, whose model is used up; blocking, seconds. `cache` is for what was compiled.

    Raises `DeviceError` where the device refuses and `UnsupportedModelError` where the engine cannot run the model.
    """
    engines: dict[str, type[PagedEngine | StatefulEngine]] = {PAGED: PagedEngine, STATEFUL: StatefulEngine}
    return engines[kind](shard, device, kv_tokens, vocabulary, threads, cache)
