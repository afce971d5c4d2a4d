"""The ring's shell: carries events in and effects out between links, discovery, membership, forming and the stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from ipaddress import IPv4Interface
from random import Random
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from swarm.model.store import Store
from swarm.protocol.errors import HandshakeError, ProtocolError, SwarmError, UsageError
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.limits import DRAIN_TIMEOUT_S
from swarm.protocol.messages import (
    Adopt,
    Adopted,
    CloseSession,
    Commit,
    DraftOffer,
    Drawn,
    LayersTaken,
    Member,
    Members,
    MemberState,
    Message,
    Phase,
    Prepare,
    Prepared,
    PrepareFailed,
    Progress,
    Refused,
    Segment,
    StageReport,
    TakeLayers,
)
from swarm.protocol.plan import NO_PLAN, Plan
from swarm.ring import events as ev
from swarm.ring.blob_client import BlobSource
from swarm.ring.blob_server import BlobServer
from swarm.ring.board import Board, RingView, other_swarm
from swarm.ring.choice import STANDING
from swarm.ring.config import RingConfig, first_record
from swarm.ring.cutover import Cutover
from swarm.ring.delivery import deliver
from swarm.ring.discovery import Announcement, DiscoveredState, Discovery, DiscoveryEvent, Found, Lost, Trouble
from swarm.ring.draft_supply import DraftSupply
from swarm.ring.epoch import read_epoch, write_epoch
from swarm.ring.forming import Forming
from swarm.ring.gathering import Gatherer
from swarm.ring.identity import keep_incarnation
from swarm.ring.interfaces import InterfaceChoice, advertised, choose, chosen_addresses, gather
from swarm.ring.library import Library
from swarm.ring.membership import Membership
from swarm.ring.mesh import Mesh
from swarm.ring.pairing import UNDECIDED_FINGERPRINT, fingerprint
from swarm.ring.port import RingListener, RingLoad
from swarm.ring.reporting import Meter, Reporter
from swarm.ring.stage import StageHost
from swarm.ring.supply import Model
from swarm.ring.transfer import BlobFetcher
from swarm.ring.websocket import LinkServer, dial

TICK_S = 0.25


class RingNode:
    """One node: `port.RingPort`, `mesh.MeshListener`, and what its parts call their owner. `run` owns every task."""

    def __init__(
        self,
        config: RingConfig,
        store: Store,
        on_model: Callable[[Model], None],
        on_draft: Callable[[Model | None], None] = lambda _: None,
    ) -> None:
        """`on_model` is told of the swarm's model once its tokenizer is here, `on_draft` of a draft model for it once
        that is whole here; None: not any more."""
        self._config = config
        self._own = config.credentials
        self._store = store
        self._on_model = on_model
        self.draft_ready = on_draft
        self._mesh = Mesh(self.node, self)
        self._server = LinkServer(self._own, self._mesh.serve)
        self._server.add_routes(BlobServer(store, self.node, self._own.secret).routes())
        self._board = Board()
        self._effects: deque[ev.MembershipEffect | ev.FormingEffect] = deque()
        self._woken = anyio.Event()
        self._drained = anyio.Event()
        self._moved = anyio.Event()
        """Set, and made anew, when a plan comes into force, and when a link comes or goes."""
        self._gone = anyio.Event()
        self._fatal: SwarmError | None = None
        self._found: dict[NodeId, tuple[str, ...]] = {}
        self._listener: RingListener | None = None
        self._plan = NO_PLAN

    # --- the door to the coordinator --------------------------------------------------------------------------------

    @property
    def node(self) -> NodeId:
        return self._own.node

    @property
    def plan(self) -> Plan:
        return self._plan

    def attach(self, listener: RingListener) -> None:
        self._listener = listener

    def loads(self) -> tuple[RingLoad, ...]:
        rings, trip = range(len(self._plan.rings)), self._membership.round_trip_ms
        return tuple(self._board.load(self._plan, ring, self.node, trip) for ring in rings)

    async def send(self, to: NodeId, message: Message) -> None:
        if to == self.node:
            await self._deliver(self.node, message)
        else:
            await self._mesh.send(to, message)

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self, meter: Meter, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Be a node until cancelled or until `leave` has ended.

        `meter` says what this node's coordinator does. Raises `UsageError` where the port cannot be had or the code is
        refused.
        """
        self._reporter = Reporter(self.node, self._board, self._mesh.post_all, meter)
        choices = await anyio.to_thread.run_sync(_choose_interfaces, self._config.interfaces)
        await self._server.start(self._config.port)
        self._membership = Membership(first_record(self._config, advertised(choices, self._server.port)), Random())
        self._forming = Forming(self.node, await anyio.to_thread.run_sync(read_epoch, self._config.home))
        fetcher = BlobFetcher(self._store, self.node, self._own.secret, self.notice)
        self._stage = StageHost(self.node, self._store, fetcher, self.send, self._config.memory_bytes, self.report)
        self._gatherer = Gatherer(self._store, self._stage, self.report, self)
        self._library = library = Library(self._store, self._stage, self._gatherer, self.report, self)
        self._drafts = DraftSupply(self._config, self._store, self._stage, library, self.report, self)
        self._discovery = Discovery(self._announcement(), self._scan, self._discovered)
        try:
            async with fetcher, anyio.create_task_group() as group:
                self._group = group
                told = (self._prepared, self._activated, self._broke)
                self._cutover = Cutover(group, self._stage, library.prepare, *told)
                tasks = (self._discovery.run, self._mesh.run_heartbeats, self._tick, self._run_effects)
                for task in (*tasks, self._drafts.run, self._gatherer.run):
                    group.start_soon(task)
                group.start_soon(library.recall, self._config.wanted)
                for host, port in self._config.peers:
                    self._tell_membership(ev.PeerFound(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
                self._tell_forming(ev.MembershipChanged(self._membership.members))
                task_status.started()
                await self._gone.wait()
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._stage.release()
                await self._server.close()
        if self._fatal is not None:
            raise self._fatal

    async def leave(self) -> None:
        """Announce it, serve until the ring is planned without this node, say goodbye; then `run` returns."""
        self._change(state=MemberState.LEAVING)
        with anyio.move_on_after(DRAIN_TIMEOUT_S):
            while self.plan.stage_of(self.node) is not None and any(m.state in STANDING for m in self._others()):
                await self._moved.wait()
        self._change(state=MemberState.LEFT)
        with anyio.move_on_after(DRAIN_TIMEOUT_S / 4):
            await self._drained.wait()
            await self._mesh.close("it was stopped")
        self._gone.set()

    async def joined(self) -> None:
        """Until another node is linked here: both have proved that they know the same code."""
        while not self._mesh.nodes:
            await self._moved.wait()

    def _others(self) -> list[Member]:
        return [m for m in self._membership.members if m.node != self.node and m.node in self._membership.linked]

    # --- events in --------------------------------------------------------------------------------------------------

    def _tell_membership(self, event: ev.MembershipEvent) -> None:
        self._queue(self._membership.handle(event, time.monotonic()))

    def _tell_forming(self, event: ev.FormingEvent) -> None:
        self._queue(self._forming.handle(event, time.monotonic()))

    async def _tick(self) -> None:
        while True:
            self._tell_membership(ev.Tick())
            self._tell_forming(ev.Tick())
            worker = self._stage.worker
            if worker is not None and worker.broken:
                self._tell_forming(ev.LocalStageBroken(self._plan.epoch, worker.broken))
            self._reporter.stage(self.plan, worker, self._membership.round_trip_ms)
            await anyio.sleep(TICK_S)

    def link_up(self, node: NodeId, name: str, dialled: str) -> None:
        self._tell_membership(ev.LinkUp(node, dialled))
        self._discovery.update(self._announcement())
        self._stir()

    def link_down(self, node: NodeId, reason: str) -> None:
        self._tell_membership(ev.LinkDown(node))
        self._gatherer.gone(node)
        self._stir()

    def heard(self, node: NodeId, round_trip_ms: float | None) -> None:
        self._tell_membership(ev.Heard(node, round_trip_ms))

    async def received(self, node: NodeId, message: Message) -> None:
        try:
            await self._deliver(node, message)
        except ProtocolError as error:
            link = self._mesh.link(node)
            if link is not None:
                await link.close(str(error))

    async def _deliver(self, sender: NodeId, message: Message) -> None:
        match message:
            case Segment() | Drawn() | Refused() | CloseSession() | Adopt() | Adopted():
                await deliver(sender, message, self._stage.worker, self._listener, self.send)
            case Members():
                self._tell_membership(ev.MembersReceived(sender, message.members))
                if message.plan.epoch.number:
                    self._tell_forming(ev.PlanReceived(sender, message.plan))
            case Prepare():
                self._tell_forming(ev.PrepareReceived(sender, message.plan))
            case Prepared():
                self._tell_forming(ev.PreparedReceived(sender, message.epoch))
            case PrepareFailed():
                self._tell_forming(ev.PrepareFailedReceived(sender, message.epoch, message.reason))
            case Commit():
                self._tell_forming(ev.PlanReceived(sender, message.plan))
            case Progress() if message.node == sender:
                self._board.progress[sender] = message
                self._gatherer.heard(sender)
                self._tell_forming(ev.ProgressHeard(sender))
            case StageReport() if message.node == sender:
                self._board.reports[sender] = message
            case TakeLayers() | LayersTaken():
                self._gatherer.received(sender, message)
            case _:
                raise ProtocolError("a message out of place", found=type(message).__name__)

    def _discovered(self, event: DiscoveryEvent) -> None:
        match event:
            case Found(peer) if peer.swarm == self._own.swarm and peer.fingerprint != UNDECIDED_FINGERPRINT:
                if peer.fingerprint != fingerprint(self._own.secret):
                    self._board.notice(other_swarm(peer.swarm, peer.name, peer.fingerprint, bool(self._own.secret)))
                    return
                for address in set(self._found.get(peer.node, ())) - set(peer.addresses):
                    self._tell_membership(ev.PeerLost(address))
                self._found[peer.node] = peer.addresses
                for address in peer.addresses:
                    self._tell_membership(ev.PeerFound(address, peer.node))
            case Lost(node):
                for address in self._found.pop(node, ()):
                    self._tell_membership(ev.PeerLost(address))
            case Trouble(text):
                self._board.notice(text)

    def _scan(self) -> Sequence[IPv4Interface]:
        return chosen_addresses(_choose_interfaces(self._config.interfaces))

    # --- effects out ------------------------------------------------------------------------------------------------

    def _queue(self, effects: Sequence[ev.MembershipEffect | ev.FormingEffect]) -> None:
        if effects:
            self._effects.extend(effects)
            self._drained = anyio.Event()
            self._woken.set()

    async def _run_effects(self) -> None:
        """Carry out effects one by one, in order: a number is on disk before the message that uses it is sent."""
        while True:
            await self._woken.wait()
            self._woken = anyio.Event()
            while self._effects:
                await self._carry_out(self._effects[0])
                self._effects.popleft()
            self._drained.set()

    async def _carry_out(self, effect: ev.MembershipEffect | ev.FormingEffect) -> None:
        match effect:
            case ev.Share(to, members):
                for node in to:
                    self._mesh.post(node, Members(members, self._forming.plan))
            case ev.Send(to, message):
                self._mesh.post(to, message)
            case ev.Broadcast(message):
                self._mesh.post_all(message)
            case ev.Dial(address, node):
                self._group.start_soon(self._dial, address, node)
            case ev.CloseLink(node, reason):
                link = self._mesh.link(node)
                if link is not None:
                    link.abort(reason)
            case ev.MembershipChanged(members):
                self._members_changed(members)
            case ev.KeepIncarnation(number):
                await anyio.to_thread.run_sync(keep_incarnation, self._config.home, number)
            case ev.KeepEpoch(number):
                await anyio.to_thread.run_sync(write_epoch, self._config.home, number)
            case ev.StartPrepare(plan):
                self._cutover.start_prepare(plan)
                self._drafts.stir()
            case ev.CancelPrepare(epoch):
                self._cutover.cancel_prepare(epoch)
            case ev.Activate(plan, loaded):
                self._cutover.activate(plan, loaded)
            case ev.AcquireModel(wanted):
                self._group.start_soon(self._library.acquire, wanted, wanted == self._config.wanted)
            case ev.LearnModel(manifest, _):
                self._group.start_soon(self._library.learn, manifest)
            case ev.Notice(text):
                self._board.notice(text)

    def _members_changed(self, members: tuple[Member, ...]) -> None:
        self._board.keep_only({member.node for member in members})
        worker = self._stage.worker
        for member in members:
            if worker is not None and member.state in (MemberState.DEAD, MemberState.LEFT):
                worker.close_coordinator(member.node)
        self._tell_forming(ev.MembershipChanged(members))
        self._drafts.members_changed(members)

    async def _dial(self, address: str, node: NodeId | None) -> None:
        if address in self._membership.me.addresses:
            # Another PC's loopback, told by its record: here it is our own.
            self._tell_membership(ev.DialFailed(address, node))
            return
        try:
            link = await dial(address, self._own, expected=node)
        except HandshakeError as error:
            if self._config.code_given and not self._mesh.nodes:
                self._fatal = UsageError(error.problem, expected=error.expected, found=error.found, action=error.action)
                self._gone.set()
            self._board.notice(str(error))
            self._tell_membership(ev.DialFailed(address, node, retry=False))
        except SwarmError:
            self._tell_membership(ev.DialFailed(address, node))
        else:
            await self._mesh.serve(link, address)

    # --- this node --------------------------------------------------------------------------------------------------

    def _announcement(self) -> Announcement:
        state = DiscoveredState.MEMBER if self._mesh.nodes else DiscoveredState.FOUNDING
        own = self._own
        return Announcement(own.node, own.name, own.swarm, fingerprint(own.secret), self._server.port, state)

    def _change(self, **fields: Any) -> None:
        """Publish a change of our own record."""
        self._tell_membership(ev.LocalChange(replace(self._membership.me, **fields)))

    def report(self, phase: Phase, label: str, done: int, total: int, rate: float) -> None:
        """Progress of this node's own work."""
        if self._reporter.progress(phase, label, done, total, rate):
            self._tell_forming(ev.ProgressHeard(self.node))

    # --- the model and the stage ------------------------------------------------------------------------------------

    def model_known(self, model: Model) -> None:
        self._change(model=model.id, model_name=model.manifest.name, manifest_bytes=model.bytes, failures=0)
        self._tell_forming(ev.ModelKnown(model.shape))
        self._on_model(model)
        self._drafts.stir()

    def acquiring(self, name: str) -> None:
        self._change(model=None, model_name=name)

    def acquire_failed(self, reason: str) -> None:
        self._change(model_name="", failures=self._membership.me.failures + 1)
        self._tell_forming(ev.AcquireFailed(reason))

    def notice(self, text: str) -> None:
        self._board.notice(text)

    def settled(self) -> bool:
        return bool(self.plan.stages) and self._forming.loaded and self._forming.preparing is None

    def offer_draft(self, offer: DraftOffer | None) -> None:
        self._change(draft=offer)

    def outside(self) -> str:
        return self._board.busy_outside({member.node: member.name for member in self._others()})

    def members(self) -> list[Member]:
        return [self._membership.me, *(member for member in self._others() if member.state in STANDING)]

    def manifest_bytes(self, manifest: BlobId) -> int:
        return next((m.manifest_bytes for m in self._membership.members if m.model == manifest), 0)

    def _prepared(self, epoch: Epoch, failure: str | None) -> None:
        self._tell_forming(ev.LocalPrepared(epoch) if failure is None else ev.LocalPrepareFailed(epoch, failure))

    def _broke(self, epoch: Epoch, reason: str) -> None:
        self._tell_forming(ev.LocalStageBroken(epoch, reason))

    def _activated(self, plan: Plan) -> None:
        """`plan` is in force here: even without a stage in it this node takes prompts, so it needs the tokenizer."""
        self._plan = plan
        if plan.model is not None:
            self._group.start_soon(self._library.learn, plan.model)
        self._stir()
        self._drafts.stir()
        if self._listener is not None:
            self._listener.plan_changed(plan)

    def _stir(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()

    def sources(self) -> list[BlobSource]:
        """Where blobs can be fetched: every linked member, at the address most likely to answer."""
        sources = []
        for member in self._others():
            link = self._mesh.link(member.node)
            if link is not None and member.addresses:
                host = link.peer_address.rpartition(":")[0]
                address = next((a for a in member.addresses if a.rpartition(":")[0] == host), member.addresses[0])
                sources.append(BlobSource(member.node, address))
        return sources

    # --- the picture ------------------------------------------------------------------------------------------------

    def view(self) -> RingView:
        """What this node knows now."""
        members = self._membership.members
        trips = {member.node: self._membership.round_trip_ms(member.node) for member in members}
        plan = self.plan
        chosen = self._library.known(plan.model)
        acquiring = next((m.model_name for m in members if m.model_name), "")
        return RingView(
            members=self._board.views(members, trips),
            plan=plan,
            forming=self._forming.preparing,
            model=chosen.manifest.name if chosen else acquiring,
            model_known=chosen is not None,
            loaded=self._forming.loaded,
            linked=self._membership.linked | {self.node},
            addresses=self._membership.me.addresses,
            notices=tuple(self._board.notices),
            fetched=dict(self._stage.fetched),
            no_draft=self._drafts.note,
        )


def _choose_interfaces(wanted: tuple[str, ...]) -> tuple[InterfaceChoice, ...]:
    return choose(gather(), wanted)
