"""Errors as an OpenAI client expects them, with our expected, found and action beside the message. Pure."""

from __future__ import annotations

from typing import Any

from swarm.protocol.errors import CapacityError, DeadlineError, LinkClosedError, SessionError, SwarmError, UsageError


class RequestError(UsageError):
    """A request that the API refuses, with its HTTP status and, where one is at fault, the parameter."""

    def __init__(
        self,
        problem: str,
        *,
        expected: str = "",
        found: str = "",
        action: str = "",
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(problem, expected=expected, found=found, action=action)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}


def status_of(error: SwarmError) -> int:
    """400 where another request would do, 503 where the same one may do later, 500 where neither."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, (UsageError, CapacityError)):
        return 400
    if isinstance(error, (SessionError, LinkClosedError, DeadlineError)):
        return 503
    return 500


def body_of(error: SwarmError) -> dict[str, Any]:
    code = "context_length_exceeded" if isinstance(error, CapacityError) else None
    param = None
    if isinstance(error, RequestError):
        code, param = error.code, error.param
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(status_of(error), "invalid_request_error"),
            "param": param,
            "code": code,
            "expected": error.expected,
            "found": error.found,
            "action": error.action,
        }
    }
