"""The entry point: what a person typed to what it does, and every failure to one line and an exit status."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from swarm.cli.args import Command, parse
from swarm.protocol.config import PAGED
from swarm.protocol.errors import SwarmError, UsageError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

USAGE_STATUS = 2
"""For what the person has to change."""

FAILURE_STATUS = 1
"""For what failed on the way."""

INTERRUPTED_STATUS = 130

SWITCH_INTERVAL_S = 0.0005
"""Longest wait of a node's engine for the event loop to leave the interpreter: ten times less than Python's own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)  # it writes over the screen; `Trouble` says what matters
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        command = parse(words, os.environ, sys.stdin.read() if words[:1] == ["ask"] and "-" in words[1:] else "")
        return anyio.run(_run, command)
    except SwarmError as error:
        print(f"swarm: {error}", file=sys.stderr)
        return USAGE_STATUS if isinstance(error, UsageError) else FAILURE_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


async def _run(command: Command) -> int:
    # The parts of a node take a second to import; `status` and `ask` do without them.
    try:
        if command.name == "run":
            from swarm.cli.run import run

            sys.setswitchinterval(SWITCH_INTERVAL_S)
            await run(command.settings)
            return 0
        if command.name == "doctor":
            from swarm.cli.doctor import device_checks, run_doctor

            checks = await anyio.to_thread.run_sync(device_checks, command.settings.engine or PAGED)
            return await run_doctor(command.settings, sys.stdout, checks)
        if command.models is not None:
            from swarm.cli.models import run_models

            await run_models(command.settings, command.models, command.json, sys.stdout, sys.stderr)
            return 0
        from swarm.cli import client

        if command.ask is not None:
            await client.ask(command.settings, command.ask)
        else:
            found = await client.status(command.settings)
            print(json.dumps(found, ensure_ascii=False, indent=2) if command.json else status_lines(found))
        return 0
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that a person should see of several that ended a task group together."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    return next((error for error in leaves if not isinstance(error, SwarmError)), leaves[0])


def status_lines(found: dict[str, Any]) -> str:
    """``status`` for people."""
    lines = [f"{found['node']['name']} in swarm {found['swarm']}: {'ready' if found['ready'] else found['reason']}"]
    lines.append(f"model {found['model'] or '(not known yet)'}, epoch {found['epoch']}, API {found['api']}")
    drafts = found.get("speculation") or {}
    if drafts.get("drafted"):
        source = f"{drafts['draft']} and n-gram" if drafts["draft"] else "n-gram"
        right, gain = drafts["accepted"] / drafts["drafted"], drafts["gain"]
        lines.append(f"drafts by {source}: {right:.0%} accepted, {gain:.1f}x plain")
    lines += [f"  layers {s['start']:>3} to {s['end'] - 1:>3}  {s['name']} ({s['device']})" for s in found["stages"]]
    staged = {stage["node"] for stage in found["stages"]}
    lines += [f"  {m['state']:<18} {m['name']}" for m in found["members"] if m["id"] not in staged]
    return "\n".join(lines + list(found["notices"]))
