"""``node.py`` on a PC as fast as the others: here they share cores, and would measure what is left of them."""

from __future__ import annotations

import sys

from swarm.cli import run
from swarm.cli.main import main

SPEED = 1e9
"""Bytes per second: so slow that sharing pays."""

if __name__ == "__main__":
    run.measure_speed = lambda _device="CPU": SPEED
    sys.exit(main())
