"""The block pool: which blocks of the KV cache belong to which session. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.protocol.errors import CapacityError, SessionError
from swarm.protocol.ids import SessionId


@dataclass(slots=True)
class BlockTable:
    """One session's cache: `blocks[i]` holds positions ``[i·size, (i+1)·size)``; `tokens` are the ids that were run."""

    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class BlockPool:
    """Blocks ``[1, blocks]`` of `size` positions; block 0 is scratch for rows that pad a batch."""

    SCRATCH = 0

    def __init__(self, blocks: int, size: int) -> None:
        if blocks < 1 or size < 1:
            raise ValueError(f"a pool of {blocks} blocks of {size}")
        self.size = size
        self.blocks = blocks
        self._free = list(range(blocks, 0, -1))
        self._tables: dict[SessionId, BlockTable] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def sessions(self) -> int:
        return len(self._tables)

    def check(self, session: SessionId, start: int, rows: int) -> int:
        """Blocks that ``[start, start + rows)`` needs beyond those the session has.

        Raises `SessionError` where the cache ends before `start`.
        """
        table = self._tables.get(session)
        held = len(table.tokens) if table else 0
        if start > held:
            raise SessionError("a gap in the session's cache", expected=f"start at most {held}", found=str(start))
        have = len(table.blocks) if table else 0
        return max(0, -(-(start + rows) // self.size) - have)

    def reserve(self, spans: Iterable[tuple[SessionId, int, int]]) -> None:
        """Check that the spans (session, start, rows), one for each session, fit together; changes nothing.

        Raises `SessionError` for a gap, `CapacityError` where the pool has too few free blocks.
        """
        need = sum(self.check(*span) for span in spans)
        if need > len(self._free):
            raise CapacityError(
                "the KV cache is full",
                expected=f"{need * self.size} free positions",
                found=f"{len(self._free) * self.size} of {self.blocks * self.size}, {len(self._tables)} sessions",
                action="Wait for another answer to end, or add a PC.",
            )

    def extend(self, session: SessionId, start: int, tokens: tuple[int, ...]) -> BlockTable:
        """Bring the session to exactly `start` positions and make room for `tokens` behind them.

        Raises `SessionError` for a gap, `CapacityError` where the pool is full; then nothing has changed.
        """
        self.reserve([(session, start, len(tokens))])
        table = self._tables.get(session) or BlockTable()
        keep = -(-(start + len(tokens)) // self.size)
        while len(table.blocks) > keep:
            self._free.append(table.blocks.pop())
        table.blocks += [self._free.pop() for _ in range(keep - len(table.blocks))]
        del table.tokens[start:]
        table.tokens += tokens
        self._tables[session] = table
        return table

    def close(self, session: SessionId) -> None:
        table = self._tables.pop(session, None)
        if table is not None:
            self._free += table.blocks

    def reset(self) -> None:
        for session in list(self._tables):
            self.close(session)

    def validate_state(self) -> None:
        """Every block is free or in exactly one table, and every table is as long as its tokens need."""
        held = [block for table in self._tables.values() for block in table.blocks]
        assert sorted(held + self._free) == list(range(1, self.blocks + 1))
        for table in self._tables.values():
            assert len(table.blocks) == -(-len(table.tokens) // self.size)
