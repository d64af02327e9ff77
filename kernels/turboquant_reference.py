"""TurboQuant's cache numerics in plain torch, as lmdeploy's policy 42 has them. There is no kernel for it.

A row is one token's one head, [..., d], d a power of two from 4 on. Rows are rotated by the normalised Walsh–Hadamard
matrix, divided by their norm, and each element becomes the index of a centroid of N(0, 1/d): 3 bits for K, with one
more for the sign of what the centroid leaves, 2 bits for V. Read back is norm · centroid, for K norm · (centroid +
residual · sign), rotated back. lmdeploy leaves both in the rotated space and rotates the query and the output instead:
the same numbers but for rounding. Formulas: its `kernels/cuda/fill_kv_cache.py` and `flatten_kv_cache.py`.

A row's codes depend on that row alone, to the last bit: every sum is a fixed tree of additions of whole tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CENTROIDS", "decode_k", "decode_v", "encode_k", "encode_v", "rotate"]

# The upper half of the Lloyd-Max codebooks of N(0, 1), which are symmetric, and the middles between neighbours, as
# lmdeploy spells them.
CENTROIDS = {
    2: (0.4527808, 1.5104176),
    3: (0.2450942, 0.7560052, 1.3439093, 2.1519456),
}
BOUNDARIES = {
    2: (0.0, 0.9815992),
    3: (0.0, 0.5005497, 1.0499573, 1.7479274),
}
_TINY = 1e-8  # under lmdeploy's roots: a row of zeros has a norm of 1e-4, and reads back as nearly nothing


def rotate(x: Tensor) -> Tensor:
    """x [..., d] times the normalised Walsh–Hadamard matrix, in float32: symmetric and orthonormal, its own inverse."""
    d = x.shape[-1]
    assert d >= 1 and d & (d - 1) == 0, d
    out = x.float()
    step = 1
    while step < d:
        pairs = out.unflatten(-1, (d // (2 * step), 2, step))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    return out * d**-0.5


def encode_k(rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [..., d] → uint8 codes [..., d/2] and meta [..., 2] = (norm of the row, norm of what is left over √d).

    A code is index + 8 · (left ≥ 0); element i shares a byte with element i + d/2, the first in the low half.
    """
    unit, norm, index = _nearest(rows, 3)
    left = unit - _table(3, unit)[index]
    # by a tensor: by a number a GPU would multiply with its reciprocal
    root = torch.full_like(norm, left.shape[-1]).sqrt()
    spread = (_sum(left * left) + _TINY).sqrt() / root
    codes = index.to(torch.uint8) + (left >= 0).to(torch.uint8) * 8
    first, second = codes.chunk(2, dim=-1)
    return first + second * 16, _stored(torch.cat([norm, spread], dim=-1), meta_dtype)


def decode_k(codes: Tensor, meta: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [..., d/2] and meta [..., 2] → rows [..., d] of `dtype`."""
    nibbles = torch.cat([codes & 15, codes >> 4], dim=-1)
    norm, spread = meta.float().split(1, dim=-1)
    sign = (nibbles >> 3).float() * 2 - 1
    return rotate((_table(3, sign)[(nibbles & 7).long()] + spread * sign) * norm).to(dtype)


def encode_v(rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [..., d] → uint8 codes [..., d/4] and meta [..., 1], the row's norm. Elements i, i + d/4, i + d/2 and
    i + 3d/4 share byte i, the first in the lowest bits."""
    _, norm, index = _nearest(rows, 2)
    parts = index.to(torch.uint8).chunk(4, dim=-1)
    return parts[0] + parts[1] * 4 + parts[2] * 16 + parts[3] * 64, _stored(norm, meta_dtype)


def decode_v(codes: Tensor, meta: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [..., d/4] and meta [..., 1] → rows [..., d] of `dtype`."""
    index = torch.cat([codes >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return rotate(_table(2, index)[index.long()] * meta.float()).to(dtype)


def _nearest(rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rotated rows over their norm, the norm [..., 1], the centroid's index [..., d]). A NaN has index 0."""
    # rounded to the rows' own dtype on the way, as lmdeploy's rotation rounds them
    x = rotate(rows).to(rows.dtype).float()
    norm = (_sum(x * x) + _TINY).sqrt()
    unit, upper = x / norm, BOUNDARIES[bits]
    bounds = _spread([*(-b for b in reversed(upper[1:])), *upper], x)
    index = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    for bound in bounds:
        index += unit > bound
    return unit, norm, index


def _sum(x: Tensor) -> Tensor:
    """Sums of rows [..., 1], halves added to halves: an order that no neighbour changes."""
    while x.shape[-1] > 1:
        first, second = x.chunk(2, dim=-1)
        x = first + second
    return x


def _stored(meta: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return meta.clamp_(-top, top).to(dtype)


def _table(bits: int, like: Tensor) -> Tensor:
    """The codebook for rows as long as those of `like`."""
    upper = CENTROIDS[bits]
    return _spread([*(-c for c in reversed(upper)), *upper], like)


def _spread(values: list[float], like: Tensor) -> Tensor:
    """Numbers of N(0, 1) for elements of variance 1/d."""
    return torch.tensor(values, dtype=torch.float32, device=like.device) * like.shape[-1] ** -0.5
