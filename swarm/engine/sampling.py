"""Drawing a token from logits, so that the draw depends on seed and absolute position alone.

The Gumbel-max trick (Gumbel 1954; Maddison et al., "A* Sampling", 2014): the token with the largest ``logit/T + noise``
is a draw from the softmax. The noise of a token is a hash of (seed, position, token), so the target's token at a
position does not depend on how it was reached, and verification of drafts is token equality at any temperature.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarm.protocol.sampling import SamplingParams
from swarm.protocol.tensors import Array

_MAX_NOISE_SPAN = 41.0
"""Gumbel noise from 52-bit uniforms lies in (-3.7, 36.8): a logit this far below the best can never win."""


def draw(logits: Array, params: SamplingParams, position: int, history: Array) -> int:
    """One token from ``[vocabulary]`` f32 logits.

    `position` is the absolute position of the token drawn; `history` the ids before it, for the penalty.
    """
    if params.repetition_penalty != 1.0 and len(history):
        logits = _penalized(logits, history, params.repetition_penalty)
    if params.greedy:
        return int(logits.argmax())
    ids, scaled = _candidates(logits, params)
    noise = gumbel(params.seed, position, ids)
    return int(ids[(scaled + noise).argmax()])


def _penalized(logits: Array, history: Array, penalty: float) -> Array:
    """CTRL's repetition penalty (Keskar et al. 2019), as in Hugging Face transformers."""
    seen = np.unique(history)
    seen = seen[(seen >= 0) & (seen < len(logits))]
    changed = logits.astype(np.float32, copy=True)
    values = changed[seen]
    changed[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
    return changed


def _candidates(logits: Array, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Token ids that may be drawn, and their logits over temperature, after top-k, top-p and min-p in that order."""
    # Below the best, not from zero: a tiny temperature would make several logits infinite, and so equal.
    values = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        scaled = (values - values.max()) / params.temperature
    ids = np.flatnonzero(scaled >= -_MAX_NOISE_SPAN)
    if params.top_k and params.top_k < len(ids):
        ids = ids[_largest(scaled[ids], params.top_k)]
    if params.top_p < 1.0:
        weights = np.exp(scaled[ids])
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order])
        keep = int(np.searchsorted(mass, params.top_p * mass[-1])) + 1
        ids = np.sort(ids[order[:keep]])
    if params.min_p > 0.0:
        ids = ids[np.exp(scaled[ids]) >= params.min_p]
    return ids, scaled[ids]


def _largest(values: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest values in ascending index order; of equal ones the first."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


def gumbel(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each token id, a pure function of its arguments."""
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        key = _mix(key ^ np.uint64(position))
        bits = _mix(_mix(key + ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)))
    # With one bit more the half would round the largest up to 1, whose noise is infinite.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
