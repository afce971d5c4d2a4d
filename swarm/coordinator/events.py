"""What happens to a session, and what it wants done; plain data between `session` and its shell `turn`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from swarm.coordinator.requests import FinishReason
from swarm.protocol.errors import SwarmError
from swarm.protocol.ids import BlobId, NodeId
from swarm.protocol.messages import Drawn, Refused, Segment
from swarm.protocol.plan import Plan
from swarm.protocol.sampling import GREEDY, SamplingParams

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """A turn: answer this prompt, which holds the whole conversation."""

    prompt: tuple[int, ...]
    model: BlobId | None
    """The manifest whose tokenizer made the ids."""
    context_tokens: int
    sampling: SamplingParams = GREEDY
    max_tokens: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    held: int = 0
    """Positions of a new session's prompt that the stages hold already, computed for other sessions."""
    kinds: bytes = b""
    """How the first rows of the prompt are run, by `RowKind`, as a turn before left them; the others are prefilled."""
    draft_model: bool = False
    """`AskDraft` will be answered."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The answer to `AskDraft`; it may hold fewer tokens than asked, none where the draft model cannot go on."""

    attempt: int
    start: int
    tokens: tuple[int, ...]
    seconds: float
    """From the question to the answer."""
    sources: tuple[int, ...] = ()
    """How sure the model is of each token (`times.confidence`); empty: not known."""


@dataclass(frozen=True, slots=True)
class PlanChanged:
    plan: Plan


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A segment of this attempt could not be handed to the first stage."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Stop here: a stop string was found, or nobody wants the rest."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Tick:
    """The session's deadline may have passed."""


Event: TypeAlias = Begin | Drawn | Drafted | Refused | PlanChanged | LinkLost | End | Tick


# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendSegment:
    to: NodeId
    segment: Segment


@dataclass(frozen=True, slots=True)
class AskDraft:
    """Draft `count` tokens that follow `tokens`; at most one is asked at a time, a newer one replaces an older one."""

    attempt: int
    start: int
    """Position of the first token to draft: the length of `tokens`."""
    tokens: tuple[int, ...]
    """The whole sequence: what is certain, and what is drafted already."""
    count: int
    sampling: SamplingParams
    chances: tuple[float, ...] = ()
    """That a token is right, by how sure the model is of it: for `MODEL`, `MODEL` - 1, …"""
    least: float = 0.0
    """Go on as long as the chance that all are right, the next one too if it is like most, is no less."""
    patient: bool = False
    """Nobody waits for it: the model reads what it has not read yet, however long that takes."""


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens of the answer; never a stop token."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    error: SwarmError


@dataclass(frozen=True, slots=True)
class CloseEverywhere:
    """Send `CloseSession` to these nodes."""

    nodes: tuple[NodeId, ...]


Effect: TypeAlias = SendSegment | AskDraft | Emit | Finish | Fail | CloseEverywhere
