from __future__ import annotations

from swarm.coordinator.idle import IdleLimits, IdlePool
from swarm.coordinator.session import Counters, Session, SessionLimits
from swarm.protocol.ids import SessionId
from tests.coordinator.fake_stages import NODE, PLAIN, make_plan


def kept(name: int, ids: range | list[int]) -> Session:
    session = Session(
        SessionId(f"aaaaaaaa-{name:x}-00000000"), NODE, make_plan(1, 1), SessionLimits(), Counters(), PLAIN
    )
    session.log.append_prompt(ids)
    session.log.mark_fed(len(session.log))
    return session


def test_the_longest_common_prefix_is_taken_once() -> None:
    pool = IdlePool(IdleLimits())
    short, long = kept(1, range(20)), kept(2, range(30))
    pool.put(short, 0.0)
    pool.put(long, 1.0)
    assert pool.take(range(40)) is long
    assert pool.take(range(40)) is short
    assert pool.take(range(40)) is None


def test_a_small_saving_is_not_enough_unless_it_is_half_the_prompt() -> None:
    pool = IdlePool(IdleLimits())
    pool.put(kept(1, range(10)), 0.0)
    assert pool.take(range(100)) is None
    assert pool.take(range(14)) is not None


def test_nothing_in_common_takes_nothing() -> None:
    pool = IdlePool(IdleLimits())
    pool.put(kept(1, [7, 8, 9]), 0.0)
    assert pool.take([1]) is None
    assert pool.take([1, 2]) is None


def test_a_common_system_prompt_does_not_cost_another_conversation_its_cache() -> None:
    pool = IdlePool(IdleLimits())
    pool.put(kept(1, range(500)), 0.0)
    assert pool.take([*range(30), *range(9000, 9100)]) is None
    assert pool.take([*range(300), *range(9000, 9100)]) is not None


def test_the_oldest_falls_out_and_old_ones_expire() -> None:
    pool = IdlePool(IdleLimits(sessions=2, seconds=10.0))
    one, two, three = kept(1, range(20)), kept(2, range(20)), kept(3, range(20))
    assert pool.put(one, 0.0) == []
    assert pool.put(two, 5.0) == []
    assert pool.put(three, 6.0) == [one]
    assert pool.next_expiry() == 15.0
    assert pool.expire(14.9) == []
    assert pool.expire(15.0) == [two]
    assert pool.clear() == [three]
    assert pool.next_expiry() is None


def test_the_oldest_give_way_until_the_rest_fit() -> None:
    pool = IdlePool(IdleLimits())
    one, two, three = kept(1, range(20)), kept(2, range(30)), kept(3, range(40))
    plan = one.plan
    for session in (one, two, three):
        pool.put(session, 0.0)
    assert pool.shrink(90, plan) == []
    assert pool.shrink(89, plan) == [one]
    assert pool.holds(two.id)
    assert pool.shrink(40, plan) == [two]
    assert pool.shrink(-5, plan) == [three]
    assert not pool.holds(three.id)


def test_only_those_on_the_same_ring_give_way() -> None:
    pool = IdlePool(IdleLimits())
    one, two, three = kept(1, range(20)), kept(2, range(30)), kept(3, range(40))
    rings = make_plan(1, 1, rings=2)
    one.plan, two.plan, three.plan = rings.ring(0), rings.ring(1), rings.ring(0)
    for session in (one, two, three):
        pool.put(session, 0.0)
    assert pool.shrink(40, rings.ring(0)) == [one]
    assert pool.shrink(0, rings.ring(0)) == [three]
    assert pool.holds(two.id)
