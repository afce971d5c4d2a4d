"""Names for files in the making: each says which process makes it, so that what a dead one left can be told."""

from __future__ import annotations

import os
import secrets

import psutil


def owned_name() -> str:
    """``<pid>-<random>``: a file name of this process that nobody else uses."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def is_abandoned(name: str) -> bool:
    """True where the process that `owned_name` named is gone, and for names of another form."""
    pid, _, _ = name.partition("-")
    return not (pid.isascii() and pid.isdigit() and len(pid) < 10 and psutil.pid_exists(int(pid)))
