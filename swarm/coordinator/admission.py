"""Which answers may begin: those whose KV cache every stage can hold. The others wait in line. Pure.

An answer is counted with its prompt and with what it may write. The line is first come, first served: nobody passes a
large one that waits, so it gets its turn. The ring's cache is shared with the answers of other nodes, which are not
known here; the stages tell when it is full (`full`). Then nobody else begins until one of ours has ended or a moment
has passed, and at the stages the answer that began last gives way. With no answer of ours running, the first in line
always goes: it is for the stages to refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.protocol.errors import CapacityError

ANSWER_TOKENS = 512
"""What an answer without a limit is counted with; one that grows longer gives way where that is too much."""

PAUSE_S = 2.0
"""After a stage was full: by then another node's answer may have ended."""


@dataclass(frozen=True, slots=True)
class Need:
    """What an answer takes of every stage."""

    prompt_tokens: int
    max_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + (ANSWER_TOKENS if self.max_tokens is None else self.max_tokens)


@dataclass(slots=True)
class Admission:
    """`join`, then ask `place` until it is 0; `leave` in any case. Names are the caller's."""

    capacity: int = 0
    """Positions of KV cache at every stage; 0: not known, and everybody is admitted."""
    context: int = 0
    """Positions one session may fill; 0: not known."""
    _line: dict[int, int] = field(default_factory=dict)
    """Those who wait, first come first: name to positions."""
    _running: dict[int, int] = field(default_factory=dict)
    _paused_until: float = float("-inf")

    @property
    def waiting(self) -> int:
        return len(self._line)

    def join(self, name: int, need: Need, now: float) -> None:
        """Stand in line, and begin at once where there is room. Raises `CapacityError` for what can never fit."""
        if self.capacity and need.prompt_tokens >= self.capacity:
            raise CapacityError(
                "the prompt is longer than the ring's KV cache",
                expected=f"at most {self.capacity - 1} tokens, so that an answer fits too",
                found=f"{need.prompt_tokens} tokens",
                action="Shorten the conversation, or add a PC.",
            )
        self._line[name] = need.tokens
        self.advance(now)

    def place(self, name: int) -> int:
        """1: next in line; 0: it may begin."""
        return 0 if name in self._running else list(self._line).index(name) + 1

    def leave(self, name: int, now: float) -> None:
        """The answer is over, or nobody waits for it any more. Unknown names are ignored."""
        self._line.pop(name, None)
        if self._running.pop(name, None) is not None:
            self._paused_until = float("-inf")
        self.advance(now)

    def full(self, now: float) -> None:
        """A stage refused one of ours: there is less room than it seemed."""
        self._paused_until = now + PAUSE_S

    def resize(self, capacity: int, context: int, now: float) -> None:
        """Another plan or model. Those who run stay; who waits is refused by the session where it cannot fit now."""
        if (capacity, context) == (self.capacity, self.context):
            return
        self.capacity, self.context = capacity, context
        self._paused_until = float("-inf")
        self.advance(now)

    def advance(self, now: float) -> None:
        """Let in whom there is room for, in order."""
        while self._line:
            name, tokens = next(iter(self._line.items()))
            if self._running and (now < self._paused_until or not self._fits(tokens)):
                return
            self._running[name] = self._line.pop(name)

    def next_change(self, now: float) -> float | None:
        """When to call `advance` although nothing happened; None: not by itself."""
        return self._paused_until if self._line and now < self._paused_until else None

    def _fits(self, tokens: int) -> bool:
        return not self.capacity or self._counted(tokens) + sum(map(self._counted, self._running.values())) <= (
            self.capacity
        )

    def _counted(self, tokens: int) -> int:
        return min(tokens, self.context) if self.context else tokens

    def validate_state(self) -> None:
        """Assert the invariants; for tests and debugging."""
        assert not self._line.keys() & self._running.keys()
        assert self._running or not self._line, "somebody waits and nobody runs"
        counted = sum(map(self._counted, self._running.values()))
        assert not self.capacity or counted <= self.capacity or len(self._running) >= 1
