"""The draw: a function of seed and position alone, and a fair one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.engine import sampling
from swarm.engine.sampling import draw, draw_with_margin, gumbel
from swarm.protocol.sampling import GREEDY, SamplingParams
from swarm.protocol.tensors import Array

NOTHING = np.empty(0, np.int64)

logits_lists = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 5.0]),
    seed=st.integers(0, 2**63 - 1),
)


def f32(values: Sequence[float]) -> Array:
    return np.array(values, np.float32)


def test_the_same_seed_and_position_draw_the_same_token() -> None:
    logits = f32(np.random.default_rng(0).standard_normal(1000).tolist())
    sampled = SamplingParams(temperature=1.5, seed=11)
    first = [draw(logits, sampled, position, NOTHING) for position in range(300)]
    again = [draw(logits.copy(), sampled, position, NOTHING) for position in reversed(range(300))]
    assert first == again[::-1]
    assert len(set(first)) > 100
    other = SamplingParams(temperature=1.5, seed=12)
    assert first != [draw(logits, other, position, NOTHING) for position in range(300)]


def test_the_noise_of_a_token_does_not_depend_on_the_other_tokens() -> None:
    ids = np.arange(5000, dtype=np.int64)
    some = np.array([4999, 3, 77], np.int64)
    assert np.array_equal(gumbel(5, 9, ids)[some], gumbel(5, 9, some))


def test_the_noise_stays_the_same_in_every_version() -> None:
    """A ring of two versions would draw two answers otherwise."""
    found = gumbel(2**63 - 1, 1_048_575, np.array([0, 1, 262_143], np.int64))
    assert found.tolist() == pytest.approx([0.471697042258, 2.174234581844, 4.641664201171], abs=1e-11)


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_the_most_extreme_noise_is_finite_and_within_the_span(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(sampling, "_mix", lambda x: np.full(x.shape, bits, np.uint64))
    noise = gumbel(1, 1, np.arange(3, dtype=np.int64))
    assert np.isfinite(noise).all()
    assert -3.7 < noise[0] < 36.8


def test_the_noise_is_gumbel() -> None:
    """Mean is Euler's constant and the variance is pi²/6; the share below 0 is 1/e."""
    noise = np.concatenate([gumbel(seed, 17, np.arange(20_000, dtype=np.int64)) for seed in range(10)])
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert (noise < 0).mean() == pytest.approx(1 / math.e, abs=0.005)


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    ids = np.arange(20_000, dtype=np.int64)
    noise = [gumbel(1, 1, ids), gumbel(1, 2, ids), gumbel(2, 1, ids), gumbel(2, 2, ids)]
    correlations = np.corrcoef(np.array(noise))[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 0.03


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_frequencies_are_those_of_the_softmax(temperature: float, seed: int) -> None:
    """Pearson's chi-square over 6,000 positions, 9 degrees of freedom: 33.7 is exceeded once in 10,000 tables."""
    logits = f32([0.0, 1.0, 2.0, 0.5, -1.0, 1.5, 0.2, -0.3, 0.9, 1.1])
    sampled = SamplingParams(temperature=temperature, seed=seed)
    count = 6_000
    found = np.bincount([draw(logits, sampled, p, NOTHING) for p in range(count)], minlength=10)
    expected = softmax(logits, temperature) * count
    assert ((found - expected) ** 2 / expected).sum() < 33.7


def softmax(logits: Array, temperature: float) -> Array:
    weights: Array = np.exp(logits.astype(np.float64) / temperature)
    return weights / weights.sum()


def reference_candidates(logits: Array, p: SamplingParams, history: Sequence[int]) -> tuple[set[int], Array]:
    """The tokens that may be drawn, one filter after the other in the plainest way, and the penalized logits."""
    values = [float(v) for v in logits]
    for token in set(history):
        v = np.float32(values[token])
        values[token] = float(v / np.float32(p.repetition_penalty) if v > 0 else v * np.float32(p.repetition_penalty))
    scaled = [v / p.temperature for v in values]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if p.top_k:
        order = order[: p.top_k]
    best = scaled[order[0]]
    weights = [math.exp(scaled[i] - best) for i in order]
    if p.top_p < 1.0:
        target, mass, keep = p.top_p * sum(weights), 0.0, 0
        while keep < len(order):
            mass += weights[keep]
            keep += 1
            if mass >= target * (1 - 1e-12):
                break
        order, weights = order[:keep], weights[:keep]
    return {i for i, w in zip(order, weights, strict=True) if w >= p.min_p * (1 - 1e-12)}, np.array(scaled)


@given(logits_lists, params, st.integers(0, 2**20), st.lists(st.integers(0, 39), max_size=10))
@settings(max_examples=250, derandomize=True)
def test_filters_against_the_plain_way(values: list[float], p: SamplingParams, position: int, past: list[int]) -> None:
    """The token drawn is the one that wins when noise is added to every candidate of the whole vocabulary."""
    logits = f32(values)
    history = [token for token in past if token < len(values)]
    token = draw(logits, p, position, np.array(history, np.int64))
    candidates, scaled = reference_candidates(logits, p, history)
    noise = gumbel(p.seed, position, np.arange(len(values), dtype=np.int64))
    winner = max(sorted(candidates), key=lambda i: scaled[i] + noise[i])
    assert token in candidates
    assert scaled[token] + noise[token] == pytest.approx(scaled[winner] + noise[winner], abs=1e-9)


@given(
    st.lists(st.floats(-200, 200, width=32) | st.just(float("-inf")), min_size=1, max_size=200),
    st.floats(0.01, 10.0),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**20),
)
@settings(max_examples=250, derandomize=True)
def test_pruning_changes_no_draw(values: list[float], temperature: float, seed: int, position: int) -> None:
    logits = f32([*values, 0.0])
    token = draw(logits, SamplingParams(temperature=temperature, seed=seed), position, NOTHING)
    total = logits.astype(np.float64) / temperature + gumbel(seed, position, np.arange(len(logits), dtype=np.int64))
    assert total[token] == pytest.approx(total.max(), rel=1e-9)


@given(logits_lists, params, st.integers(0, 2**20), st.lists(st.integers(0, 39), max_size=10), st.data())
@settings(max_examples=250, derandomize=True)
def test_a_shortlist_draws_as_if_the_others_were_impossible(
    values: list[float], p: SamplingParams, position: int, past: list[int], data: st.DataObject
) -> None:
    logits, history = f32(values), np.array(past, np.int64)
    listed = np.array(sorted(data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1))), np.int64)
    whole = np.full(len(values), -np.inf, np.float32)
    whole[listed] = logits[listed]
    for chosen in (p, replace(p, temperature=0.0)):
        assert draw(logits[listed], chosen, position, history, listed) == draw(whole, chosen, position, history)


@given(logits_lists, st.just(GREEDY) | params, st.integers(0, 5000))
def test_a_margin_changes_no_draw_and_is_what_the_token_was_ahead(
    values: list[float], p: SamplingParams, position: int
) -> None:
    token, margin = draw_with_margin(f32(values), p, position, NOTHING)
    assert token == draw(f32(values), p, position, NOTHING)
    assert margin >= 0.0
    if p.greedy:
        others = [value for index, value in enumerate(values) if index != token]
        assert margin == pytest.approx(values[token] - max(others, default=-math.inf), abs=1e-5)
    elif replace(p, top_k=0, top_p=1.0, min_p=0.0) == p:
        noisy = f32(values) / p.temperature + gumbel(p.seed, position, np.arange(len(values)))
        others = [value for index, value in enumerate(noisy) if index != token]
        assert margin == pytest.approx(noisy[token] - max(others, default=-math.inf), abs=1e-3)


def test_top_k_keeps_the_first_of_equal_logits() -> None:
    logits = f32([1.0, 3.0, 3.0, 3.0, 0.0])
    kept = {draw(logits, SamplingParams(temperature=1.0, top_k=2, seed=1), p, NOTHING) for p in range(200)}
    assert kept == {1, 2}


def test_top_p_keeps_the_token_that_passes_the_share() -> None:
    logits = np.log(f32([0.5, 0.3, 0.15, 0.05]))
    for top_p, expected in ((0.0, {0}), (0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})):
        sampled = SamplingParams(temperature=1.0, top_p=top_p, seed=3)
        assert {draw(logits, sampled, p, NOTHING) for p in range(400)} == expected


def test_min_p_is_a_share_of_the_most_likely() -> None:
    logits = np.log(f32([0.6, 0.31, 0.06, 0.03]))
    kept = {draw(logits, SamplingParams(temperature=1.0, min_p=0.5, seed=3), p, NOTHING) for p in range(300)}
    assert kept == {0, 1}


def test_the_penalty_is_that_of_ctrl() -> None:
    logits = f32([2.0, -1.0, 1.9])
    penalized = SamplingParams(repetition_penalty=2.0)
    assert draw(logits, penalized, 1, np.array([0, 0, 0], np.int64)) == 2
    assert draw(f32([-1.0, -1.5]), penalized, 1, np.array([0], np.int64)) == 1
    assert draw(logits, penalized, 1, NOTHING) == 0
    assert draw(logits, penalized, 1, np.array([-1, 3, 99], np.int64)) == 0, "ids outside the vocabulary count for none"
    assert logits.tolist() == f32([2.0, -1.0, 1.9]).tolist(), "the engine's logits are not written to"


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert draw(f32([1.0, 5.0, 5.0]), GREEDY, 1, NOTHING) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 0.5, 10.0])
def test_one_possible_token_is_drawn_at_any_temperature(temperature: float) -> None:
    for seed in range(20):
        sampled = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, seed=seed)
        assert draw(f32([-math.inf, -math.inf, 3.0, -math.inf]), sampled, seed, NOTHING) == 2
        assert draw(f32([3.0]), sampled, seed, NOTHING) == 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    logits = f32([1.0, 4.0, 3.99, -2.0])
    assert {draw(logits, SamplingParams(temperature=temperature, seed=s), 5, NOTHING) for s in range(50)} == {1}
