"""OpenAI's chat completions to our requests and back: checked plain data. Pure; randomness is passed in.

A parameter that would change the answer and is not supported is refused by name; one that would not is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.api.errors import RequestError
from swarm.coordinator.requests import ChatMessage, Delta, FinishReason, GenerateRequest, SpeculationUsage, Usage
from swarm.protocol import limits
from swarm.protocol.errors import SessionError, UsageError
from swarm.protocol.sampling import SamplingParams
from swarm.protocol.version import SOFTWARE_VERSION

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_SUPPORTED = frozenset(
    (
        "model",
        "messages",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "ignore_eos",
    )
)

_HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    )
)
"""Accepted and ignored: they do not change what is answered."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Not supported, but accepted with a value that changes nothing (as is null)."""

_MESSAGE_EXTRAS = ("tool_calls", "function_call", "audio")


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked request: what is asked of the coordinator, and how the answer is wanted."""

    request: GenerateRequest
    stream: bool
    include_usage: bool


def parse(body: bytes, model: str, new_seed: Callable[[], int]) -> Completion:
    """Read and check a request for `model`. Raises `RequestError`, naming the parameter at fault."""
    data = _load(body)
    _refuse_unsupported(data)
    _check_model(data.get("model"), model)
    stream = _flag(data, "stream")
    request = GenerateRequest(
        messages=_messages(data.get("messages")),
        sampling=_sampling(data, new_seed),
        max_tokens=_max_tokens(data),
        stop=_stop(data.get("stop")),
        ignore_stop_tokens=_flag(data, "ignore_eos"),
    )
    return Completion(request, stream, _include_usage(data.get("stream_options"), stream))


def _load(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError("the request is not JSON", expected="a JSON object", found=str(error)[:200]) from None
    if not isinstance(data, dict):
        raise RequestError("bad request", expected="a JSON object", found=type(data).__name__)
    return data


def _refuse_unsupported(data: dict[str, Any]) -> None:
    for name, value in data.items():
        if value is None or name in _SUPPORTED or name in _HARMLESS:
            continue
        neutral = _NEUTRAL.get(name, ())
        if any(type(value) is not bool or value is n for n in neutral if value == n):
            continue
        expected = f"left out or {' or '.join(json.dumps(n) for n in neutral)}" if neutral else "left out"
        raise RequestError(
            f"{name[:80]!r} is not supported",
            expected=expected,
            found=_brief(value),
            action="Remove it from the request.",
            param=name[:80],
            code="unsupported_parameter",
        )


def _check_model(asked: Any, model: str) -> None:
    if asked not in (None, "", "default", model):
        raise RequestError(
            "this swarm does not run that model",
            expected=f"{model!r}",
            found=_brief(asked),
            action="Leave it out, or take one that /v1/models lists.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _messages(raw: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(raw, list) or not raw:
        raise _bad("messages", "a list with at least one message", raw)
    if len(raw) > limits.MAX_API_MESSAGES:
        raise _bad("messages", f"at most {limits.MAX_API_MESSAGES} messages", len(raw))
    messages = tuple(_message(item, f"messages[{index}]") for index, item in enumerate(raw))
    chars = sum(len(message.content) for message in messages)
    if chars > limits.MAX_PROMPT_CHARS:
        raise RequestError(
            "the prompt is too long",
            expected=f"at most {limits.MAX_PROMPT_CHARS} characters",
            found=str(chars),
            action="Shorten it or start a new conversation.",
            param="messages",
            code="context_length_exceeded",
        )
    return messages


def _message(raw: Any, where: str) -> ChatMessage:
    if not isinstance(raw, dict):
        raise _bad(where, "an object with role and content", raw)
    role = raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{where}.role", " or ".join(_ROLES), role)
    for extra in _MESSAGE_EXTRAS:
        if raw.get(extra):
            raise _bad(f"{where}.{extra}", "none: tools are not supported", raw[extra])
    return ChatMessage(_ROLES[role], _content(raw.get("content"), f"{where}.content"))


def _content(raw: Any, where: str) -> str:
    if isinstance(raw, str):
        text = raw
    elif isinstance(raw, list) and raw:
        text = "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(raw))
    else:
        raise _bad(where, "a text or a list of text parts", raw)
    if not _well_formed(text):
        raise _bad(where, "well-formed Unicode", "a surrogate on its own")
    return text


def _part(raw: Any, where: str) -> str:
    if not isinstance(raw, dict) or raw.get("type") != "text" or not isinstance(raw.get("text"), str):
        raise _bad(where, '{"type": "text", "text": …}', raw)
    return str(raw["text"])


def _well_formed(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _sampling(data: dict[str, Any], new_seed: Callable[[], int]) -> SamplingParams:
    temperature = _number(data, "temperature", 0.0)
    seed = _integer(data, "seed", -1)
    if seed == -1:
        seed = new_seed() if temperature > 0 else 0
    values: dict[str, Any] = {
        "temperature": temperature,
        "top_k": 0 if data.get("top_k") == -1 else _integer(data, "top_k", 0),
        "top_p": _number(data, "top_p", 1.0),
        "min_p": _number(data, "min_p", 0.0),
        "repetition_penalty": _number(data, "repetition_penalty", 1.0),
        "seed": seed,
    }
    try:
        return SamplingParams(**values)
    except UsageError as error:
        name = error.problem.partition(" ")[0]
        raise RequestError(error.problem, expected=error.expected, found=error.found, param=name) from None


def _max_tokens(data: dict[str, Any]) -> int | None:
    """The smaller of `max_tokens` and its newer name, where given."""
    given = []
    for name in ("max_tokens", "max_completion_tokens"):
        if data.get(name) is not None:
            value = _integer(data, name, 0)
            if not 1 <= value <= limits.MAX_CONTEXT_TOKENS:
                raise _bad(name, f"1 to {limits.MAX_CONTEXT_TOKENS}", value)
            given.append(value)
    return min(given, default=None)


def _stop(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    texts = [raw] if isinstance(raw, str) else raw
    if not isinstance(texts, list) or len(texts) > limits.MAX_STOP_STRINGS:
        raise _bad("stop", f"a text or a list of at most {limits.MAX_STOP_STRINGS}", raw)
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= limits.MAX_STOP_CHARS or not _well_formed(text):
            raise _bad("stop", f"texts of 1 to {limits.MAX_STOP_CHARS} characters", text)
    return tuple(texts)


def _include_usage(raw: Any, stream: bool) -> bool:
    if raw is None:
        return False
    if not stream or not isinstance(raw, dict):
        raise _bad("stream_options", "an object, together with stream: true", raw)
    unknown = set(raw) - {"include_usage", "include_obfuscation"}
    if unknown:
        raise _bad("stream_options", '{"include_usage": true or false}', raw)
    return _flag(raw, "include_usage")


def _flag(data: dict[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and type(value) is not bool:
        raise _bad(name, "true or false", value)
    return bool(value)


def _number(data: dict[str, Any], name: str, default: float) -> float:
    value = data.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _bad(name, "a number", value)
    return float(value)


def _integer(data: dict[str, Any], name: str, default: int) -> int:
    value = data.get(name)
    if value is None:
        return default
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise _bad(name, "a whole number", value)
    return value


def _bad(name: str, expected: str, found: Any) -> RequestError:
    return RequestError(f"bad value for {name}", expected=expected, found=_brief(found), param=name)


def _brief(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else text[:79] + "…"


_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def finish_reason(finish: FinishReason | None) -> str:
    """OpenAI's word. Raises `SessionError` for an answer that was cut short here, which OpenAI has no word for."""
    if finish is None or finish not in _FINISH:
        raise SessionError("the answer was cut short", found="this node is leaving", action="Ask again.")
    return _FINISH[finish]


@dataclass(frozen=True, slots=True)
class Reply:
    """What every object of one answer has in common."""

    id: str
    created: int
    model: str
    seed: int | None
    """None where nothing is drawn: greedy."""

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"swarm-{SOFTWARE_VERSION}",
            "choices": choices,
        }

    def chunk(self, delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._object("chat.completion.chunk", [choice])

    def first_chunk(self) -> dict[str, Any]:
        """Says the role, and the seed that repeats this answer."""
        return {**self.chunk({"role": "assistant", "content": ""}), "swarm": {"seed": self.seed}}

    def usage_chunk(self, last: Usage | None) -> dict[str, Any]:
        return {**self._object("chat.completion.chunk", []), "usage": usage(last)}

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The answer at once, of all its deltas; the last one must carry the finish."""
        last = deltas[-1]
        message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(last.finish)}
        extra = {"seed": self.seed, **timing(last.usage)}
        return {**self._object("chat.completion", [choice]), "usage": usage(last.usage), "swarm": extra}

    def last_chunk(self, last: Delta) -> dict[str, Any]:
        return {**self.chunk({}, finish_reason(last.finish)), "swarm": {"seed": self.seed, **timing(last.usage)}}


def usage(of: Usage | None) -> dict[str, Any] | None:
    if of is None:
        return None
    return {
        "prompt_tokens": of.prompt_tokens,
        "completion_tokens": of.completion_tokens,
        "total_tokens": of.prompt_tokens + of.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": of.reused_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": of.speculation.accepted,
            "rejected_prediction_tokens": of.speculation.rejected,
        },
        "speculation": speculation(of.speculation),
    }


def speculation(of: SpeculationUsage) -> dict[str, Any]:
    """Ours, beside OpenAI's two numbers: what was drafted by what, how it went, and what it gained."""
    return {
        "windows": of.windows,
        "drafted": of.drafted,
        "accepted": of.accepted,
        "rejected": of.rejected,
        "wasted_rows": of.wasted_rows,
        "k": round(of.k, 2),
        "depth": round(of.depth, 2),
        "gain": round(of.gain, 3),
        "ngram": {"drafted": of.ngram_drafted, "accepted": of.ngram_accepted},
        "model": {"drafted": of.model_drafted, "accepted": of.model_accepted},
    }


def timing(of: Usage | None) -> dict[str, float]:
    return {} if of is None else {"first_token_ms": round(of.first_token_ms, 3), "token_ms": round(of.token_ms, 3)}
