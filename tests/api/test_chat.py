"""Chat completions as plain data: what is read, what is refused, what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.api.chat import Completion, Reply, finish_reason, parse
from swarm.api.errors import RequestError, body_of, status_of
from swarm.coordinator.requests import ChatMessage, Delta, FinishReason
from swarm.protocol import limits
from swarm.protocol.errors import (
    CapacityError,
    DeadlineError,
    LinkClosedError,
    ModelError,
    SessionError,
    SwarmError,
    UsageError,
)
from tests.api.generators import USAGE

HELLO = [{"role": "user", "content": "Hello"}]


def read(**fields: Any) -> Completion:
    return parse(json.dumps({"messages": HELLO, **fields}).encode(), "qwen", lambda: 4711)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    return caught.value


def test_the_least_is_enough_and_greedy() -> None:
    completion = read()
    assert completion.request.messages == (ChatMessage("user", "Hello"),)
    assert completion.request.sampling.greedy
    assert completion.request.max_tokens is None
    assert not completion.stream


def test_everything_supported_arrives() -> None:
    completion = read(
        model="qwen",
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=42,
        stop=["\n\n", "END"],
        max_tokens=100,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    sampling = completion.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.05)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, 42)
    assert completion.request.stop == ("\n\n", "END")
    assert completion.request.max_tokens == 100
    assert completion.request.ignore_stop_tokens
    assert completion.stream
    assert completion.include_usage


def test_a_seed_is_drawn_where_it_matters_and_none_is_given() -> None:
    assert read(temperature=0.5).request.sampling.seed == 4711
    assert read(temperature=0.5, seed=-1).request.sampling.seed == 4711
    assert read(temperature=0.5, seed=0).request.sampling.seed == 0
    assert read().request.sampling.seed == 0


def test_content_may_be_text_parts_and_developer_is_system() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    roles = [(message.role, message.content) for message in read(messages=messages).request.messages]
    assert roles == [("system", "Be brief."), ("assistant", "Yes."), ("user", "ab")]


def test_harmless_and_neutral_parameters_are_accepted() -> None:
    read(
        user="me",
        metadata={"a": 1},
        store=False,
        n=1,
        frequency_penalty=0,
        presence_penalty=0.0,
        logprobs=False,
        tools=[],
        tool_choice="auto",
        logit_bias={},
        response_format={"type": "text"},
        top_k=-1,
        reasoning_effort=None,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logprobs", True),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("logit_bias", {"1": 5}),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "high"),
        ("made_up", 1),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name
    assert error.status == 400
    assert repr(name) in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": HELLO * (limits.MAX_API_MESSAGES + 1)}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * (limits.MAX_PROMPT_CHARS + 1)}]}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * (limits.MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
    ],
)
def test_bad_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert error.status == 400


def test_another_model_is_not_found() -> None:
    error = refused(model="gpt-4o")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    read(model="default")


def test_the_smaller_limit_of_tokens_counts() -> None:
    assert read(max_tokens=10, max_completion_tokens=5).request.max_tokens == 5


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000, b"9" * 10_000])
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse(body, "qwen", lambda: 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    [
        "messages",
        "model",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop",
        "max_tokens",
        "stream",
        "stream_options",
        "n",
    ]
)


@given(st.dictionaries(fields, json_values, max_size=5))
def test_whatever_comes_is_read_or_refused(data: dict[str, Any]) -> None:
    body = {"messages": HELLO, **data}
    try:
        completion = parse(json.dumps(body).encode(), "qwen", lambda: 0)
    except RequestError as error:
        json.dumps(body_of(error))
    else:
        assert completion.request.messages


REPLY = Reply("chatcmpl-1", 1, "qwen", 42)


def test_a_whole_answer() -> None:
    body = REPLY.whole([Delta("Hel"), Delta("lo"), Delta(finish=FinishReason.LENGTH, usage=USAGE)])
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 10
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    details = body["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 9, "rejected_prediction_tokens": 2}
    assert body["usage"]["speculation"] == {
        "windows": 4,
        "drafted": 12,
        "accepted": 9,
        "rejected": 2,
        "wasted_rows": 5,
        "k": 3.0,
        "depth": 1.5,
        "gain": 1.5,
        "ngram": {"drafted": 4, "accepted": 3},
        "model": {"drafted": 8, "accepted": 6},
    }
    assert body["swarm"] == {"seed": 42, "first_token_ms": 12.5, "token_ms": 4.0}


def test_an_answer_cut_short_is_an_error() -> None:
    with pytest.raises(SessionError):
        finish_reason(FinishReason.CANCELLED)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UsageError("x"), 400, "invalid_request_error"),
        (CapacityError("x"), 400, "invalid_request_error"),
        (SessionError("x"), 503, "service_unavailable"),
        (LinkClosedError("x"), 503, "service_unavailable"),
        (DeadlineError("x"), 503, "service_unavailable"),
        (ModelError("x"), 500, "server_error"),
    ],
)
def test_errors_have_openais_shape(error: SwarmError, status: int, kind: str) -> None:
    assert status_of(error) == status
    body = body_of(error)["error"]
    assert body["type"] == kind
    assert set(body) == {"message", "type", "param", "code", "expected", "found", "action"}
