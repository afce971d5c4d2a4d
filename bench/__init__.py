"""Benchmarks: each a script that prints one line of JSON last (see bench/README.md)."""
