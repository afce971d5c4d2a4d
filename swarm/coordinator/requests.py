"""What people ask for and what they get back: the coordinator's public types, used by `api` and `ui`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
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
class Usage:
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    """Prompt tokens that were not run again: of an earlier turn, or of another session that begins alike."""
    first_token_ms: float
    """Time to first token (TTFT)."""
    token_ms: float
    """Median time per output token after the first (TPOT); 0 for fewer than two."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last one carries `finish` and `usage`."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None


class Generator(Protocol):
    """What `api` and `ui` need of a coordinator."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream an answer. Closing the generator cancels it everywhere, at once.

        Raises `SessionError` where the ring cannot go on, `CapacityError` where the request can never fit,
        `UsageError` for a request that makes no sense.
        """
