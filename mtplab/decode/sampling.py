"""From logits to a distribution, and from a distribution and a uniform number to a token.

Knows nothing of drafts: the same functions serve the target (p) and the draft (q).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtplab.config import SamplingConfig
from mtplab.kernels.acceptance_reference import draw


def distribution(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Probabilities [.., v], float64, after temperature, then top-k, then top-p (the order of vLLM and Hugging Face).

    temperature must be above 0. Top-k keeps ties with the k-th; top-p keeps the smallest set of likeliest tokens whose
    mass reaches p (as float64 adds it up, so a sum that should equal p may fall just short), at least one.
    """
    assert sampling.temperature > 0
    # from the likeliest down, so that a tiny temperature overflows to −∞ and never to NaN
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / sampling.temperature
    v = scaled.shape[-1]
    if 0 < sampling.top_k < v:
        floor = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    probs = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        # drop a token when what comes before it already reaches p
        drop = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.masked_fill(torch.zeros_like(drop).scatter_(-1, index, drop), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling, as the acceptance kernel draws: weights [.., v] in [0, 1] that add up to at most about 1,
    uniforms [..] in [0, 1), float64 → token ids [..], 0 where there is nothing to draw from.
    """
    return draw(weights, uniforms).clamp_min_(0)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token, the lowest id among ties: logits [.., v] → [..]."""
    return logits.argmax(-1)
