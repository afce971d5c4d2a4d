"""The block pool: which blocks of the KV cache belong to which session, and which are shared. Pure bookkeeping.

Equal prompts begin with equal blocks. A block whose positions were all prefilled, and all before it, is published under
a hash chain over the ids up to its end; a session that begins with the same ids adopts it instead of computing it. Only
prefilled positions are shared: decoded ones differ from them in the last bits. A published block that nobody holds any
more stays until its room is needed (automatic prefix caching in vLLM's terms; Kwon et al. 2023, section 4.4).

Prompts part in the middle of a block, and the last one of a prompt is full in part. So published blocks are also known
by what is before them: behind its whole blocks a session begins with a copy of the one that agrees longest, to the
token (as in the radix tree of SGLang; Zheng et al. 2024, section 3).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from operator import itemgetter

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
    offered: int = 0
    """Positions up to which `publish` has seen to it that they can be shared."""
    copy: tuple[int, int] | None = None
    """(from, to): a block that the last `extend` or `adopt` took to go on in; to be copied before rows are run."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a published block has for sessions that begin."""

    before: bytes
    """Hash of the chain that it follows."""
    tokens: tuple[int, ...]
    """The ids prefilled in it, from its first position on."""


_START = b""
"""Hash of the empty chain."""


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
        self._offers: dict[int, _Offer] = {}
        """By block: the published ones."""
        self._whole: dict[bytes, int] = {}
        """Those that are full, by the hash of the chain that ends with them."""
        self._behind: dict[bytes, dict[int, None]] = {}
        """By the hash of the chain that they follow."""
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
            self._write(table.blocks[-1], start % self.size)
        table.blocks += [self._take() for _ in range(self._blocks(start + len(tokens)) - len(table.blocks))]
        del table.tokens[start:]
        table.tokens += tokens
        table.offered = min(table.offered, start)
        if start <= table.prefilled:
            table.prefilled = start + (len(tokens) if kind is RowKind.PREFILL else 0)
            del table.chain[start // self.size :]
        return table

    def publish(self, table: BlockTable) -> None:
        """The forward behind `extend` is done: what it filled with prefilled positions can be shared from now on."""
        if table.offered >= table.prefilled:
            return
        table.offered = table.prefilled
        for index in range(len(table.chain), self._blocks(table.prefilled)):
            before = table.chain[-1] if index else _START
            tokens = tuple(table.tokens[index * self.size : min((index + 1) * self.size, table.prefilled)])
            if len(tokens) == self.size:
                table.chain.append(_name(before, tokens))
            if self._longest(before, tokens)[1] < len(tokens):
                self._offer(table.blocks[index], _Offer(before, tokens))

    def adopt(self, session: SessionId, tokens: Sequence[int]) -> BlockTable:
        """Begin `session` with what published blocks hold of the first of `tokens`.

        An empty table where that is less than a block, or where the session holds something already.
        """
        table = BlockTable()
        if session in self._tables:
            return table
        for index in range(len(tokens) // self.size):
            before = table.chain[-1] if index else _START
            name = _name(before, tuple(tokens[index * self.size : (index + 1) * self.size]))
            if name not in self._whole:
                break
            table.chain.append(name)
            table.blocks.append(self._whole[name])
        if table.blocks:
            for block in table.blocks:
                self._hold(block)
            held = len(table.blocks) * self.size
            held += self._adopt_part(table, tuple(tokens[held : held + self.size]))
            table.prefilled = table.offered = held
            table.tokens += tokens[:held]
            self._tables[session] = table
        return table

    def _adopt_part(self, table: BlockTable, tokens: tuple[int, ...]) -> int:
        """Go on in a copy of the block that holds the longest part of `tokens`; how many of them."""
        block, agreed = self._longest(table.chain[-1], tokens)
        if not agreed:
            return 0
        self._hold(block)  # it may be the one that would be given up
        if self.free_blocks:
            table.copy = block, self._take()
            table.blocks.append(table.copy[1])
        self._release(block)
        return agreed if table.copy else 0

    def close(self, session: SessionId) -> None:
        table = self._tables.pop(session, None)
        if table is not None:
            self._shorten(table, 0)

    def reset(self) -> None:
        """Close all sessions and forget what is published."""
        for session in list(self._tables):
            self.close(session)
        for block in list(self._offers):
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

    def _hold(self, block: int) -> None:
        self._users[block] += 1
        self._unused.pop(block, None)

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._offers:
                self._unused[block] = None
            else:
                self._free.append(block)

    def _longest(self, before: bytes, tokens: tuple[int, ...]) -> tuple[int, int]:
        """The published block behind that chain which agrees with the most of `tokens`, and how many these are."""
        agreed = ((block, _common(self._offers[block].tokens, tokens)) for block in self._behind.get(before, ()))
        return max(agreed, key=itemgetter(1), default=(self.SCRATCH, 0))

    def _offer(self, block: int, offer: _Offer) -> None:
        self._offers[block] = offer
        self._behind.setdefault(offer.before, {})[block] = None
        if len(offer.tokens) == self.size:
            self._whole[_name(offer.before, offer.tokens)] = block

    def _write(self, block: int, offset: int) -> None:
        """The positions of `block` from `offset` on are about to change."""
        if block in self._offers and offset < len(self._offers[block].tokens):
            self._withdraw(block)

    def _withdraw(self, block: int) -> None:
        """What `block` holds is about to change."""
        offer = self._offers.pop(block, None)
        if offer is None:
            return
        del self._behind[offer.before][block]
        if not self._behind[offer.before]:
            del self._behind[offer.before]
        if len(offer.tokens) == self.size:
            del self._whole[_name(offer.before, offer.tokens)]

    def validate_state(self) -> None:
        """Assert the invariants: every block is free, unused or held by as many tables as it says."""
        held = [block for table in self._tables.values() for block in table.blocks]
        assert sorted({*held} | {*self._free} | {*self._unused}) == list(range(1, self.blocks + 1))
        assert len({*held}) + len(self._free) + len(self._unused) == self.blocks
        assert all(self._users[block] == held.count(block) for block in range(1, self.blocks + 1))
        assert {*self._unused} <= {*self._offers}
        assert {*self._free}.isdisjoint(self._offers)
        whole = {block: offer for block, offer in self._offers.items() if len(offer.tokens) == self.size}
        assert self._whole == {_name(offer.before, offer.tokens): block for block, offer in whole.items()}
        behind = [(before, block) for before, blocks in self._behind.items() for block in blocks]
        assert sorted(behind) == sorted((offer.before, block) for block, offer in self._offers.items())
        assert all(self._behind.values()), "a chain that nothing follows"
        for table in self._tables.values():
            assert len(table.blocks) == self._blocks(len(table.tokens))
            assert len(table.chain) * self.size <= table.prefilled <= len(table.tokens)


def _name(before: bytes, tokens: tuple[int, ...]) -> bytes:
    """Hash of the chain with one more block, which holds `tokens`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def _common(some: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Length of the equal beginning."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False))
    return sum(1 for _ in equal)
