"""What every drawn token was drawn from: the logits behind equal histories must be equal, whoever shared the forwards.

A history is all ids before a position and, where the engine's bits depend on it, the kind of each row (`token_log`).
One ledger takes down a whole run: sessions alone and in company, on one stage and on three, first runs and replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate

from bench.engines import Over
from swarm.engine.base import Output
from swarm.engine.kinds import ExactEngine
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind, Segment
from swarm.protocol.tensors import Array

Row = tuple[int, RowKind]


class Ledger:
    """Digests of logits by the digest of their history."""

    def __init__(self, *, kinds: bool) -> None:
        """`kinds`: rows of another kind are another history."""
        self.conflicts: list[str] = []
        """Equal histories, other logits."""
        self._kinds = kinds
        self._logits: dict[bytes, bytes] = {}

    def histories(self, rows: Sequence[Row], before: bytes = b"") -> list[bytes]:
        """A name for what was run up to each of `rows`, that one included; `before` names what came before them."""
        return list(accumulate(rows, self._after, initial=before))[1:]

    def note(self, history: bytes, logits: Array, where: str) -> None:
        digest = _digest(logits.tobytes())
        if self._logits.setdefault(history, digest) != digest:
            self.conflicts.append(where)

    def _after(self, before: bytes, row: Row) -> bytes:
        token, kind = row
        return _digest(before + token.to_bytes(8, "little") + bytes([kind if self._kinds else 0]))


class Recorded(Over[ExactEngine]):
    """The last stage's engine; `ledger` is told of all it draws from. Implements `kinds.ExactEngine`."""

    def __init__(self, engine: ExactEngine, ledger: Ledger, where: str) -> None:
        super().__init__(engine)
        self.drawn_from: set[bytes] = set()
        """Histories behind which something was drawn."""
        self._ledger = ledger
        self._where = where
        self._histories: dict[SessionId, list[bytes]] = {}

    def run(self, batch: Sequence[Segment]) -> list[Output]:
        outputs = super().run(batch)
        rows = iter(self._engine.logits())
        for segment in batch:
            histories = self._histories.setdefault(segment.session, [])
            del histories[segment.start :]
            self._extend(histories, ((token, segment.kind) for token in segment.tokens))
            for history in histories[len(histories) - segment.wanted :]:
                self._ledger.note(history, next(rows), f"{self._where}: {segment.session}, {len(histories)} rows")
                self.drawn_from.add(history)
        return outputs

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> int:
        held = super().adopt(session, tokens)
        if held:
            self._extend(self._histories.setdefault(session, []), ((token, RowKind.PREFILL) for token in tokens[:held]))
        return held

    def _extend(self, histories: list[bytes], rows: Iterable[Row]) -> None:
        histories += self._ledger.histories(tuple(rows), histories[-1] if histories else b"")

    def close_session(self, session: SessionId) -> None:
        super().close_session(session)
        self._histories.pop(session, None)

    def reset(self) -> None:
        super().reset()
        self._histories.clear()

    def logits(self) -> Array:
        return self._engine.logits()

    def validate_state(self) -> None:
        self._engine.validate_state()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
