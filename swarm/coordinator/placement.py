"""Which ring a session runs on: pure.

A ring of N stages runs N sessions side by side, each at the time per token that the plan predicts. Where more share it,
each gets its part of the ring's rate. Stages that run rows of several sessions in one forward do better than that, on
every ring alike, so the order of the rings stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.protocol.ids import NodeId
from swarm.protocol.plan import Plan
from swarm.ring.port import RingLoad


def choose_ring(plan: Plan, node: NodeId, mine: Sequence[int], loads: Sequence[RingLoad]) -> int:
    """The ring of `plan` that promises one more session of `node` the shortest time per token.

    `mine` and `loads` are by ring: the sessions that run there already, from here and from elsewhere. The plan takes
    the coordinator to sit at the first stage; elsewhere a token travels a round trip more. Of equal rings one that
    begins here is taken, else the first.
    """

    def cost(ring: int) -> tuple[float, bool, int]:
        view = plan.ring(ring)
        token_ms = view.predicted_token_ms or 1.0
        sessions = mine[ring] + loads[ring].sessions + 1
        shared_ms = token_ms * sessions / len(view.stages)
        return max(token_ms + loads[ring].round_trip_ms, shared_ms), view.stages[0].node != node, ring

    return min(range(len(plan.rings)), key=cost)
