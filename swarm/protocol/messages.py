"""Everything that travels between nodes: frozen messages with append-only tags.

A tag is never reused and a field is only ever added at the end, with a default. `codec` turns messages into frames;
`docs/protocol.md` describes them for people, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, TypeAlias

from swarm.protocol.config import PAGED
from swarm.protocol.ids import BlobId, Epoch, NodeId, SessionId
from swarm.protocol.plan import Plan
from swarm.protocol.sampling import SamplingParams
from swarm.protocol.tensors import Array

# --- handshake: the first frames of a link, in this order -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Dialler to listener, first: who I am, and a challenge."""

    TAG: ClassVar[int] = 1
    protocol: int
    software: str
    swarm: str
    node: NodeId
    name: str
    certificate: bytes
    """DER. The listener checks that `node` is its hash and that `Proof.signature` was made with its key."""
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Challenge:
    """Listener to dialler: the listener's half. Its certificate is the one TLS showed."""

    TAG: ClassVar[int] = 2
    protocol: int
    software: str
    swarm: str
    node: NodeId
    name: str
    nonce: bytes
    open: bool
    """True where the swarm runs without a secret."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Dialler to listener: knows the secret, owns the certificate."""

    TAG: ClassVar[int] = 3
    digest: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """Listener to dialler: knows the secret too. The link is up."""

    TAG: ClassVar[int] = 4
    digest: bytes


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Either way, any time: the link is closed for this reason."""

    TAG: ClassVar[int] = 5
    reason: str
    retry: bool = True
    """False where dialling again cannot help: another version, another swarm, a wrong code."""


# --- membership -----------------------------------------------------------------------------------------------------


class MemberState(IntEnum):
    """memberlist's terms, and `LEAVING`: still serving, wants to be planned out."""

    ALIVE = 1
    SUSPECT = 2
    DEAD = 3
    LEFT = 4
    LEAVING = 5


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """The draft model that a node drafts with, or would."""

    source: str
    """What names it, as `--model` takes it; the same text is the same draft."""
    named: bool = False
    """With `--draft` on this node; otherwise it goes by what others named, or by the table of pairs."""
    manifest: BlobId | None = None
    """What this node can hand out; None where it does not have the whole draft."""
    manifest_bytes: int = 0
    """Size of the blob `manifest`; 0 where there is none."""
    memory_bytes: int = 0
    """What it takes on a node, KV cache counted; 0 where that is not known yet."""


@dataclass(frozen=True, slots=True)
class Member:
    """What a node says of itself. Only the node itself raises `version`; the highest (incarnation, version) wins."""

    TAG: ClassVar[int] = 10
    node: NodeId
    name: str
    incarnation: int
    """Counts the node's starts; kept on its disk."""
    version: int
    """Counts the changes within one incarnation."""
    state: MemberState
    addresses: tuple[str, ...]
    """``host:port`` of its links, most likely first."""
    memory_bytes: int
    """What the swarm may use here for weights and KV."""
    device: str
    speed: float
    """Weights streamed through one decode step, bytes per second, measured on `device`."""
    model: BlobId | None
    """The manifest this node can hand out, where it has one."""
    model_name: str
    """That model's name. A name without a `model`: the node is acquiring it from outside."""
    wanted: str
    """The model named with ``--model``; empty where the swarm's will do."""
    round_trip_ms: float = 0.0
    """Median round trip from this node to the others; 0 until measured. High where the node is behind a slow link."""
    manifest_bytes: int = 0
    """Size of the blob `model`; 0 where there is none."""
    draft: DraftOffer | None = None
    """None where the node drafts without a model."""
    engine: str = PAGED
    """What runs its layers, one of `config.ENGINES`."""
    failures: int = 0
    """How often this node tried in vain to get the model from outside: those with fewer try first."""


@dataclass(frozen=True, slots=True)
class Members:
    """The sender's whole view; sent when a link comes up and when the view changes."""

    TAG: ClassVar[int] = 11
    members: tuple[Member, ...]
    plan: Plan
    """The plan the sender runs, so a newcomer learns the epoch at once."""


@dataclass(frozen=True, slots=True)
class Ping:
    TAG: ClassVar[int] = 12
    sent_ns: int


@dataclass(frozen=True, slots=True)
class Pong:
    TAG: ClassVar[int] = 13
    sent_ns: int
    """The ping's, so that the round trip needs no table."""


# --- forming the ring -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Proposer to all members: fetch, compile and warm up your stage of this plan; go on with the old one."""

    TAG: ClassVar[int] = 20
    plan: Plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """Stage to proposer: I can run my stage of this epoch."""

    TAG: ClassVar[int] = 21
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    TAG: ClassVar[int] = 22
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Proposer to all members: from now on this plan."""

    TAG: ClassVar[int] = 23
    plan: Plan


class Phase(IntEnum):
    """What a node is busy with before it can serve."""

    IDLE = 0
    DOWNLOAD = 1
    CONVERT = 2
    FETCH = 3
    COMPILE = 4
    WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """Node to all: for every screen. Bytes or steps; `total` 0 where it is not known."""

    TAG: ClassVar[int] = 24
    node: NodeId
    phase: Phase
    label: str
    done: int
    total: int
    rate: float
    """Per second."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """Node to all, about once a second while the ring serves: for every screen and for the next plan."""

    TAG: ClassVar[int] = 25
    node: NodeId
    epoch: Epoch
    step_ms: float
    """Median time of a forward that decodes."""
    hop_ms: float
    """Median time from the end of a forward to its arrival at the next stage, half the round trip counted."""
    rows_per_second: float
    tokens_per_second: float
    """Answered by this node's own sessions."""
    sessions: int
    """Run by this node as coordinator."""
    waiting: int
    """Segments in this stage's queue."""
    memory_bytes: int
    """Resident memory of the process."""
    ring_sessions: tuple[int, ...] = ()
    """Of `sessions`, those on each ring of the plan."""


# --- a checkpoint from outside --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeLayers:
    """Acquirer to a member: bring layers ``[start, end)`` of a model into your store, and say what you have of it.

    Blobs whose ids the part names come from the members that have them, the others by export from the model's source.
    No layers at all are only the question.
    """

    TAG: ClassVar[int] = 40
    part: BlobId
    """A manifest that the acquirer hands out, some of whose blobs are not known; see `model.manifest`."""
    part_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LayersTaken:
    """Answer to `TakeLayers`."""

    TAG: ClassVar[int] = 41
    asked: BlobId
    """Its `part`."""
    part: BlobId | None
    """A manifest that the sender hands out, with the ids of what is in its store; None where it could not."""
    part_bytes: int
    reason: str
    """Why not, for people; empty where it could."""


# --- inference ------------------------------------------------------------------------------------------------------


class RowKind(IntEnum):
    """Which attention kernel a position was computed with; part of the token log, repeated by a replay."""

    PREFILL = 1
    """Several rows of one subsequence."""
    DECODE = 2
    """Sibling rows, each its own subsequence of one row: decoding, and verify windows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Run these rows of a session through your layers and pass them on.

    The stage first brings its cache for the session to exactly `start` positions: a smaller `start` than before is a
    rewind, 0 is a new beginning. A segment of an old epoch, or of an older attempt than one already seen, is dropped.

    What `start` says is believed only of an attempt's first segment. The others are run directly behind the one before,
    or refused: were one lost, the next could stand on rows of an older attempt.
    """

    TAG: ClassVar[int] = 30
    session: SessionId
    coordinator: NodeId
    epoch: Epoch
    attempt: int
    start: int
    """Absolute position of the first row."""
    kind: RowKind
    tokens: tuple[int, ...]
    """Ids of the rows; they go all the way, the last stage keeps them for the penalties."""
    wanted: int
    """How many of the last rows get a token drawn after them: 0 for an inner prefill chunk."""
    sampling: SamplingParams
    hidden: Array | None = None
    """``[rows, hidden]`` f32 from the stage before; None at stage 0."""
    number: int = 0
    """Counts the segments of the attempt. Above 0: runs only directly after the one before of the same attempt."""
    following: int = 0
    """Segments of the same forward that come right behind this one, so that the next stage can take them together."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Last stage straight to the coordinator: the tokens that follow the wanted rows."""

    TAG: ClassVar[int] = 31
    session: SessionId
    epoch: Epoch
    attempt: int
    position: int
    """Absolute position of the first drawn token: that of its row plus one."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A stage to the coordinator: this segment was not run, and why."""

    TAG: ClassVar[int] = 32
    session: SessionId
    epoch: Epoch
    attempt: int
    reason: str
    fatal: bool
    """True where trying again cannot help: the session ends. False where a new epoch will mend it."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Coordinator to every stage, and each stage to the next, behind the rows on their way: free what you hold."""

    TAG: ClassVar[int] = 33
    session: SessionId


@dataclass(frozen=True, slots=True)
class Adopt:
    """Coordinator to the first stage, and each stage to the next: begin a session with what others computed of it.

    Each stage takes what it holds of the ids, as far as they were prefilled, and passes on no more than that. While
    just those rows are being computed for another session, the answer waits for them.
    """

    TAG: ClassVar[int] = 34
    session: SessionId
    coordinator: NodeId
    epoch: Epoch
    tokens: tuple[int, ...]
    """The first ids of its prompt."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A stage to the coordinator: the positions that every stage up to this one holds; 0 ends the asking at once."""

    TAG: ClassVar[int] = 35
    session: SessionId
    epoch: Epoch
    positions: int


Message: TypeAlias = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Goodbye
    | Members
    | Ping
    | Pong
    | Prepare
    | Prepared
    | PrepareFailed
    | Commit
    | Progress
    | StageReport
    | TakeLayers
    | LayersTaken
    | Segment
    | Drawn
    | Refused
    | CloseSession
    | Adopt
    | Adopted
)

MESSAGE_TYPES: tuple[type[Message], ...] = (
    Hello,
    Challenge,
    Proof,
    Welcome,
    Goodbye,
    Members,
    Ping,
    Pong,
    Prepare,
    Prepared,
    PrepareFailed,
    Commit,
    Progress,
    StageReport,
    TakeLayers,
    LayersTaken,
    Segment,
    Drawn,
    Refused,
    CloseSession,
    Adopt,
    Adopted,
)
