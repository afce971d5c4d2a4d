"""A model that is made here: two layers, a byte-level tokenizer, no download."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.model import sources
from tests.model.gguf_files import tiny_llama


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.write_bytes(tiny_llama())
    return path


@pytest.fixture(scope="session")
def tiny_ir(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_gguf` as an IR directory. Do not write to it."""
    workdir = tmp_path_factory.mktemp("tiny")
    return sources.acquire(sources.resolve(str(tiny_gguf)), workdir, lambda *_: None)
