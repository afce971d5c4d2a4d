"""How rows are divided into segments; pure."""

from __future__ import annotations

MIN_PREFILL_ROWS = 2
"""A prefill chunk of one row would go through the one-row kernels, whose last bits differ (design: exactness)."""

MIN_CHUNK_LIMIT = 3
"""Below this an odd number of rows cannot be divided without a chunk of one row."""


def prefill_chunks(rows: int, limit: int) -> list[int]:
    """Divide `rows` (2 or more) into chunks of 2 to `limit` rows, all but the last two of them full.

    Raises ``ValueError`` for fewer than 2 rows or a limit below 3: no such division exists.
    """
    if rows < MIN_PREFILL_ROWS or limit < MIN_CHUNK_LIMIT:
        raise ValueError(f"{rows} rows cannot be divided into prefill chunks of at most {limit}")
    full, rest = divmod(rows, limit)
    if rest == 1:
        return [limit] * (full - 1) + [limit - 1, 2]
    return [limit] * full + ([rest] if rest else [])


def sibling_chunks(rows: int, limit: int) -> list[int]:
    """Divide `rows` of decode kind into segments of at most `limit` rows; any division gives the same bits."""
    full, rest = divmod(rows, limit)
    return [limit] * full + ([rest] if rest else [])
