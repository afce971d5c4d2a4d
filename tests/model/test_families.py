"""Every family of models, small and random: exported by ranges, cut at every boundary, equal bit for bit.

Needs the extra `export`. Run with ``pytest -m export``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.families import COMMON, FAMILIES, Family, cuts_of, difference, of_checkpoint, write_family
from tests.engine.chains import published

pytestmark = [pytest.mark.export, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True, scope="module")
def _extra() -> None:
    for name in ("optimum.intel", "torch", "transformers", "nncf"):
        pytest.importorskip(name)


def quiet(_what: str) -> None:
    pass


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_exported_by_ranges_and_cut_everywhere(family: Family, tmp_path: Path) -> None:
    """Ours against optimum-intel's own export of the whole; and that one too, published and cut."""
    row = of_checkpoint(family.name, write_family(family, tmp_path / "hf"), tmp_path, quiet)
    assert row.cuts == family.layers + 1
    assert row.same_blobs
    assert row.difference == 0.0
    theirs = published(tmp_path / "optimum", tmp_path / "store")
    assert (theirs.layers, theirs.manifest.context_tokens) == (family.layers, COMMON["max_position_embeddings"])
    assert difference(theirs, [*cuts_of(family.layers)][-1:], quiet) == 0.0
