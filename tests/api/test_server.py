"""The API over real sockets, with a made-up coordinator behind it."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest

from swarm.api.server import ApiServer
from swarm.coordinator.requests import FinishReason
from swarm.protocol import limits
from swarm.protocol.errors import CapacityError, SessionError, UsageError
from swarm.protocol.snapshot import Snapshot
from tests.api.generators import FakeGenerator
from tests.loopwatch import loopwatch
from tests.ui.snapshots import CASES, member, ring, snapshot

pytestmark = pytest.mark.anyio

READY = snapshot(plan=ring(1, 4), members=(member(1),), model="org/qwen")
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
DEADLINE_S = 20


@asynccontextmanager
async def serving(
    generator: FakeGenerator, look: Callable[[], Snapshot] = lambda: READY, **options: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, int]]:
    server = ApiServer(look, generator, **options)
    port = await server.start("127.0.0.1", 0, fixed=True)
    try:
        with anyio.fail_after(DEADLINE_S):
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
                yield client, port
    finally:
        await server.close()


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    assert response.status == 200
    assert response.content_type == "text/event-stream"
    text = (await response.read()).decode()
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


async def test_a_whole_answer() -> None:
    generator = FakeGenerator()
    async with serving(generator) as (client, _):
        response = await client.post("/v1/chat/completions", json=HELLO)
        body = await response.json()
    assert response.status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "org/qwen"
    assert body["choices"][0]["message"]["content"] == "Hello you"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3
    assert body["swarm"]["seed"] is None
    assert generator.requests[0].messages[0].content == "Hello"


async def test_a_stream_says_role_text_finish_and_usage() -> None:
    async with serving(FakeGenerator(finish=FinishReason.LENGTH)) as (client, _):
        ask = {**HELLO, "stream": True, "temperature": 1, "stream_options": {"include_usage": True}}
        first, *rest = await events(await client.post("/v1/chat/completions", json=ask))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert 0 <= first["swarm"]["seed"] < 2**31
    *texts, last, usage = rest
    assert [chunk["choices"][0]["delta"]["content"] for chunk in texts] == ["Hel", "lo", " you"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in texts)
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 10
    assert len({chunk["id"] for chunk in (first, *rest)}) == 1


async def test_the_drawn_seed_is_the_one_that_is_reported() -> None:
    generator = FakeGenerator()
    async with serving(generator) as (client, _):
        body = await (await client.post("/v1/chat/completions", json={**HELLO, "temperature": 1})).json()
    assert body["swarm"]["seed"] == generator.requests[0].sampling.seed


async def test_text_comes_as_it_is_made() -> None:
    generator = FakeGenerator(held=True)
    async with serving(generator, quiet_s=0.01) as (client, _):
        response = await client.post("/v1/chat/completions", json={**HELLO, "stream": True})
        role = await response.content.readuntil(b"\n\n")
        assert b'"role"' in role
        assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
        generator.go.set()
        rest = await response.read()
    assert b'"Hel"' in rest


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_cancels_at_once(stream: bool) -> None:
    generator = FakeGenerator(held=True)
    async with serving(generator) as (_, port):
        body = json.dumps({**HELLO, "stream": stream}).encode()
        connection = await anyio.connect_tcp("127.0.0.1", port)
        await connection.send(http_post(body))
        await generator.started.wait()
        assert not generator.closed.is_set()
        await connection.aclose()
        await generator.closed.wait()


async def test_a_client_that_goes_in_the_middle_of_a_stream_cancels() -> None:
    generator = FakeGenerator(endless=True)
    async with serving(generator) as (client, _):
        response = await client.post("/v1/chat/completions", json={**HELLO, "stream": True})
        await response.content.readuntil(b"\n\n")
        response.close()
        await generator.closed.wait()


async def test_a_slow_client_holds_its_answer_back_and_loses_it_in_the_end() -> None:
    generator = FakeGenerator(texts=["x" * 100_000], endless=True)
    async with serving(generator, write_timeout_s=0.5) as (_, port):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(http_post(json.dumps({**HELLO, "stream": True}).encode()))
            await generator.closed.wait()
    assert generator.yielded < 500, "what nobody reads is not made"


def http_post(body: bytes, host: str = "127.0.0.1") -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("too long", expected="8192 tokens", action="Shorten it."), 400, "context_length_exceeded"),
        (UsageError("no such role"), 400, None),
        (SessionError("the ring is gone"), 503, None),
        (ValueError("a bug"), 500, None),
    ],
)
async def test_an_error_before_the_first_text_has_a_status(
    error: Exception, status: int, code: str | None, stream: bool
) -> None:
    async with serving(FakeGenerator(error=error)) as (client, _):
        response = await client.post("/v1/chat/completions", json={**HELLO, "stream": stream})
        body = await response.json()
    assert response.status == status
    assert body["error"]["code"] == code
    assert ("Retry-After" in response.headers) == (status == 503)
    assert "a bug" not in json.dumps(body)


async def test_an_error_in_the_middle_is_told_in_the_stream() -> None:
    generator = FakeGenerator(error=SessionError("the ring is gone", action="Ask again."), error_at=2)
    async with serving(generator) as (client, _):
        found = await events(await client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
    assert found[-1]["error"]["message"] == "the ring is gone. Ask again."
    assert found[-2]["choices"][0]["delta"]["content"] == "lo"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_cut_short_here_is_an_error(stream: bool) -> None:
    async with serving(FakeGenerator(finish=FinishReason.CANCELLED)) as (client, _):
        response = await client.post("/v1/chat/completions", json={**HELLO, "stream": stream})
        text = await response.text()
    assert "the answer was cut short" in text


async def test_while_not_ready_it_is_503_with_the_progress() -> None:
    generator = FakeGenerator()
    async with serving(generator, lambda: CASES["forming"]) as (client, _):
        response = await client.post("/v1/chat/completions", json=HELLO)
        body = await response.json()
        health = await client.get("/health")
    assert (response.status, health.status) == (503, 503)
    assert response.headers["Retry-After"] == "14"
    assert body["error"]["code"] == "not_ready"
    assert "1 of 3 stages prepared" in body["error"]["message"]
    assert [entry["name"] for entry in body["progress"]] == ["PC-1", "PC-2", "PC-3"]
    assert generator.requests == []


async def test_models_status_and_health() -> None:
    async with serving(FakeGenerator()) as (client, _):
        models = await (await client.get("/v1/models")).json()
        one = await (await client.get("/v1/models/org/qwen")).json()
        other = await client.get("/v1/models/gpt-4o")
        body = await (await client.get("/status")).json()
        health = await client.get("/health")
    assert [entry["id"] for entry in models["data"]] == ["org/qwen"]
    assert one["object"] == "model"
    assert (other.status, (await other.json())["error"]["code"]) == (404, "model_not_found")
    assert body["ready"] is True
    assert health.status == 200


async def test_no_model_yet_is_an_empty_list() -> None:
    async with serving(FakeGenerator(), lambda: CASES["starting"]) as (client, _):
        assert (await (await client.get("/v1/models")).json())["data"] == []


async def test_more_than_the_limit_at_once_is_429() -> None:
    generator = FakeGenerator(held=True)
    statuses: list[int] = []
    async with serving(generator, max_answers=1) as (client, _):

        async def ask() -> None:
            statuses.append((await client.post("/v1/chat/completions", json=HELLO)).status)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await generator.started.wait()
            refused = await client.post("/v1/chat/completions", json=HELLO)
            generator.go.set()
        await ask()
        assert refused.status == 429
        assert refused.headers["Retry-After"]
        assert (await refused.json())["error"]["type"] == "rate_limit_error"
    assert statuses == [200, 200]


async def test_a_body_that_is_too_large_is_413() -> None:
    generator = FakeGenerator()
    async with serving(generator) as (client, _):
        big = b"x" * (limits.MAX_API_BODY_BYTES + 1)
        response = await client.post("/v1/chat/completions", data=big)
        body = await response.json()
    assert response.status == 413
    assert str(limits.MAX_API_BODY_BYTES) in body["error"]["message"]
    assert generator.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/status", 405),
        ("GET", "/nothing", 404),
        ("OPTIONS", "/status", 405),
    ],
)
async def test_other_paths_and_methods_are_errors_in_the_same_shape(method: str, path: str, status: int) -> None:
    async with serving(FakeGenerator()) as (client, _):
        response = await client.request(method, path)
        body = await response.json()
    assert response.status == status
    assert "/v1/chat/completions" in body["error"]["expected"]
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_malformed_json_is_400() -> None:
    async with serving(FakeGenerator()) as (client, _):
        response = await client.post("/v1/chat/completions", data=b"{")
    assert response.status == 400


async def test_a_web_page_cannot_reach_it() -> None:
    generator = FakeGenerator()
    async with serving(generator) as (client, port):
        rebound = await client.get("/status", headers={"Host": f"evil.example:{port}"})
        foreign = await client.post("/v1/chat/completions", json=HELLO, headers={"Origin": "https://evil.example"})
        local = await client.get("/status", headers={"Host": f"localhost:{port}"})
    assert (rebound.status, foreign.status, local.status) == (403, 403, 200)
    assert generator.requests == []


async def test_a_taken_port_moves_on_unless_it_was_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = ApiServer(lambda: READY, FakeGenerator())
        with pytest.raises(UsageError) as caught:
            await server.start("127.0.0.1", port, fixed=True)
        assert str(port) in str(caught.value)
        assert "--api-port" in str(caught.value)
        moved = await server.start("127.0.0.1", port, fixed=False)
        assert port < moved < port + 100
        await server.close()


async def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UsageError):
        await ApiServer(lambda: READY, FakeGenerator()).start("192.0.2.1", 0, fixed=True)


async def test_closing_ends_a_running_answer() -> None:
    generator = FakeGenerator(endless=True)
    server = ApiServer(lambda: READY, generator)
    port = await server.start("127.0.0.1", 0, fixed=True)
    with anyio.fail_after(DEADLINE_S):
        async with aiohttp.ClientSession() as client:
            ask = client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={**HELLO, "stream": True})
            async with ask as response:
                await response.content.readuntil(b"\n\n")
                await server.close()
                await generator.closed.wait()


def test_a_large_answer_never_holds_the_loop() -> None:
    async def main() -> None:
        async with serving(FakeGenerator(texts=["word "] * 3000)) as (client, _):
            await (await client.post("/v1/chat/completions", json=HELLO)).read()
            await (await client.post("/v1/chat/completions", json={**HELLO, "stream": True})).read()

    with loopwatch(0.5):
        anyio.run(main)
