"""Which hosts and origins the API listens to."""

from __future__ import annotations

import pytest

from swarm.api.guard import host_allowed, is_loopback, origin_allowed


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "app.localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "192.168.1.2", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("header", ["127.0.0.1:7480", "localhost", "localhost:1", "[::1]:7480"])
def test_a_loopback_host_is_allowed(header: str) -> None:
    assert host_allowed("127.0.0.1", header)


@pytest.mark.parametrize(
    "header", [None, "", "evil.example:7480", "127.0.0.1@evil.example", "[::1", "localhost.evil.com"]
)
def test_another_host_is_refused_on_loopback_only(header: str | None) -> None:
    assert not host_allowed("127.0.0.1", header)
    assert host_allowed("192.168.1.2", header)


def test_origins() -> None:
    assert origin_allowed("127.0.0.1:7480", None)
    assert origin_allowed("127.0.0.1:7480", "http://localhost:3000")
    assert origin_allowed("pc-1:7480", "http://PC-1:7480")
    assert not origin_allowed("127.0.0.1:7480", "https://evil.example")
    assert not origin_allowed("127.0.0.1:7480", "null")
    assert not origin_allowed("pc-1:7480", "http://[")
