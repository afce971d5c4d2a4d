"""Who may ask: requests that a web page could forge are refused. Pure.

The API listens on loopback and has no password, so a page in this PC's browser must not reach it: not under a name that
its owner points at 127.0.0.1 (DNS rebinding), and not by a form or script of another origin.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and addresses of this machine only."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _hostname(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def host_allowed(bound: str, header: str | None) -> bool:
    """Where bound to loopback, only a loopback name or address in ``Host``."""
    return not is_loopback(bound) or (header is not None and is_loopback(_hostname(header)))


def origin_allowed(host: str | None, origin: str | None) -> bool:
    """No ``Origin`` (not a page), one of this machine, or the one that the request is for."""
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or (host is not None and parts.netloc.lower() == host.lower())
