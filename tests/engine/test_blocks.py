"""The block pool against a model of it: memory in which every position remembers all that it was computed from."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swarm.engine.blocks import BlockPool, BlockTable
from swarm.protocol.errors import CapacityError, SessionError
from swarm.protocol.ids import SessionId
from swarm.protocol.messages import RowKind

A, B, C = (SessionId(f"00000000-{i}-00000000") for i in range(3))
names = st.sampled_from([SessionId(f"00000000-{i}-00000000") for i in range(4)])
rows = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
"""Few ids, so that prompts are often equal."""
kinds = st.sampled_from(RowKind)

Cell = tuple[tuple[int, RowKind], ...]
"""A position's content: every id up to it, and how each was computed."""


class Pool(RuleBasedStateMachine):
    """Sessions as plain lists; what their tables point to must be just that, whoever else uses the same blocks."""

    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 4))
    def make(self, blocks: int, size: int) -> None:
        self.pool = BlockPool(blocks, size)
        self.sessions: dict[SessionId, list[tuple[int, RowKind]]] = {}
        self.memory: dict[tuple[int, int], Cell] = {}

    @rule(session=names, start=st.integers(0, 20), tokens=rows, kind=kinds)
    def extend(self, session: SessionId, start: int, tokens: tuple[int, ...], kind: RowKind) -> None:
        held = self.sessions.get(session, [])
        free = self.pool.free_blocks
        if start > len(held):
            with pytest.raises(SessionError, match="gap"):
                self.pool.extend(session, start, tokens, kind)
            assert self.pool.free_blocks == free
            return
        need = self.pool.check(session, start, len(tokens))
        if need > free:
            with pytest.raises(CapacityError, match=f"{free * self.pool.size} of"):
                self.pool.extend(session, start, tokens, kind)
            assert self.pool.free_blocks == free
            return
        table = self.pool.extend(session, start, tokens, kind)
        assert free - self.pool.free_blocks <= need
        self.sessions[session] = [*held[:start], *((token, kind) for token in tokens)]
        self.forward(table, start, self.sessions[session])
        self.pool.publish(table)

    def forward(self, table: BlockTable, start: int, content: list[tuple[int, RowKind]]) -> None:
        """What the engine does with the table."""
        size = self.pool.size
        self.copy_block(table)
        for position in range(start, len(content)):
            self.memory[table.blocks[position // size], position % size] = tuple(content[: position + 1])

    def copy_block(self, table: BlockTable) -> None:
        if table.copy is not None:
            for offset in range(self.pool.size):
                self.memory[table.copy[1], offset] = self.memory.get((table.copy[0], offset), ())

    @rule(session=names, tokens=rows, kind=kinds)
    def append(self, session: SessionId, tokens: tuple[int, ...], kind: RowKind) -> None:
        self.extend(session, len(self.sessions.get(session, [])), tokens, kind)

    @rule(session=names, back=st.integers(1, 6), tokens=rows, kind=kinds)
    def rewind(self, session: SessionId, back: int, tokens: tuple[int, ...], kind: RowKind) -> None:
        self.extend(session, max(0, len(self.sessions.get(session, [])) - back), tokens, kind)

    @rule(session=names, tokens=rows, more=rows)
    def begin(self, session: SessionId, tokens: tuple[int, ...], more: tuple[int, ...]) -> None:
        """A prompt: what is held of it is adopted, the rest is prefilled."""
        prompt = tokens + more
        if session in self.sessions:
            assert self.pool.adopt(session, prompt).tokens == []
            return
        free = self.pool.free_blocks
        table = self.pool.adopt(session, prompt)
        self.copy_block(table)
        held = len(table.tokens)
        assert held == 0 or held >= self.pool.size
        assert free - self.pool.free_blocks <= -(-held // self.pool.size)
        if held:
            self.sessions[session] = [(token, RowKind.PREFILL) for token in prompt[:held]]

    @rule(spans=st.dictionaries(names, st.integers(1, 9)))
    def reserve(self, spans: dict[SessionId, int]) -> None:
        """What `reserve` allows together can be extended together; it changes nothing itself."""
        ends = {s: len(self.sessions.get(s, [])) for s in spans}
        free = self.pool.free_blocks
        plan = [(s, ends[s], count) for s, count in spans.items()]
        fits = sum(self.pool.check(*span) for span in plan) <= free
        if not fits:
            with pytest.raises(CapacityError):
                self.pool.reserve(plan)
            assert self.pool.free_blocks == free
        else:
            self.pool.reserve(plan)
            assert self.pool.free_blocks == free
            for session, start, count in plan:
                self.extend(session, start, (0,) * count, RowKind.DECODE)

    @rule(session=names)
    def close(self, session: SessionId) -> None:
        self.pool.close(session)
        self.sessions.pop(session, None)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.sessions.clear()
        assert self.pool.free_blocks == self.pool.blocks
        assert self.pool.adopt(A, (0,) * 40).tokens == []

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.validate_state()
        assert self.pool.sessions == len(self.sessions)
        size = self.pool.size
        for session, content in self.sessions.items():
            table = self.pool._tables[session]
            assert table.tokens == [token for token, _ in content]
            for position in range(len(content)):
                cell = self.memory[table.blocks[position // size], position % size]
                assert cell == tuple(content[: position + 1])


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, derandomize=True, deadline=None)


def adopted(pool: BlockPool, session: SessionId, tokens: tuple[int, ...]) -> int:
    return len(pool.adopt(session, tokens).tokens)


def prefill(pool: BlockPool, session: SessionId, tokens: tuple[int, ...]) -> BlockTable:
    held = adopted(pool, session, tokens)
    table = pool.extend(session, held, tokens[held:], RowKind.PREFILL)
    pool.publish(table)
    return table


def test_equal_prompts_share_their_whole_blocks() -> None:
    pool = BlockPool(8, 2)
    first = prefill(pool, A, (1, 2, 3, 4, 5))
    assert adopted(pool, B, (1, 2, 3, 4, 9)) == 4
    second = pool.extend(B, 4, (9,), RowKind.PREFILL)
    assert second.blocks[:2] == first.blocks[:2]
    assert pool.free_blocks == 8 - 4
    assert adopted(pool, C, (1, 2, 9, 4)) == 2


def test_prompts_that_part_inside_a_block_share_its_first_positions() -> None:
    pool = BlockPool(8, 4)
    first = prefill(pool, A, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    second = pool.adopt(B, (1, 2, 3, 4, 5, 6, 0, 0))
    assert second.tokens == [1, 2, 3, 4, 5, 6]
    assert second.blocks[0] == first.blocks[0]
    assert second.copy == (first.blocks[1], second.blocks[1])
    assert pool.extend(B, 6, (0, 0), RowKind.PREFILL).copy is None, "the block is its own by now"
    assert adopted(pool, C, (1, 2, 0)) == 0, "less than a block is not worth the asking"


def test_a_block_that_a_prompt_fills_in_part_is_shared() -> None:
    pool = BlockPool(8, 4)
    first = prefill(pool, A, (1, 2, 3, 4, 5, 6))
    pool.publish(pool.extend(A, 6, (7,), RowKind.DECODE))
    second = pool.adopt(B, (1, 2, 3, 4, 5, 6, 7))
    assert second.tokens == [1, 2, 3, 4, 5, 6], "what was decoded is not"
    pool.publish(pool.extend(A, 5, (9, 9), RowKind.PREFILL))
    assert adopted(pool, C, (1, 2, 3, 4, 5, 6)) == 5, "it has changed"
    assert first.blocks[1] != second.blocks[1]


def test_of_several_blocks_the_longest_part_is_taken() -> None:
    pool = BlockPool(8, 4)
    prefill(pool, A, (1, 2, 3, 4, 5, 0, 0, 0))
    other = pool.extend(B, 0, (1, 2, 3, 4, 5, 6, 7), RowKind.PREFILL)
    pool.publish(other)
    third = pool.adopt(C, (1, 2, 3, 4, 5, 6, 7, 8))
    assert third.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert third.copy == (other.blocks[1], third.blocks[1])


def test_without_a_free_block_only_whole_ones_are_shared() -> None:
    pool = BlockPool(2, 2)
    prefill(pool, A, (1, 2, 3))
    assert adopted(pool, B, (1, 2, 3)) == 2
    pool.close(B)
    pool.close(A)
    assert adopted(pool, B, (1, 2, 3)) == 2, "the block to copy is the only one to be taken"
    assert pool.free_blocks == 1


def test_blocks_stay_for_the_next_session_until_their_room_is_needed() -> None:
    pool = BlockPool(4, 2)
    prefill(pool, A, (1, 2, 3, 4))
    pool.close(A)
    assert pool.free_blocks == 4
    assert adopted(pool, B, (1, 2, 3, 4, 5)) == 4
    pool.close(B)
    prefill(pool, C, (9, 9, 9, 9, 9, 9))  # takes three: two that were never used, and the end of the chain
    assert adopted(pool, B, (1, 2, 3, 4)) == 2


def test_decoded_positions_are_not_shared() -> None:
    """They differ from prefilled ones in the last bits."""
    pool = BlockPool(8, 2)
    prefill(pool, A, (1, 2))
    pool.publish(pool.extend(A, 2, (3, 4), RowKind.DECODE))
    pool.publish(pool.extend(A, 4, (5, 6), RowKind.PREFILL))
    assert adopted(pool, B, (1, 2, 3, 4, 5, 6)) == 2


def test_a_rewind_into_a_shared_block_copies_it() -> None:
    pool = BlockPool(8, 4)
    first = prefill(pool, A, (1, 2, 3, 4))
    assert adopted(pool, B, (1, 2, 3, 4)) == 4
    second = pool.extend(B, 3, (9,), RowKind.PREFILL)
    assert second.copy == (first.blocks[0], second.blocks[0])
    assert first.blocks != second.blocks
    pool.publish(second)
    assert adopted(pool, C, (1, 2, 3, 4)) == 4, "the first one's block is as it was"


def test_a_rewind_into_a_block_of_ones_own_withdraws_it() -> None:
    pool = BlockPool(8, 4)
    prefill(pool, A, (1, 2, 3, 4))
    assert pool.extend(A, 3, (9,), RowKind.DECODE).copy is None
    assert adopted(pool, B, (1, 2, 3, 4)) == 0


def test_a_rewind_keeps_the_blocks_before_it() -> None:
    """What those blocks hold is still in the cache."""
    pool = BlockPool(8, 2)
    before = list(pool.extend(A, 0, (1, 2, 3, 4, 5, 6), RowKind.PREFILL).blocks)
    after = pool.extend(A, 3, (9,), RowKind.DECODE).blocks
    assert after == before[:2]


def test_the_scratch_block_is_nobodys() -> None:
    pool = BlockPool(5, 2)
    table = pool.extend(A, 0, tuple(range(10)), RowKind.PREFILL)
    assert sorted(table.blocks) == [1, 2, 3, 4, 5]
    assert BlockPool.SCRATCH not in table.blocks


@pytest.mark.parametrize(("blocks", "size"), [(0, 32), (1, 0), (-1, 32)])
def test_no_pool_without_room(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool of"):
        BlockPool(blocks, size)
