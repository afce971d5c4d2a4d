"""The stateful engine with real models: chains of shards from the layer store against the whole model, bit for bit.

Prompts and reference are those of `test_exactness`. Rejected windows come between the tokens, so that the caches have
masked cells wherever the logits are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from swarm.engine.selftest import Chain, segment
from swarm.protocol.config import STATEFUL
from swarm.protocol.messages import RowKind
from tests.engine.chains import (
    Plain,
    Published,
    assert_decode_together,
    assert_decodes_like,
    assert_same_bits,
    chain_of,
    chain_reset,
    published,
    reference,
)
from tests.prompts import PROMPTS

TOKENS = 256
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def smollm2(smollm2_ir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(smollm2_ir, tmp_path_factory.mktemp("smollm2"), STATEFUL)


@pytest.fixture(scope="module")
def smollm2_beginning(smollm2: Published) -> dict[str, Plain]:
    return reference(smollm2, ["factual", "code"], 24)


@pytest.fixture(scope="module")
def qwen(qwen_ir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(qwen_ir, tmp_path_factory.mktemp("qwen"), STATEFUL)


def assert_speculates_like(chain: Chain, sessions: Sequence[Plain], what: str) -> None:
    """All sessions in turns: chunks of a drawn size, then windows of 1 to 8 rows, of which the last are rejected."""
    random = np.random.default_rng(6)
    done = [0] * len(sessions)
    while any(at < len(one.ids) - 1 for at, one in zip(done, sessions, strict=True)):
        for number, one in enumerate(sessions):
            start, end = done[number], len(one.ids) - 1
            if start == end:
                continue
            stop = min(start + int(random.integers(1, 9)), len(one.prompt) if start < len(one.prompt) else end)
            wrong = [] if start < len(one.prompt) else random.integers(0, 1000, int(random.integers(0, 5))).tolist()
            window = [*one.ids[start:stop], *wrong]
            _, rows = chain.run([segment(number, start, window, len(window), RowKind.DECODE)])
            place = f"{what}, session {number}, position {start}"
            assert_same_bits(rows[: stop - start], one.logits[start:stop], place)
            done[number] = stop


@pytest.mark.model
@pytest.mark.parametrize("stages", STAGES)
def test_smollm2_beginning(smollm2: Published, smollm2_beginning: dict[str, Plain], stages: int) -> None:
    chain = chain_of(smollm2, stages)
    assert_speculates_like(chain, list(smollm2_beginning.values()), f"{stages} stages")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("stages", STAGES)
def test_smollm2(smollm2: Published, stages: int) -> None:
    assert_exact(smollm2, stages)


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("stages", STAGES)
def test_qwen(qwen: Published, stages: int) -> None:
    assert_exact(qwen, stages)


def assert_exact(model: Published, stages: int) -> None:
    """All prompts in full: alone, in turns, and with rejected windows between."""
    expected = reference(model, list(PROMPTS), TOKENS)
    chain = chain_of(model, stages)
    for session, (name, one) in enumerate(expected.items()):
        assert_decodes_like(chain, session, one, TOKENS, name)
        chain_reset(chain)
    assert_decode_together(chain, list(expected.values()), TOKENS, f"{stages} stages")
    chain_reset(chain)
    assert_speculates_like(chain, list(expected.values()), f"{stages} stages")
