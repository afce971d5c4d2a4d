"""Floor 6. The command line: parse, build, run."""
