"""How the next token is chosen: plain data that travels with every segment to the last stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.protocol.errors import UsageError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Greedy where `temperature` is 0. The names and ranges are those of the OpenAI and Hugging Face APIs."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already in prompt or answer; 1 is off."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, 10.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 0.1, 10.0),
        ):
            if not (math.isfinite(value) and low <= value <= high):
                raise UsageError(f"{name} out of range", expected=f"{low:g} to {high:g}", found=str(value))
        if not 0 <= self.top_k <= 1_000_000:
            raise UsageError("top_k out of range", expected="0 to 1000000", found=str(self.top_k))
        if not 0 <= self.seed < 2**63:
            raise UsageError("seed out of range", expected="0 to 2^63-1", found=str(self.seed))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


GREEDY = SamplingParams()
