"""An engine in front of another one, for what benchmarks and checks do to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from swarm.engine.base import Engine, Output
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import Segment

E = TypeVar("E", bound=Engine)


class Over(Generic[E]):
    """Does what `engine` does. Implements `base.Engine`."""

    def __init__(self, engine: E) -> None:
        self._engine = engine

    @property
    def hidden_size(self) -> int:
        return self._engine.hidden_size

    @property
    def max_rows(self) -> int:
        return self._engine.max_rows

    @property
    def free_tokens(self) -> int:
        return self._engine.free_tokens

    @property
    def shares(self) -> bool:
        return self._engine.shares

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        return self._engine.run(batch)

    def check(self, segment: Segment) -> None:
        self._engine.check(segment)

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> int:
        return self._engine.adopt(session, tokens)

    def close_session(self, session: SessionId) -> None:
        self._engine.close_session(session)

    def reset(self) -> None:
        self._engine.reset()

    def close(self) -> None:
        self._engine.close()
