"""What people ask for and what they get back: the coordinator's public types, used by `api` and `ui`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol

from swarm.protocol.sampling import GREEDY, SamplingParams


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams = GREEDY
    max_tokens: int | None = None
    """New tokens at most; None: until a stop token or the end of the context."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these texts."""
    ignore_stop_tokens: bool = False
    """Go on to `max_tokens` past the model's own stop tokens (benchmarks)."""


class FinishReason(Enum):
    """OpenAI's terms where it has them."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SpeculationUsage:
    """What drafting did. All fields are sums, so that those of many answers add up."""

    windows: int = 0
    """Segments with drafted rows."""
    ngram_drafted: int = 0
    ngram_accepted: int = 0
    model_drafted: int = 0
    model_accepted: int = 0
    rejected: int = 0
    """Drafted tokens that the model drew differently. The rest of what was drafted came after one of these."""
    wasted_rows: int = 0
    """Rows sent for nothing; stages drop some of them unrun."""
    in_flight: int = 0
    """Windows on their way when one was sent, itself counted; see `depth`."""
    seconds: float = 0.0
    """From the first token to the last."""
    plain_seconds: float = 0.0
    """What plain decoding would have taken, by the measured time of one row; 0 where none was measured."""

    @property
    def drafted(self) -> int:
        return self.ngram_drafted + self.model_drafted

    @property
    def accepted(self) -> int:
        return self.ngram_accepted + self.model_accepted

    @property
    def k(self) -> float:
        """Mean drafted rows of a window."""
        return self.drafted / self.windows if self.windows else 0.0

    @property
    def depth(self) -> float:
        """Mean windows in flight."""
        return self.in_flight / self.windows if self.windows else 0.0

    @property
    def gain(self) -> float:
        """Speed against plain decoding as the measured times predict it; 1 where nothing was measured."""
        return self.plain_seconds / self.seconds if self.seconds and self.plain_seconds else 1.0

    def __add__(self, other: SpeculationUsage) -> SpeculationUsage:
        return SpeculationUsage(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


NO_SPECULATION = SpeculationUsage()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    """Prompt tokens that were not run again: of an earlier turn, or of another session that begins alike."""
    first_token_ms: float
    """Time to first token (TTFT)."""
    token_ms: float
    """Mean time per output token after the first (TPOT); 0 for fewer than two. Accepted drafts come several at once."""
    speculation: SpeculationUsage = NO_SPECULATION


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last one carries `finish` and `usage`; before the first, some may say only `place`."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    place: int = 0
    """Where the answer has not begun: its place in line for the ring's KV cache, 1 for the next."""


def in_line(place: int) -> str:
    """``waiting, 2nd in line``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(place % 10 if place % 100 not in (11, 12, 13) else 0, "th")
    return f"waiting, {place}{ending} in line"


class Generator(Protocol):
    """What `api` and `ui` need of a coordinator."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream an answer. Closing the generator cancels it everywhere, at once.

        Raises `SessionError` where the ring cannot go on, `CapacityError` where the request can never fit,
        `UsageError` for a request that makes no sense.
        """
