"""The block pool against a model of it that has no blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swarm.engine.blocks import BlockPool
from swarm.protocol.errors import CapacityError, SessionError
from swarm.protocol.ids import SessionId

names = st.sampled_from([SessionId(f"00000000-{i}-00000000") for i in range(4)])
rows = st.lists(st.integers(0, 9), min_size=1, max_size=9).map(tuple)


def blocks_for(tokens: int, size: int) -> int:
    return -(-tokens // size)


class Pool(RuleBasedStateMachine):
    """Sessions as plain lists of ids; the pool must hold the same."""

    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 5))
    def make(self, blocks: int, size: int) -> None:
        self.pool = BlockPool(blocks, size)
        self.sessions: dict[SessionId, list[int]] = {}

    def needs(self, session: SessionId, end: int) -> int:
        held = len(self.sessions.get(session, []))
        return max(0, blocks_for(end, self.pool.size) - blocks_for(held, self.pool.size))

    @rule(session=names, start=st.integers(0, 20), tokens=rows)
    def extend(self, session: SessionId, start: int, tokens: tuple[int, ...]) -> None:
        held = self.sessions.get(session, [])
        free = self.pool.free_blocks
        if start > len(held):
            with pytest.raises(SessionError, match="gap"):
                self.pool.extend(session, start, tokens)
        elif self.needs(session, start + len(tokens)) > free:
            with pytest.raises(CapacityError, match=f"{free * self.pool.size} of"):
                self.pool.extend(session, start, tokens)
        else:
            table = self.pool.extend(session, start, tokens)
            self.sessions[session] = [*held[:start], *tokens]
            assert table.tokens == self.sessions[session]
            return
        assert self.pool.free_blocks == free

    @rule(session=names, tokens=rows)
    def append(self, session: SessionId, tokens: tuple[int, ...]) -> None:
        self.extend(session, len(self.sessions.get(session, [])), tokens)

    @rule(session=names, back=st.integers(1, 6), tokens=rows)
    def rewind(self, session: SessionId, back: int, tokens: tuple[int, ...]) -> None:
        self.extend(session, max(0, len(self.sessions.get(session, [])) - back), tokens)

    @rule(spans=st.dictionaries(names, st.integers(1, 9)))
    def reserve(self, spans: dict[SessionId, int]) -> None:
        """What `reserve` allows together can be extended together; it changes nothing itself."""
        ends = {s: len(self.sessions.get(s, [])) for s in spans}
        free = self.pool.free_blocks
        plan = [(s, ends[s], count) for s, count in spans.items()]
        if sum(self.needs(s, ends[s] + count) for s, count in spans.items()) > free:
            with pytest.raises(CapacityError):
                self.pool.reserve(plan)
            assert self.pool.free_blocks == free
        else:
            self.pool.reserve(plan)
            assert self.pool.free_blocks == free
            for session, start, count in plan:
                self.extend(session, start, tuple(range(count)))

    @rule(session=names)
    def close(self, session: SessionId) -> None:
        self.pool.close(session)
        self.sessions.pop(session, None)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.sessions.clear()
        assert self.pool.free_blocks == self.pool.blocks

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.validate_state()
            assert self.pool.sessions == len(self.sessions)
            taken = sum(blocks_for(len(tokens), self.pool.size) for tokens in self.sessions.values())
            assert self.pool.free_blocks == self.pool.blocks - taken


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)


def test_a_rewind_keeps_the_blocks_before_it() -> None:
    """What those blocks hold is still in the cache."""
    pool, session = BlockPool(8, 2), SessionId("00000000-1-00000000")
    before = list(pool.extend(session, 0, (1, 2, 3, 4, 5, 6)).blocks)
    after = pool.extend(session, 3, (9,)).blocks
    assert after == before[:2]


def test_the_scratch_block_is_nobodys() -> None:
    pool = BlockPool(5, 2)
    table = pool.extend(SessionId("00000000-1-00000000"), 0, tuple(range(10)))
    assert sorted(table.blocks) == [1, 2, 3, 4, 5]
    assert BlockPool.SCRATCH not in table.blocks


@pytest.mark.parametrize(("blocks", "size"), [(0, 32), (1, 0), (-1, 32)])
def test_no_pool_without_room(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool of"):
        BlockPool(blocks, size)
