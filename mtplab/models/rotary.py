"""Rotary positions: which frequencies features turn with, cos and sin of every position, and the rotation itself.

Knows nothing of layers: which features of a head turn, and with which numbers, `spec.Rotary` and its caller say.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtplab.models.spec import Llama3, Rotary, Yarn

__all__ = ["frequencies", "rotary_table", "rotate"]


def frequencies(rotary: Rotary, device: torch.device | str = "cpu") -> Tensor:
    """Radians that each pair of features turns a position [dim / 2], float32."""
    half = torch.arange(0, rotary.dim, 2, dtype=torch.float32, device=device)
    plain = 1.0 / (rotary.theta ** (half / rotary.dim))
    match rotary.scaling:
        case None:
            return plain
        case Yarn():
            return _yarn(plain, rotary, rotary.scaling)
        case Llama3():
            return _llama3(plain, rotary.scaling)


def _yarn(plain: Tensor, rotary: Rotary, yarn: Yarn) -> Tensor:
    """Frequencies as they are, divided by the factor, or between (arXiv 2309.00071, definition 2; with bounds as in
    transformers' modeling_rope_utils.py)."""

    def pair_that_turns(times: float) -> float:
        # often in the original context
        return rotary.dim * math.log(yarn.original / (times * 2 * math.pi)) / (2 * math.log(rotary.theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dim - 1)
    span = last - first or 0.001
    pairs = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    scaled = ((pairs - first) / span).clamp(0, 1)
    return plain / yarn.factor * scaled + plain * (1 - scaled)


def _llama3(plain: Tensor, llama: Llama3) -> Tensor:
    """As they are, divided by the factor, or between, by how often they turn in the original context (transformers'
    `_compute_llama3_parameters`)."""
    turns = llama.original * plain / (2 * math.pi)
    kept = ((turns - llama.low) / (llama.high - llama.low)).clamp(0, 1)
    return plain / llama.factor * (1 - kept) + plain * kept


def rotary_table(rotary: Rotary, capacity: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """cos and sin of every position [capacity, 2, 1, dim] for `rotate`, with the sign of the rotation folded in."""
    angle = torch.arange(capacity, dtype=torch.float32, device=device)[:, None] * frequencies(rotary, device)
    cos, sin = angle.cos(), angle.sin()
    if rotary.scaling is not None:
        cos, sin = cos * rotary.scaling.attention, sin * rotary.scaling.attention
    signed = torch.stack([torch.stack([cos, cos], -1), torch.stack([-sin, sin], -1)], 1)  # [.., dim / 2, 2]
    table = signed.flatten(-2) if rotary.interleaved else signed.transpose(-1, -2).flatten(-2)
    return table.to(dtype).unsqueeze(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """x [.., dim] turned in place: x·cos + (x with the features of each pair exchanged)·sin."""
    if interleaved:
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).add_(swapped.mul_(sin))
