"""What docs/operations.md says of the API holds."""

from __future__ import annotations

import re
from pathlib import Path

from swarm.api.chat import parse
from swarm.protocol import limits
from swarm.protocol.config import DEFAULT_API_PORT
from swarm.protocol.messages import MemberState

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_its_example_is_a_request_that_is_read() -> None:
    (body,) = re.findall(r"/v1/chat/completions .* -d '(.*)'", PAGE)
    assert parse(body.encode(), "model", lambda: 0).request.messages


def test_its_figures_are_the_limits() -> None:
    assert f"port {DEFAULT_API_PORT}" in PAGE
    assert f"{limits.MAX_API_ANSWERS} answers run" in PAGE
    assert f"over {limits.MAX_API_BODY_BYTES // 2**20} MiB" in PAGE
    assert f"over {limits.API_READ_TIMEOUT_S:.0f} s to arrive" in PAGE
    assert f"nothing for {limits.API_WRITE_TIMEOUT_S:.0f} s" in PAGE
    assert f"up to {limits.MAX_STOP_STRINGS})" in PAGE


def test_it_names_every_state() -> None:
    for state in MemberState:
        assert f"`{state.name.lower()}`" in PAGE
