"""The one command: ``python node.py`` on every PC (``swarm`` where it is installed)."""

import sys

from swarm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
