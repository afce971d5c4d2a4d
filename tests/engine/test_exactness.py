"""Chains of shards from the layer store against the whole model of the original IR: every logit, bit for bit.

The prompts are those of the benchmarks, encoded as they stand, without a chat template; greedy, no early stop. The
reference is one session alone, its prompt in one segment and then one row at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.chains import (
    Plain,
    Published,
    assert_decode_together,
    assert_decodes_like,
    chain_of,
    chain_reset,
    published,
    reference,
)
from tests.prompts import PROMPTS

TOKENS = 256
STAGES = (1, 2, 3, 5)


@pytest.fixture(scope="module")
def smollm2(smollm2_ir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(smollm2_ir, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def smollm2_alone(smollm2: Published) -> dict[str, Plain]:
    return reference(smollm2, list(PROMPTS), TOKENS)


@pytest.fixture(scope="module")
def qwen(qwen_ir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(qwen_ir, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def qwen_beginning(qwen: Published) -> dict[str, Plain]:
    return reference(qwen, ["factual", "code"], 32)


@pytest.fixture(scope="module")
def qwen_alone(qwen: Published) -> dict[str, Plain]:
    """All prompts in full: 1.4 GB of logits."""
    return reference(qwen, list(PROMPTS), TOKENS)


@pytest.mark.model
@pytest.mark.parametrize("stages", STAGES)
def test_smollm2_in_a_chain(smollm2: Published, smollm2_alone: dict[str, Plain], stages: int) -> None:
    """All prompts in full with eight sessions in each forward, and the beginning of each alone."""
    chain = chain_of(smollm2, stages)
    for session, (name, expected) in enumerate(smollm2_alone.items(), 100):
        assert_decodes_like(chain, session, expected, 24, name)
        chain_reset(chain)
    assert_decode_together(chain, list(smollm2_alone.values()), TOKENS, f"{stages} stages")


@pytest.mark.model
def test_smollm2_cut_at_every_boundary(smollm2: Published, smollm2_alone: dict[str, Plain]) -> None:
    for boundary in range(1, smollm2.layers):
        chain = smollm2.chain([boundary], 256)
        assert_decodes_like(chain, 1, smollm2_alone["factual"], 8, f"cut before layer {boundary}")


@pytest.mark.model
def test_smollm2_a_shard_for_each_layer(smollm2: Published, smollm2_alone: dict[str, Plain]) -> None:
    chain = smollm2.chain(range(1, smollm2.layers), 256)
    assert_decodes_like(chain, 1, smollm2_alone["chat"], 8, "a shard for each layer")


@pytest.mark.large
@pytest.mark.parametrize("stages", [2, 3])
def test_qwen_in_a_chain(qwen: Published, qwen_beginning: dict[str, Plain], stages: int) -> None:
    chain = chain_of(qwen, stages)
    for session, (name, expected) in enumerate(qwen_beginning.items()):
        assert_decodes_like(chain, session, expected, 32, name)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
def test_smollm2_in_a_chain_alone(smollm2: Published, smollm2_alone: dict[str, Plain], stages: int) -> None:
    chain = chain_of(smollm2, stages)
    for session, (name, expected) in enumerate(smollm2_alone.items()):
        assert_decodes_like(chain, session, expected, TOKENS, name)
        chain_reset(chain)


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("stages", STAGES)
def test_qwen_in_a_chain_alone(qwen: Published, qwen_alone: dict[str, Plain], stages: int) -> None:
    chain = chain_of(qwen, stages)
    for session, (name, expected) in enumerate(qwen_alone.items()):
        assert_decodes_like(chain, session, expected, TOKENS, name)
        chain_reset(chain)
