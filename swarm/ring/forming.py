"""From members to a ring that serves: propose, prepare, commit; sans-I/O. Every node runs this.

The leader, the lowest id that stands, proposes a plan under a new epoch when the one in force no longer holds or a
clearly better one is there. Every stage prepares while the old plan serves; when all have, the leader commits, and
every node that hears of a committed plan with a higher epoch adopts it, from whomever. That rule alone mends lost
commits, newcomers and healed partitions.

Nothing depends on one message arriving. A leader repeats its `Prepare`, and it counts as withdrawn when it stops; a
stage answers each. A node whose part of the plan in force does not run says so until a newer plan is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swarm.protocol.errors import ProtocolError
from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.limits import PREPARE_TIMEOUT_S
from swarm.protocol.messages import Commit, Member, Prepare, Prepared, PrepareFailed
from swarm.protocol.plan import NO_PLAN, Plan
from swarm.ring.basis import Basis, outdated, worthwhile
from swarm.ring.choice import Choice, choose_model, leader, same_model
from swarm.ring.events import (
    AcquireFailed,
    AcquireModel,
    Activate,
    Broadcast,
    CancelPrepare,
    FormingEffect,
    FormingEvent,
    KeepEpoch,
    LearnModel,
    LocalPrepared,
    LocalPrepareFailed,
    LocalStageBroken,
    MembershipChanged,
    ModelKnown,
    Notice,
    PlanReceived,
    PreparedReceived,
    PrepareFailedReceived,
    PrepareReceived,
    ProgressHeard,
    Send,
    StartPrepare,
    Tick,
)
from swarm.ring.exclusion import Exclusions
from swarm.ring.fit import ModelShape
from swarm.ring.plan import check_plan, keep_rings, make_plan

LOOK_AROUND_S = 3.0
"""A node that starts listens this long before it acts: mDNS answers in 1.2 s, and a node that found its swarm late
would fetch a model and plan a ring for itself alone."""

SETTLE_S = 0.5
"""After a change: several PCs are switched on, or go, together."""

SETTLE_MAX_S = 3.0
"""However many changes follow each other, the first waits no longer than this."""

REPEAT_S = 3.0
"""Between two `Prepare` of one proposal."""

WITHDRAWN_S = 15.0
"""A proposal whose `Prepare` was not repeated for this long is given up, and its memory freed."""

SUPERSEDE_S = 10.0
"""So long after a proposal began, a plan that is merely better still replaces it. Later it waits for the commit: or
PCs that come one by one would keep a large model from ever being ready."""

REPORT_S = 2.0
"""Between two reports that our part of the plan in force does not run."""

ASK_AGAIN_S = 5.0
"""Between two requests for a model's manifest."""

ACQUIRE_AGAIN_S = 10.0
"""After the model could not be acquired; doubled each time."""

ACQUIRE_AGAIN_MAX_S = 300.0

MAX_REASON_CHARS = 200
"""Of a peer's reason, on our screens."""


@dataclass(slots=True)
class _Preparing:
    """A plan we take part in, as stage or as spare."""

    plan: Plan
    ready: bool
    renewed_at: float


@dataclass(slots=True)
class _Proposal:
    """A plan of our own that is being prepared."""

    plan: Plan
    basis: Basis
    first_at: float
    """When the first of the proposals that this one replaces began."""
    repeated_at: float
    waiting: dict[NodeId, float] = field(default_factory=dict)
    """Stages that are not ready, with the time they last showed progress."""


class Forming:
    """One node's part. `handle` is the only way in; effects are carried out by the shell, in order."""

    def __init__(self, me: NodeId, last_epoch: int = 0) -> None:
        """`last_epoch`: the last number of `KeepEpoch`, from disk."""
        self._me = me
        self._seen = last_epoch
        self._members: tuple[Member, ...] = ()
        self._names: dict[NodeId, str] = {}
        self._shapes: dict[BlobId, ModelShape] = {}
        self._plan = NO_PLAN
        self._basis: Basis | None = None
        """What the plan in force was made of; None where another node made it."""
        self._broken = ""
        """Why our part of the plan in force does not run."""
        self._reported_at = float("-inf")
        self._forced = False
        """Some stage of the plan in force does not run: even the same layers need a new epoch."""
        self._preparing: _Preparing | None = None
        self._failed: tuple[Epoch, str] | None = None
        self._proposal: _Proposal | None = None
        self._exclusions = Exclusions()
        self._started_at: float | None = None
        self._unsettled_since: float | None = None
        self._consider_at = float("inf")
        self._acquiring = False
        self._acquire_at = float("-inf")
        self._acquire_failures = 0
        self._told: set[object] = set()
        self._effects: list[FormingEffect] = []

    @property
    def plan(self) -> Plan:
        """The plan in force; `NO_PLAN` before the first."""
        return self._plan

    @property
    def loaded(self) -> bool:
        """Whether our part of the plan in force runs; true where we have none."""
        return not self._broken

    @property
    def preparing(self) -> Plan | None:
        """The plan that is being prepared, for the screen."""
        return self._preparing.plan if self._preparing else None

    @property
    def leader(self) -> NodeId | None:
        return leader(self._members)

    def handle(self, event: FormingEvent, now: float) -> list[FormingEffect]:
        """`now` in seconds of any clock that only goes forward. Raises `ProtocolError` for what no honest peer sends,
        with nothing changed."""
        if self._started_at is None:
            self._started_at = now
            self._consider_at = now + LOOK_AROUND_S
        self._take(event, now)
        if now >= self._consider_at:
            self._consider(now)
        effects, self._effects = self._effects, []
        return effects

    def _take(self, event: FormingEvent, now: float) -> None:
        match event:
            case Tick():
                self._tick(now)
            case MembershipChanged():
                self._membership_changed(event, now)
            case ModelKnown():
                self._shapes[event.shape.manifest] = event.shape
                self._soon(now)
            case AcquireFailed():
                self._acquire_failed(event, now)
            case PrepareReceived():
                self._prepare_received(event, now)
            case PreparedReceived():
                self._stage_ready(event.sender, event.epoch, now)
            case PrepareFailedReceived():
                self._stage_failed(event.sender, event.epoch, event.reason, now)
            case PlanReceived():
                if event.plan.epoch > self._plan.epoch:
                    check_plan(event.plan)
                    self._adopt(event.plan, None, now)
            case ProgressHeard():
                if self._proposal and event.node in self._proposal.waiting:
                    self._proposal.waiting[event.node] = now
            case LocalPrepared():
                self._local_prepared(event, now)
            case LocalPrepareFailed():
                self._local_prepare_failed(event, now)
            case LocalStageBroken():
                if event.epoch == self._plan.epoch and self._plan.stage_of(self._me) and not self._broken:
                    self._broken = event.reason
                    self._report(now)

    # --- when to think again ----------------------------------------------------------------------------------------

    def _soon(self, now: float) -> None:
        """Consider once things have settled."""
        assert self._started_at is not None
        if self._unsettled_since is None:
            self._unsettled_since = now
        settled = min(now + SETTLE_S, self._unsettled_since + SETTLE_MAX_S)
        self._consider_at = max(settled, self._started_at + LOOK_AROUND_S)

    def _at(self, when: float | None) -> None:
        if when is not None:
            self._consider_at = min(self._consider_at, when)

    def _membership_changed(self, event: MembershipChanged, now: float) -> None:
        self._members = event.members
        self._names = {member.node: member.name for member in event.members}
        if any(member.node == self._me and member.model is not None for member in event.members):
            self._acquiring = False
        self._soon(now)

    def _tick(self, now: float) -> None:
        if self._proposal is not None:
            self._drive(self._proposal, now)
        preparing = self._preparing
        # Our own is repeated by ourselves, to others.
        mine = preparing is not None and preparing.plan.epoch.proposer == self._me
        if preparing and not mine and now - preparing.renewed_at >= WITHDRAWN_S:
            self._drop_preparing()
        self._report(now)

    # --- the leader -------------------------------------------------------------------------------------------------

    def _consider(self, now: float) -> None:
        self._unsettled_since, self._consider_at = None, float("inf")
        self._exclusions.keep_only(set(self._names))
        choice = choose_model(self._members, self._plan)
        self._tell_other_model(choice)
        if choice.acquirer == self._me:
            self._acquire(choice, now)
        if self.leader != self._me:
            self._abandon_hopeless(now)
        elif choice.manifest in self._shapes:
            self._plan_anew(self._shapes[choice.manifest], now)
            self._at(self._exclusions.next_end(now))
        elif choice.manifest is not None:
            self._effects.append(LearnModel(choice.manifest, choice.holders))
            self._at(now + ASK_AGAIN_S)

    def _plan_anew(self, shape: ModelShape, now: float) -> None:
        proposal = self._proposal
        current, old = (proposal.plan, proposal.basis) if proposal else (self._plan, self._basis)
        basis = Basis.of(self._members, self._exclusions.active(now))
        must = (self._forced and proposal is None) or outdated(current, old, basis, shape)
        if must and proposal:
            self._strike_the_gone(proposal, now)
            basis = Basis.of(self._members, self._exclusions.active(now))
        elif not must:
            late = proposal is not None and now - proposal.first_at > SUPERSEDE_S
            if late or (old is not None and not basis.differs(old)):
                return
        epoch = Epoch(self._seen + 1, self._me)
        draft = max((m.draft.memory_bytes for m in self._members if m.draft is not None), default=0)
        plan = make_plan(
            shape, basis.offers, epoch, previous=current, remark=self._remark(now), draft_bytes=max(0, draft)
        )
        if not plan.stages and self._would_fit(shape, epoch):
            # Not memory is missing but the PCs that are left out for now.
            plan = replace(plan, missing_bytes=0, note=f"no ring for now, {self._remark(now)}")
        if not self._forced:
            plan = keep_rings(plan, self._plan, self._basis.renewed(basis) if self._basis else ())
        if must or worthwhile(plan, current, basis, shape):
            self._propose(plan, basis, now)
        elif proposal:
            proposal.basis = basis
        else:
            self._basis = basis

    def _would_fit(self, shape: ModelShape, epoch: Epoch) -> bool:
        """Whether the standing members could hold the model if none were left out."""
        return bool(make_plan(shape, Basis.of(self._members, {}).offers, epoch).stages)

    def _remark(self, now: float) -> str:
        left_out = sorted(self._exclusions.active(now).items())
        return ", ".join(f"without {self._names.get(node, node[:8])}: {reason}" for node, reason in left_out[:3])

    def _strike_the_gone(self, proposal: _Proposal, now: float) -> None:
        """Who went away, or came back as a new process, while it was to prepare."""
        there = Basis.of(self._members, ()).incarnations
        for stage in proposal.plan.stages:
            if there.get(stage.node) != proposal.basis.incarnations.get(stage.node):
                self._exclusions.strike(stage.node, proposal.plan.epoch, "went away while preparing", now)

    def _propose(self, plan: Plan, basis: Basis, now: float) -> None:
        self._seen = plan.epoch.number
        self._effects.append(KeepEpoch(plan.epoch.number))
        first_at = self._proposal.first_at if self._proposal else now
        if not plan.stages:
            self._commit(plan, basis, now)
            return
        waiting = {stage.node: now for stage in plan.stages}
        self._proposal = _Proposal(plan, basis, first_at, now, waiting)
        self._effects.append(Broadcast(Prepare(plan)))
        self._prepare(plan, now)

    def _drive(self, proposal: _Proposal, now: float) -> None:
        stuck = [node for node, shown in proposal.waiting.items() if now - shown >= PREPARE_TIMEOUT_S]
        for node in stuck:
            self._exclude(node, f"no progress for {PREPARE_TIMEOUT_S / 60:.0f} minutes", now)
        if now - proposal.repeated_at >= REPEAT_S:
            proposal.repeated_at = now
            self._effects.append(Broadcast(Prepare(proposal.plan)))

    def _stage_ready(self, node: NodeId, epoch: Epoch, now: float) -> None:
        proposal = self._proposal
        if proposal is None or proposal.plan.epoch != epoch:
            return
        proposal.waiting.pop(node, None)
        if not proposal.waiting:
            self._commit(proposal.plan, proposal.basis, now)

    def _stage_failed(self, node: NodeId, epoch: Epoch, reason: str, now: float) -> None:
        reason = reason[:MAX_REASON_CHARS]
        if self._proposal and self._proposal.plan.epoch == epoch:
            if self._proposal.plan.stage_of(node):
                self._exclude(node, reason, now)
        elif epoch == self._plan.epoch and self._plan.stage_of(node) and self.leader == self._me:
            if self._proposal is None:
                self._forced = True
                self._exclusions.strike(node, epoch, reason, now)
                self._at(now)
        else:
            self._tell((node, epoch), f"{self._names.get(node, node[:8])} cannot run its part: {reason}")

    def _exclude(self, node: NodeId, reason: str, now: float) -> None:
        self._exclusions.exclude(node, reason, now)
        self._effects.append(Notice(f"{self._names.get(node, node[:8])} is left out for now: {reason}"))
        self._at(now)

    def _commit(self, plan: Plan, basis: Basis, now: float) -> None:
        self._effects.append(Broadcast(Commit(plan)))
        self._adopt(plan, basis, now)

    def _abandon_hopeless(self, now: float) -> None:
        """We no longer lead. A proposal that can still be committed is; one that lost a node is the new leader's."""
        proposal = self._proposal
        standing = Basis.of(self._members, self._exclusions.active(now))
        if proposal and outdated(proposal.plan, proposal.basis, standing, None):
            self._proposal = None
            self._drop_preparing()

    # --- the model --------------------------------------------------------------------------------------------------

    def _acquire(self, choice: Choice, now: float) -> None:
        if self._acquiring:
            return
        if now < self._acquire_at:
            self._at(self._acquire_at)
            return
        self._acquiring = True
        self._effects.append(AcquireModel(choice.wanted))

    def _acquire_failed(self, event: AcquireFailed, now: float) -> None:
        wait = min(ACQUIRE_AGAIN_MAX_S, ACQUIRE_AGAIN_S * 2 ** min(self._acquire_failures, 10))
        self._acquiring, self._acquire_at = False, now + wait
        self._acquire_failures += 1
        self._effects.append(Notice(f"The model could not be had: {event.reason} Next try in {wait:.0f} s."))
        self._at(self._acquire_at)

    def _tell_other_model(self, choice: Choice) -> None:
        wanted = next((member.wanted for member in self._members if member.node == self._me), "")
        if wanted and choice.manifest is not None and not same_model(wanted, choice.name):
            text = f"This swarm runs {choice.name}, not {wanted}. For another model start its own swarm: --swarm NAME."
            self._tell(choice.manifest, text)

    # --- every stage ------------------------------------------------------------------------------------------------

    def _prepare_received(self, event: PrepareReceived, now: float) -> None:
        plan, sender = event.plan, event.sender
        check_plan(plan)
        if plan.epoch.proposer != sender:
            raise ProtocolError("bad prepare", expected=f"an epoch of {sender[:8]}", found=str(plan.epoch))
        self._seen = max(self._seen, plan.epoch.number)
        if plan.epoch <= self._plan.epoch:
            self._effects.append(Send(sender, Commit(self._plan)))
        elif self._proposal and plan.epoch < self._proposal.plan.epoch:
            self._effects.append(Send(sender, Prepare(self._proposal.plan)))
        elif self._failed and self._failed[0] == plan.epoch:
            self._effects.append(Send(sender, PrepareFailed(*self._failed)))
        elif self._preparing and plan.epoch == self._preparing.plan.epoch:
            self._preparing.renewed_at = now
            if self._preparing.ready and plan.stage_of(self._me):
                self._effects.append(Send(sender, Prepared(plan.epoch)))
        elif not self._preparing or plan.epoch > self._preparing.plan.epoch:
            if self._proposal:
                self._proposal = None
                self._soon(now)
            self._prepare(plan, now)

    def _prepare(self, plan: Plan, now: float) -> None:
        self._drop_preparing()
        mine = plan.stage_of(self._me) is not None
        self._preparing = _Preparing(plan, ready=not mine, renewed_at=now)
        if mine:
            self._effects.append(StartPrepare(plan))

    def _drop_preparing(self) -> None:
        if self._preparing and self._preparing.plan.stage_of(self._me):
            self._effects.append(CancelPrepare(self._preparing.plan.epoch))
        self._preparing = None

    def _local_prepared(self, event: LocalPrepared, now: float) -> None:
        if self._preparing is None or self._preparing.plan.epoch != event.epoch:
            return
        self._preparing.ready = True
        if event.epoch.proposer == self._me:
            self._stage_ready(self._me, event.epoch, now)
        else:
            self._effects.append(Send(event.epoch.proposer, Prepared(event.epoch)))

    def _local_prepare_failed(self, event: LocalPrepareFailed, now: float) -> None:
        if self._preparing is None or self._preparing.plan.epoch != event.epoch:
            return
        self._preparing = None
        reason = event.reason[:MAX_REASON_CHARS]
        self._failed = (event.epoch, reason)
        self._effects.append(Broadcast(PrepareFailed(event.epoch, reason)))
        if event.epoch.proposer == self._me:
            self._stage_failed(self._me, event.epoch, reason, now)

    def _adopt(self, plan: Plan, basis: Basis | None, now: float) -> None:
        """A committed plan with a higher epoch, our own or another's, is in force from here on."""
        preparing = self._preparing
        loaded = plan.stage_of(self._me) is None
        if preparing and preparing.plan.epoch == plan.epoch and preparing.ready:
            loaded, self._preparing = True, None
        elif preparing and preparing.plan.epoch <= plan.epoch:
            self._drop_preparing()
        if self._proposal and self._proposal.plan.epoch <= plan.epoch:
            self._proposal = None
        self._seen = max(self._seen, plan.epoch.number)
        self._plan, self._basis, self._forced = plan, basis, False
        self._broken = "" if loaded else "its part of the plan is not loaded"
        self._reported_at = float("-inf")
        self._effects.append(Activate(plan, loaded))
        self._soon(now)

    def _report(self, now: float) -> None:
        """Tell the leader that our part of the plan in force does not run, unless a newer one is on its way to us."""
        newer = self._preparing is not None and self._preparing.plan.stage_of(self._me) is not None
        if not self._broken or newer or now - self._reported_at < REPORT_S:
            return
        self._reported_at = now
        to = self.leader
        if to == self._me:
            self._stage_failed(self._me, self._plan.epoch, self._broken, now)
        elif to is not None:
            self._effects.append(Send(to, PrepareFailed(self._plan.epoch, self._broken)))

    def _tell(self, key: object, text: str) -> None:
        """A notice, once."""
        if key not in self._told and len(self._told) < 1000:
            self._told.add(key)
            self._effects.append(Notice(text))

    def validate_state(self) -> None:
        """Raises ``AssertionError`` where the state contradicts itself; for tests."""
        assert not self._effects, "effects left behind"
        assert self._seen >= self._plan.epoch.number, "a plan in force with an epoch never seen"
        if self._preparing:
            assert self._preparing.plan.epoch > self._plan.epoch, "preparing what is old"
            assert self._seen >= self._preparing.plan.epoch.number, "preparing an epoch never seen"
        if self._proposal:
            plan = self._proposal.plan
            assert plan.epoch.proposer == self._me, "a proposal under another's epoch"
            assert plan.epoch > self._plan.epoch, "a proposal older than the plan in force"
            assert self._proposal.waiting, "a proposal that waits for nobody"
            assert self._proposal.waiting.keys() <= {stage.node for stage in plan.stages}, "waits for no stage"
        if self._broken:
            assert self._plan.stage_of(self._me), "broken without a stage"
