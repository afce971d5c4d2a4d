"""A swarm without a network: the real decisions, a virtual clock, links with delay that drop, nodes that crash.

`World` plays the shell of every node: it carries effects out, late and in random order, and checks after every step
what must never be otherwise.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from random import Random

from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.messages import (
    Commit,
    Member,
    Members,
    MemberState,
    Message,
    Prepare,
    Prepared,
    PrepareFailed,
)
from swarm.protocol.plan import Plan, Stage
from swarm.ring import events as ev
from swarm.ring.basis import Basis
from swarm.ring.fit import ModelShape
from swarm.ring.forming import Forming
from swarm.ring.membership import Membership
from swarm.ring.plan import make_plan

MANIFEST = BlobId("c" * 64)
MODEL = "small-model"

MB = 10**6
SHAPE = ModelShape(MANIFEST, (20 * MB,) * 24, 30 * MB, MB, True, (1000,) * 24, 256, 4096)


class Node:
    def __init__(self, world: World, number: int, memory: int, speed: float, wanted: str = "") -> None:
        self.world = world
        self.id = NodeId(f"{number:032x}")
        self.memory, self.speed, self.wanted = memory, speed, wanted
        self.most_memory = memory
        self.address = f"host{number}:7420"
        self.incarnation = 0
        self.last_epoch = 0
        self.has_manifest = False
        self.up = False
        self.leaving = False
        self.links: dict[NodeId, Link] = {}
        self.notices: list[str] = []
        self.acquiring = False
        self.cannot_prepare = False
        self.prepared: Epoch | None = None
        self.running: Epoch | None = None

    def boot(self) -> None:
        self.incarnation += 1
        self.up, self.leaving, self.acquiring = True, False, False
        self.prepared = self.running = None
        self.membership = Membership(self.record(), Random(self.world.random.random()))
        self.forming = Forming(self.id, self.last_epoch)
        life = self.incarnation
        self.tell(ev.MembershipChanged(self.membership.members))
        if self.has_manifest:
            self.tell(ev.ModelKnown(SHAPE))
        self.world.after(self.world.random.random() * self.world.tick_s, self.tick, life)
        self.world.after(self.world.random.random(), self.beat, life)

    def record(self, state: MemberState = MemberState.ALIVE) -> Member:
        manifest = MANIFEST if self.has_manifest else None
        name = MODEL if self.has_manifest or self.acquiring else ""
        return Member(
            self.id,
            f"PC-{int(self.id, 16)}",
            self.incarnation,
            1,
            state,
            (self.address,),
            self.memory,
            "CPU",
            self.speed,
            manifest,
            name,
            self.wanted,
        )

    def changed(self) -> None:
        self.meet(ev.LocalChange(self.record(MemberState.LEAVING if self.leaving else MemberState.ALIVE)))

    def tick(self, life: int) -> None:
        if self.up and self.incarnation == life:
            self.meet(ev.Tick())
            self.tell(ev.Tick())
            self.world.after(self.world.tick_s, self.tick, life)

    def beat(self, life: int) -> None:
        """A ping on every link, answered at once: both ends have heard each other."""
        if not self.up or self.incarnation != life:
            return
        for other, link in list(self.links.items()):
            peer = self.world.nodes[other]
            if peer.up and peer.links.get(self.id) is link and self.world.reaches(self, peer):
                peer.meet(ev.Heard(self.id, self.world.round_trip_ms))
        self.world.after(self.world.beat_s, self.beat, life)
        self.world.rediscover(self)

    # --- machines ---------------------------------------------------------------------------------------------------

    def meet(self, event: ev.MembershipEvent) -> None:
        effects = self.membership.handle(event, self.world.now)
        if self.world.strict:
            self.membership.validate_state()
        for effect in effects:
            match effect:
                case ev.Share(to=to, members=members):
                    message = Members(members, self.forming.plan)
                    for node in to:
                        self.send(node, message)
                case ev.Dial(address=address, node=node):
                    self.world.dial(self, address, node)
                case ev.CloseLink(node=node):
                    self.world.close(self, node)
                case ev.MembershipChanged():
                    self.tell(effect)
                case ev.KeepIncarnation(incarnation=incarnation):
                    self.incarnation = incarnation
                case ev.Notice(text=text):
                    self.notices.append(text)

    def tell(self, event: ev.FormingEvent) -> None:
        effects = self.forming.handle(event, self.world.now)
        if self.world.strict:
            self.forming.validate_state()
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: ev.FormingEffect) -> None:
        match effect:
            case ev.Send(to=to, message=message):
                self.send(to, message)
            case ev.Broadcast(message=message):
                if isinstance(message, Prepare):
                    self.world.proposed(self, message.plan)
                for node in list(self.links):
                    self.send(node, message)
            case ev.KeepEpoch(number=number):
                assert number > self.last_epoch, "an epoch number used twice"
                self.last_epoch = number
            case ev.StartPrepare(plan=plan):
                self.world.after(self.world.prepare_time(), self.finish_prepare, self.incarnation, plan)
            case ev.CancelPrepare(epoch=epoch):
                if self.prepared == epoch:
                    self.prepared = None
            case ev.Activate(plan=plan, loaded=loaded):
                self.activate(plan, loaded)
            case ev.AcquireModel(wanted=wanted):
                self.world.acquired_by.append((self.world.now, self.id, wanted))
                self.acquiring = True
                self.changed()
                self.world.after(self.world.acquire_s, self.finish_acquire, self.incarnation)
            case ev.LearnModel(holders=holders):
                if any(holder in self.links or holder == self.id for holder in holders):
                    self.world.after(0.1, self.learn, self.incarnation)
            case ev.Notice(text=text):
                self.notices.append(text)

    def activate(self, plan: Plan, loaded: bool) -> None:
        self.world.same_epoch_same_plan(plan)
        assert self.running is None or plan.epoch > self.running, "an older epoch came after a newer one"
        self.running = plan.epoch
        if plan.stage_of(self.id):
            assert loaded == (self.prepared == plan.epoch), "loaded is not what was prepared"
            if loaded:
                self.has_manifest = True
                self.changed()
        if self.prepared is not None and self.prepared <= plan.epoch:
            self.prepared = None

    def finish_prepare(self, life: int, plan: Plan) -> None:
        wanted = self.up and self.incarnation == life and self.forming.preparing == plan
        if not wanted:
            return
        if self.cannot_prepare or self.world.random.random() < self.world.prepare_failures:
            self.tell(ev.LocalPrepareFailed(plan.epoch, "the compiler said no"))
        else:
            self.prepared = plan.epoch
            self.tell(ev.LocalPrepared(plan.epoch))

    def finish_acquire(self, life: int) -> None:
        if self.up and self.incarnation == life:
            self.acquiring = False
            self.learn(life)

    def learn(self, life: int) -> None:
        if self.up and self.incarnation == life:
            self.has_manifest = True
            self.tell(ev.ModelKnown(SHAPE))
            self.changed()

    # --- links ------------------------------------------------------------------------------------------------------

    def send(self, to: NodeId, message: Message) -> None:
        link = self.links.get(to)
        if link is not None:
            link.carry(self.id, to, message)

    def receive(self, sender: NodeId, message: Message) -> None:
        match message:
            case Members(members=members, plan=plan):
                self.meet(ev.MembersReceived(sender, members))
                self.tell(ev.PlanReceived(sender, plan))
            case Commit(plan=plan):
                self.tell(ev.PlanReceived(sender, plan))
            case Prepare(plan=plan):
                self.tell(ev.PrepareReceived(sender, plan))
            case Prepared(epoch=epoch):
                self.tell(ev.PreparedReceived(sender, epoch))
            case PrepareFailed(epoch=epoch, reason=reason):
                self.tell(ev.PrepareFailedReceived(sender, epoch, reason))


class Link:
    """In order in each direction, late, and gone with all that is under way when it closes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.arrival: dict[NodeId, float] = {}

    def carry(self, sender: NodeId, to: NodeId, message: Message) -> None:
        when = max(self.world.now + self.world.delay(), self.arrival.get(to, 0.0) + 1e-6)
        self.arrival[to] = when
        self.world.at(when, self.deliver, sender, to, message)

    def deliver(self, sender: NodeId, to: NodeId, message: Message) -> None:
        node, other = self.world.nodes[to], self.world.nodes[sender]
        if node.up and node.links.get(sender) is self and self.world.reaches(node, other):
            node.receive(sender, message)


class World:
    def __init__(self, seed: int, *, strict: bool = True) -> None:
        self.random = Random(seed)
        self.strict = strict
        self.now = 0.0
        self.nodes: dict[NodeId, Node] = {}
        self.sides: dict[NodeId, int] = {}
        """Which side of a partition a node is on."""
        self.acquired_by: list[tuple[float, NodeId, str]] = []
        self.tick_s = 0.25
        self.beat_s = 1.0
        self.acquire_s = 4.0
        self.round_trip_ms = 0.5
        self.prepare_failures = 0.0
        self.slowest_prepare_s = 3.0
        self.plans: dict[Epoch, Plan] = {}
        self.rings: dict[tuple[Epoch, NodeId], tuple[Stage, ...]] = {}
        """What a ring's epoch says to each of its nodes."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    # --- time -------------------------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[..., None], *args: object) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, call, args))

    def after(self, delay: float, call: Callable[..., None], *args: object) -> None:
        self.at(self.now + delay, call, *args)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, call, args = heapq.heappop(self._heap)
            call(*args)
        self.now = end

    def run_until(self, condition: Callable[[], bool], seconds: float, step: float = 0.5) -> bool:
        end = self.now + seconds
        while self.now < end:
            self.run(step)
            if condition():
                return True
        return False

    def delay(self) -> float:
        return 0.0005 + self.random.random() ** 4 * 0.05

    def prepare_time(self) -> float:
        return 0.2 + self.random.random() * self.slowest_prepare_s

    # --- what happens to nodes --------------------------------------------------------------------------------------

    def add(self, number: int, *, memory: int = 2000 * MB, speed: float = 1e10, wanted: str = "") -> Node:
        node = Node(self, number, memory, speed, wanted)
        self.nodes[node.id] = node
        self.start(node)
        return node

    def start(self, node: Node) -> None:
        """Boot; discovery tells it of some and some of it."""
        others = [other for other in self.nodes.values() if other.up and other is not node]
        node.boot()
        for other in self.random.sample(others, min(2, len(others))):
            self.after(self.random.random() * 1.2, self._find, node, other)
            self.after(self.random.random() * 1.2, self._find, other, node)

    def rediscover(self, node: Node) -> None:
        """Announcements are repeated: groups that know nothing of each other meet in the end."""
        others = [other for other in self.nodes.values() if other.up and other is not node]
        if others and self.random.random() < 0.03:
            self._find(node, self.random.choice(others))

    def _find(self, node: Node, other: Node) -> None:
        if not self.reaches(node, other):
            self.after(5.0, self._find, node, other)
        elif node.up and other.up:
            node.meet(ev.PeerFound(other.address, self.random.choice([other.id, None])))

    def crash(self, node: Node, *, silent: bool = False) -> None:
        """A process that dies closes its links; a PC that loses power says nothing."""
        node.up = False
        for other in list(node.links):
            if silent:
                del node.links[other]
            else:
                self.close(node, other)
        node.links.clear()

    def leave(self, node: Node) -> None:
        if node.up and not node.leaving:
            node.leaving = True
            node.changed()
            self.after(0.5, self._left, node, node.incarnation, self.now + 20)

    def _left(self, node: Node, life: int, deadline: float) -> None:
        if not node.up or node.incarnation != life:
            return
        if node.links and node.forming.plan.stage_of(node.id) and self.now < deadline:
            self.after(0.5, self._left, node, life, deadline)
            return
        node.meet(ev.LocalChange(replace(node.record(), state=MemberState.LEFT)))
        self.after(0.2, self._gone, node, life)

    def _gone(self, node: Node, life: int) -> None:
        if node.up and node.incarnation == life:
            self.crash(node)

    def drop_link(self, node: Node) -> None:
        if node.links:
            self.close(node, self.random.choice(sorted(node.links)))

    def partition(self, side: list[Node]) -> None:
        for node in side:
            self.sides[node.id] = 1
        for node in self.nodes.values():
            for other in list(node.links):
                if not self.reaches(node, self.nodes[other]) and self.random.random() < 0.7:
                    self.close(node, other)

    def heal(self) -> None:
        self.sides.clear()

    # --- network ----------------------------------------------------------------------------------------------------

    def reaches(self, one: Node, other: Node) -> bool:
        return self.sides.get(one.id, 0) == self.sides.get(other.id, 0)

    def dial(self, node: Node, address: str, expected: NodeId | None) -> None:
        self.after(self.delay() * 2, self._dialled, node, node.incarnation, address, expected)

    def _dialled(self, node: Node, life: int, address: str, expected: NodeId | None) -> None:
        if not node.up or node.incarnation != life:
            return
        other = next((n for n in self.nodes.values() if n.address == address), None)
        if other is None or not other.up or not self.reaches(node, other):
            node.meet(ev.DialFailed(address, expected))
        elif node.links.get(other.id) is None or other.links.get(node.id) is not node.links[other.id]:
            # Both may have dialled, or one end may not know yet that the old link is gone.
            self.close(node, other.id)
            self.close(other, node.id)
            node.links[other.id] = other.links[node.id] = Link(self)
            node.meet(ev.LinkUp(other.id, address))
            other.meet(ev.LinkUp(node.id))
        else:
            node.meet(ev.DialFailed(address, expected, answered=other.id))

    def close(self, node: Node, other: NodeId) -> None:
        """Both ends see it, the other one a little later unless it cannot hear of it."""
        link = node.links.pop(other, None)
        if link is None:
            return
        if node.up:
            node.meet(ev.LinkDown(other))
        peer = self.nodes[other]
        if self.reaches(node, peer):
            self.after(self.delay(), self._closed, peer, node.id, link)

    def _closed(self, peer: Node, node: NodeId, link: Link) -> None:
        if peer.up and peer.links.get(node) is link:
            del peer.links[node]
            peer.meet(ev.LinkDown(node))

    # --- what must hold ---------------------------------------------------------------------------------------------

    def proposed(self, node: Node, plan: Plan) -> None:
        self.same_epoch_same_plan(plan)
        for stage in plan.stages:
            assert stage.bytes <= self.nodes[stage.node].most_memory, "a stage above its node's memory"

    def same_epoch_same_plan(self, plan: Plan) -> None:
        known = self.plans.setdefault(plan.epoch, plan)
        assert known == plan, f"two plans with epoch {plan.epoch}"
        for ring in map(plan.ring, range(len(plan.rings))):
            for stage in ring.stages:
                before = self.rings.setdefault((ring.epoch, stage.node), ring.stages)
                assert before == ring.stages, f"two rings of {stage.name} with epoch {ring.epoch}"

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.up and not node.leaving]

    def trouble(self) -> str:
        """Why the swarm has not come to rest; empty where every living node has the one right plan."""
        living = self.living
        if not living:
            return ""
        plans = {node.forming.plan.epoch for node in living}
        if len(plans) > 1:
            return f"{len(plans)} plans in force"
        plan = living[0].forming.plan
        if plan.model != MANIFEST:
            return "no model"
        by_id = {node.id: node for node in living}
        for stage in plan.stages:
            node = by_id.get(stage.node)
            if node is None:
                return f"{stage.name} is not there"
            if not node.forming.loaded:
                return f"{stage.name} has not loaded its part"
            if stage.bytes > node.memory:
                return f"{stage.name} is given more than it has"
        for node in living:
            seen = {m.node for m in node.membership.members if m.state is MemberState.ALIVE}
            if seen != set(by_id):
                return f"{node.id[-4:]} sees {len(seen)} of {len(by_id)}"
        if any(node.forming.preparing for node in living):
            return "still preparing"
        return ""

    def runs_what_fits(self) -> bool:
        """At rest: there are stages exactly where the living can hold the model."""
        if not self.living:
            return True
        node = self.living[0]
        offers = Basis.of(node.membership.members, ()).offers
        return bool(make_plan(SHAPE, offers, node.forming.plan.epoch).stages) == bool(node.forming.plan.stages)
