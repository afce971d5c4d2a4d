from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.coordinator.chunks import prefill_chunks, sibling_chunks


@given(rows=st.integers(2, 5000), limit=st.integers(3, 300))
def test_prefill_chunks_cover_the_rows_and_none_has_one_row(rows: int, limit: int) -> None:
    chunks = prefill_chunks(rows, limit)
    assert sum(chunks) == rows
    assert all(2 <= chunk <= limit for chunk in chunks)
    assert all(chunk == limit for chunk in chunks[:-2])


@pytest.mark.parametrize(
    ("rows", "limit", "chunks"), [(2, 256, [2]), (257, 256, [255, 2]), (512, 256, [256, 256]), (4, 3, [2, 2])]
)
def test_prefill_examples(rows: int, limit: int, chunks: list[int]) -> None:
    assert prefill_chunks(rows, limit) == chunks


@pytest.mark.parametrize(("rows", "limit"), [(1, 256), (0, 256), (3, 2)])
def test_what_cannot_be_divided_is_refused(rows: int, limit: int) -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        prefill_chunks(rows, limit)


@given(rows=st.integers(1, 5000), limit=st.integers(1, 300))
def test_sibling_chunks_cover_the_rows(rows: int, limit: int) -> None:
    chunks = sibling_chunks(rows, limit)
    assert sum(chunks) == rows
    assert all(1 <= chunk <= limit for chunk in chunks)
