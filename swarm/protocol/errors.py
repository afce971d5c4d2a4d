"""The one exception tree.

::

    SwarmError                  base: expected, found, and what to do
    ├── UsageError              the person gave something we cannot use: one line, exit status 2
    ├── ModelError              a model, graph or tokenizer is not what we can run
    │   └── UnsupportedModelError
    ├── StoreError              a blob is missing, damaged, or the disk is full
    ├── CapacityError           something does not fit: memory, KV blocks, context
    ├── DeviceError             OpenVINO or a device refused
    ├── ProtocolError           the peer broke the protocol: the link is dropped with the reason
    │   └── LimitError          … by sending more than `limits.py` allows
    ├── HandshakeError          two nodes do not belong together: version, swarm, code
    ├── LinkClosedError         the link is gone: its last reason
    ├── DeadlineError           a wait ran out
    └── SessionError            a session cannot go on: the reason its stream ends with

Misuse by our own code is a plain ``ValueError`` or ``AssertionError``: those are bugs and show a traceback.
"""

from __future__ import annotations


class SwarmError(Exception):
    """What went wrong, in one line: expected, found, and what to do.

    The three parts are kept apart so that a screen may lay them out; ``str()`` joins those that are given.
    """

    def __init__(self, problem: str, *, expected: str = "", found: str = "", action: str = "") -> None:
        self.problem = problem
        self.expected = expected
        self.found = found
        self.action = action
        super().__init__(problem, expected, found, action)

    def __str__(self) -> str:
        parts = [self.problem]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.found:
            parts.append(f"found {self.found}")
        line = "; ".join(parts)
        return f"{line}. {self.action}" if self.action else line


class UsageError(SwarmError):
    """The person gave something we cannot use. One line, exit status 2, no traceback."""


class ModelError(SwarmError):
    """A model, its graph or its tokenizer is not what we can run."""


class UnsupportedModelError(ModelError):
    """The model is well formed but of a kind that cannot be cut or run here."""


class StoreError(SwarmError):
    """A blob is missing or damaged, or the disk is full."""


class CapacityError(SwarmError):
    """Something does not fit: weights, KV blocks, context. Carries the numbers in its text."""


class DeviceError(SwarmError):
    """OpenVINO or one of its devices refused."""


class ProtocolError(SwarmError):
    """The peer broke the protocol; its link is dropped with this reason and nothing else suffers."""


class LimitError(ProtocolError):
    """The peer sent more than `limits.py` allows."""


class HandshakeError(SwarmError):
    """Two nodes do not belong together: protocol version, swarm name, or pairing code."""


class LinkClosedError(SwarmError):
    """The link is closed; the text is the reason it closed with."""


class DeadlineError(SwarmError):
    """A wait ran out: what was waited for, and how long."""


class SessionError(SwarmError):
    """A session cannot go on; the text is the reason its stream ends with."""
