"""What goes into `Membership` and `Forming`, and what they ask their shell to do: plain data.

Effects are carried out in the order given. An event that answers an effect says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from swarm.protocol.ids import BlobId, Epoch, NodeId
from swarm.protocol.messages import Member, Message
from swarm.protocol.plan import Plan
from swarm.ring.fit import ModelShape

# --- both -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; several times a second."""


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """Everybody known, ourselves included, by id; dead and left until forgotten. Also an event of `forming`."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should know, for the screen."""

    text: str


# --- membership -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link stands: handshake done. A second link of the same node is the shell's to settle, not told here."""

    node: NodeId
    address: str = ""
    """The one we dialled; empty where the node dialled us."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    node: NodeId


@dataclass(frozen=True, slots=True)
class DialFailed:
    """Answer to `Dial`, where no `LinkUp` with its address came."""

    address: str
    node: NodeId | None
    retry: bool = True
    """False where trying soon again cannot help: another version, another swarm, a wrong code."""
    answered: NodeId | None = None
    """Who answered, where a link to it stands already: the address is theirs and need not be dialled."""


@dataclass(frozen=True, slots=True)
class PeerFound:
    """Discovery or ``--peer``: somebody may listen there."""

    address: str
    node: NodeId | None = None
    """Where discovery knows it."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Discovery: the announcement ran out."""

    address: str


@dataclass(frozen=True, slots=True)
class Heard:
    """Any frame came in on the link; `round_trip_ms` where it was a pong."""

    node: NodeId
    round_trip_ms: float | None = None


@dataclass(frozen=True, slots=True)
class MembersReceived:
    """A `messages.Members` came in. Its plan goes to `forming`."""

    sender: NodeId
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class LocalChange:
    """Something about this node is different: give the record as it should be. Node, incarnation, version and round
    trip in it are ignored; the state may be ALIVE, LEAVING or LEFT."""

    record: Member


MembershipEvent: TypeAlias = (
    Tick | LinkUp | LinkDown | DialFailed | PeerFound | PeerLost | Heard | MembersReceived | LocalChange
)


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to `address` and make the handshake. Answer with `LinkUp` naming the address, or `DialFailed`."""

    address: str
    node: NodeId | None
    """Whom we expect there; None where only the address is known."""


@dataclass(frozen=True, slots=True)
class Share:
    """Send ``Members(members, the plan in force)`` to each of these linked nodes."""

    to: tuple[NodeId, ...]
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Silent for too long: close it, answer with `LinkDown`."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class KeepIncarnation:
    """Write this incarnation to disk: our own count was behind what the swarm had seen of us."""

    incarnation: int


MembershipEffect: TypeAlias = Share | Dial | CloseLink | MembershipChanged | KeepIncarnation | Notice


# --- forming --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelKnown:
    """The shell has read the manifest of this model: its own, or one asked for by `LearnModel`."""

    shape: ModelShape


@dataclass(frozen=True, slots=True)
class AcquireFailed:
    """Answer to `AcquireModel`. Success shows in our member record."""

    reason: str


@dataclass(frozen=True, slots=True)
class PrepareReceived:
    sender: NodeId
    plan: Plan


@dataclass(frozen=True, slots=True)
class PreparedReceived:
    sender: NodeId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PrepareFailedReceived:
    sender: NodeId
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """The plan of a `Commit`, or of a `Members`."""

    sender: NodeId
    plan: Plan


@dataclass(frozen=True, slots=True)
class ProgressHeard:
    """A `Progress` of a node, our own too: it is slow, not stuck."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class LocalPrepared:
    """Answer to `StartPrepare`: fetched, compiled, warm."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class LocalPrepareFailed:
    """Answer to `StartPrepare`."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class LocalStageBroken:
    """Our part of the plan in force stopped working: the device is lost, the next stage cannot be reached, …"""

    epoch: Epoch
    reason: str


FormingEvent: TypeAlias = (
    Tick
    | MembershipChanged
    | ModelKnown
    | AcquireFailed
    | PrepareReceived
    | PreparedReceived
    | PrepareFailedReceived
    | PlanReceived
    | ProgressHeard
    | LocalPrepared
    | LocalPrepareFailed
    | LocalStageBroken
)


@dataclass(frozen=True, slots=True)
class Send:
    """To another node; dropped without a word where there is no link."""

    to: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Broadcast:
    """To every linked node."""

    message: Message


@dataclass(frozen=True, slots=True)
class KeepEpoch:
    """Write this number to disk before anything that follows is sent: no epoch is ever used twice."""

    number: int


@dataclass(frozen=True, slots=True)
class StartPrepare:
    """Fetch, cut, compile and warm up our stage of `plan`, beside the one that serves."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class CancelPrepare:
    """Stop preparing for `epoch`, or drop what is prepared."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Activate:
    """From now on this plan: switch to what was prepared for it, drop everything of older epochs."""

    plan: Plan
    loaded: bool
    """False where we have a stage in it that we did not prepare: refuse its segments until the next plan."""


@dataclass(frozen=True, slots=True)
class AcquireModel:
    """Nobody in the swarm has the model: get it from outside. While at it, publish a member record with the model's
    name and without a manifest; afterwards with both. Answer with `ModelKnown`, or `AcquireFailed`."""

    wanted: str
    """As given with ``--model``; empty for the embedded default."""


@dataclass(frozen=True, slots=True)
class LearnModel:
    """Get this manifest from one of the holders and answer with `ModelKnown`. Asked again every `ASK_AGAIN_S`."""

    manifest: BlobId
    holders: tuple[NodeId, ...]


FormingEffect: TypeAlias = (
    Send | Broadcast | KeepEpoch | StartPrepare | CancelPrepare | Activate | AcquireModel | LearnModel | Notice
)
