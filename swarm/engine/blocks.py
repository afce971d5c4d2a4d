"""The block pool: which blocks of the KV cache belong to which session, and which are shared. Pure bookkeeping.

Equal prompts begin with equal blocks. A block whose positions were all prefilled, and all before it, is published under
a hash chain over the ids up to its end; a session that begins with the same ids adopts it instead of computing it. Only
prefilled positions are shared: decoded ones differ from them in the last bits. A published block that nobody holds any
more stays until its room is needed (automatic prefix caching in vLLM's terms; Kwon et al. 2023, section 4.4).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from swarm.protocol.errors import CapacityError, SessionError
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind


@dataclass(slots=True)
class BlockTable:
    """One session's cache: `blocks[i]` holds positions ``[i·size, (i+1)·size)``; `tokens` are the ids that were run."""

    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prefilled: int = 0
    """Positions from the first on that were all prefilled."""
    chain: list[bytes] = field(default_factory=list)
    """Hashes of the first blocks, as far as they are known; each covers all ids up to its block's end."""
    copy: tuple[int, int] | None = None
    """(from, to): the block that the last `extend` split off a shared one; to be copied before the forward."""


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
        self._users = [0] * (blocks + 1)
        self._published: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._unused: dict[int, None] = {}
        """Published blocks that no table holds, those to be given up first at the front."""

    @property
    def free_blocks(self) -> int:
        """Those that can be taken, published ones without a user among them."""
        return len(self._free) + len(self._unused)

    @property
    def sessions(self) -> int:
        return len(self._tables)

    def check(self, session: SessionId, start: int, rows: int) -> int:
        """Free blocks that ``[start, start + rows)`` takes.

        Raises `SessionError` where the cache ends before `start`.
        """
        table = self._tables.get(session) or BlockTable()
        if start > len(table.tokens):
            raise SessionError(
                "a gap in the session's cache", expected=f"start at most {len(table.tokens)}", found=str(start)
            )
        keep = self._blocks(start)
        own = sum(self._users[block] == 1 for block in table.blocks[keep:])
        split = self._is_split(table, start)
        return max(0, self._blocks(start + rows) - keep + split - own)

    def reserve(self, spans: Iterable[tuple[SessionId, int, int]]) -> None:
        """Check that the spans (session, start, rows), one for each session, fit together; changes nothing.

        Raises `SessionError` for a gap, `CapacityError` where the pool has too few free blocks.
        """
        need = sum(self.check(*span) for span in spans)
        if need > self.free_blocks:
            raise CapacityError(
                "the KV cache is full",
                expected=f"{need * self.size} free positions",
                found=f"{self.free_blocks * self.size} of {self.blocks * self.size}, {len(self._tables)} sessions",
                action="Wait for another answer to end, or add a PC.",
            )

    def extend(self, session: SessionId, start: int, tokens: Sequence[int], kind: RowKind) -> BlockTable:
        """Bring the session to exactly `start` positions and make room for `tokens` behind them.

        Raises `SessionError` for a gap, `CapacityError` where the pool is full; then nothing has changed.
        """
        self.reserve([(session, start, len(tokens))])
        table = self._tables.setdefault(session, BlockTable())
        split = self._is_split(table, start)
        self._shorten(table, self._blocks(start))
        table.copy = None
        if split:
            shared = table.blocks.pop()
            table.blocks.append(self._take())
            table.copy = (shared, table.blocks[-1])
            self._release(shared)
        elif start % self.size:
            self._withdraw(table.blocks[-1])
        table.blocks += [self._take() for _ in range(self._blocks(start + len(tokens)) - len(table.blocks))]
        del table.tokens[start:]
        table.tokens += tokens
        if start <= table.prefilled:
            table.prefilled = start + (len(tokens) if kind is RowKind.PREFILL else 0)
            del table.chain[start // self.size :]
        return table

    def publish(self, table: BlockTable) -> None:
        """The forward behind `extend` is done: what it filled with prefilled positions can be shared from now on."""
        for index in range(len(table.chain), table.prefilled // self.size):
            name = self._name(table.chain[-1] if index else b"", table.tokens, index)
            table.chain.append(name)
            if name not in self._published:
                self._published[name] = table.blocks[index]
                self._names[table.blocks[index]] = name

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> int:
        """Begin `session` with the published blocks that hold the first of `tokens`; returns how many positions.

        0 where there are none, or where the session holds something already.
        """
        if session in self._tables:
            return 0
        table = BlockTable()
        for index in range(len(tokens) // self.size):
            name = self._name(table.chain[-1] if index else b"", tokens, index)
            block = self._published.get(name)
            if block is None:
                break
            table.chain.append(name)
            table.blocks.append(block)
        for block in table.blocks:
            self._users[block] += 1
            self._unused.pop(block, None)
        table.prefilled = len(table.blocks) * self.size
        table.tokens += tokens[: table.prefilled]
        if table.blocks:
            self._tables[session] = table
        return table.prefilled

    def close(self, session: SessionId) -> None:
        table = self._tables.pop(session, None)
        if table is not None:
            self._shorten(table, 0)

    def reset(self) -> None:
        """Close all sessions and forget what is published."""
        for session in list(self._tables):
            self.close(session)
        for block in list(self._names):
            self._withdraw(block)
        self._free += self._unused
        self._unused.clear()

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.size)

    def _is_split(self, table: BlockTable, start: int) -> bool:
        """Whether rows at `start` go into a block that other sessions read too."""
        return start % self.size != 0 and self._users[table.blocks[start // self.size]] > 1

    def _shorten(self, table: BlockTable, blocks: int) -> None:
        while len(table.blocks) > blocks:  # from the end: a chain without its last block is still of use
            self._release(table.blocks.pop())

    def _take(self) -> int:
        if not self._free:
            oldest = next(iter(self._unused))
            del self._unused[oldest]
            self._withdraw(oldest)
            self._free.append(oldest)
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._names:
                self._unused[block] = None
            else:
                self._free.append(block)

    def _withdraw(self, block: int) -> None:
        """What `block` holds is about to change."""
        name = self._names.pop(block, None)
        if name is not None:
            del self._published[name]

    def _name(self, before: bytes, tokens: Sequence[int], index: int) -> bytes:
        ids = array("q", tokens[index * self.size : (index + 1) * self.size])
        return blake2b(before + ids.tobytes(), digest_size=16).digest()

    def validate_state(self) -> None:
        """Assert the invariants: every block is free, unused or held by as many tables as it says."""
        held = [block for table in self._tables.values() for block in table.blocks]
        assert sorted({*held} | {*self._free} | {*self._unused}) == list(range(1, self.blocks + 1))
        assert len({*held}) + len(self._free) + len(self._unused) == self.blocks
        assert all(self._users[block] == held.count(block) for block in range(1, self.blocks + 1))
        assert self._names == {block: name for name, block in self._published.items()}
        assert {*self._unused} <= {*self._names}
        assert {*self._free}.isdisjoint(self._names)
        for table in self._tables.values():
            assert len(table.blocks) == self._blocks(len(table.tokens))
            assert len(table.chain) * self.size <= table.prefilled <= len(table.tokens)
