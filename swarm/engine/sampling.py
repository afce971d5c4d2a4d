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


def draw(logits: Array, params: SamplingParams, position: int, history: Array, listed: Array | None = None) -> int:
    """One token from ``[vocabulary]`` f32 logits, or from those of the ids `listed` alone.

    `position` is the absolute position of the token drawn; `history` the ids before it, for the penalty.
    """
    ids, scores = _scores(logits, params, position, history, listed)
    best = int(scores.argmax())
    return best if ids is None else int(ids[best])


def draw_with_margin(
    logits: Array, params: SamplingParams, position: int, history: Array, listed: Array | None = None
) -> tuple[int, float]:
    """As `draw`; and how far the token is ahead of the next, in logits (over temperature) with their noise."""
    ids, scores = _scores(logits, params, position, history, listed)
    best = int(scores.argmax())
    others = max(scores[:best].max(initial=-np.inf), scores[best + 1 :].max(initial=-np.inf))
    return best if ids is None else int(ids[best]), float(scores[best] - others)


def _scores(
    logits: Array, params: SamplingParams, position: int, history: Array, listed: Array | None
) -> tuple[Array | None, Array]:
    """Ids and what they score, None for all in order; the best is drawn."""
    if params.repetition_penalty != 1.0 and len(history):
        seen = np.unique(history)
        seen = seen[(seen >= 0) & (seen < len(logits))] if listed is None else np.flatnonzero(np.isin(listed, seen))
        logits = _penalized(logits, seen, params.repetition_penalty)
    if params.greedy:
        return listed, logits
    ids, scaled = _candidates(logits, params)
    ids = ids if listed is None else listed[ids]
    return ids, scaled + gumbel(params.seed, position, ids)


def _penalized(logits: Array, seen: Array, penalty: float) -> Array:
    """CTRL's repetition penalty (Keskar et al. 2019), as in Hugging Face transformers."""
    changed = logits.astype(np.float32, copy=True)
    values = changed[seen]
    changed[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
    return changed


def _candidates(logits: Array, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Token ids that may be drawn, and their logits over temperature, after top-k, top-p and min-p in that order."""
    best = float(logits.max())
    # Few of 100,000 are looked at in f64: a little more is let through than may win, for what f32 rounds.
    least = np.nextafter(np.float32(best - 1.001 * _MAX_NOISE_SPAN * params.temperature), np.float32(-np.inf))
    ids = np.flatnonzero(logits >= least)
    # Below the best, not from zero: a tiny temperature would make several logits infinite, and so equal.
    with np.errstate(over="ignore"):
        scaled = (logits[ids].astype(np.float64) - best) / params.temperature
    kept = np.flatnonzero(scaled >= -_MAX_NOISE_SPAN)
    if params.top_k and params.top_k < len(kept):
        kept = kept[_largest(scaled[kept], params.top_k)]
    if params.top_p < 1.0:
        weights = np.exp(scaled[kept])
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order])
        keep = int(np.searchsorted(mass, params.top_p * mass[-1])) + 1
        kept = np.sort(kept[order[:keep]])
    if params.min_p > 0.0:
        kept = kept[np.exp(scaled[kept]) >= params.min_p]
    return ids[kept], scaled[kept]


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
