"""Plugin settings that follow the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarm.engine import devices
from swarm.engine.devices import choose_device
from swarm.engine.paged import PagedEngine
from swarm.engine.selftest import Chain
from swarm.model.cut import cut
from swarm.model.shard import Shard
from swarm.model.tiny import tiny_model
from swarm.protocol.errors import UsageError
from tests.engine.chains import assert_same_bits, plain

PROMPT = list(range(3, 40))


def test_an_unknown_device_is_refused_with_those_that_are_here() -> None:
    with pytest.raises(UsageError, match="CPU"):
        choose_device("TPU")


def test_the_cpu_is_the_default() -> None:
    assert choose_device(None) == choose_device("cpu") == "CPU"


def engine(cache: Path) -> PagedEngine:
    return PagedEngine(Shard(cut(tiny_model(), 0, 3)), "CPU", 256, 512, 1, cache)


def test_nothing_compiled_is_kept_for_the_cpu(tmp_path: Path) -> None:
    engine(tmp_path / "compiled")
    assert not (tmp_path / "compiled").exists()


def test_a_model_with_a_cache_answers_the_same_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that other devices take, tried on the one that is here."""
    expected = plain(Chain([engine(tmp_path)]), 1, PROMPT, 12)
    monkeypatch.setitem(devices._PROFILES, "CPU", replace(devices._PROFILES["CPU"], keeps_compiled=True))
    for _ in range(2):
        found = plain(Chain([engine(tmp_path / "compiled")]), 1, PROMPT, 12)
        assert found.tokens == expected.tokens
        assert_same_bits(found.logits, expected.logits, "with a cache")
        assert list((tmp_path / "compiled").glob("*.blob"))
