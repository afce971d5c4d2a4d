"""What every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests import real_models

# How long an example takes says how busy the machine is.
settings.register_profile("swarm", deadline=None)
settings.load_profile("swarm")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the embedded default."""
    return real_models.smollm2_gguf(real_models.cache_directory())


@pytest.fixture(scope="session")
def smollm2_ir() -> Path:
    """The same as an IR directory with its tokenizers. Shared by runs: do not write to it."""
    return real_models.smollm2_ir(real_models.cache_directory())


@pytest.fixture(scope="session")
def qwen_ir() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, as an IR directory: 1.3 GB. Shared by runs: do not write to it."""
    return real_models.qwen_ir(real_models.cache_directory())
