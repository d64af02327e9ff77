"""FP8 matrix products in plain torch: what the GEMM kernels beside this file are compared with.

Codes times scales, then one matrix product. Shapes: m rows of x, n rows of w, k columns of both, e experts, t rows of x
sorted by expert. Knows nothing of tiles.
"""

from __future__ import annotations

import itertools

import torch

from mtplab.kernels.fp8_reference import dequantize_block

__all__ = ["gemm_block_reference", "gemm_grouped_reference", "gemm_scaled_reference"]


def gemm_block_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x [m, k] with scales [m, ceil(k / 128)], w [n, k] with scales [ceil(n / 128), ceil(k / 128)] → [m, n] of `dtype`,
    in which it is computed; each dequantised value is rounded to float32.
    """
    left = dequantize_block(x, x_scale, (1, 128)).to(dtype)
    y = left @ dequantize_block(w, w_scale, (128, 128)).to(dtype).T
    return y if residual is None else y + residual.to(dtype)


def gemm_scaled_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x [m, k] with one scale or [m, 1], w [n, k] with one scale or [n, 1] → [m, n] of `dtype`."""
    left = x.to(dtype) * x_scale.to(dtype).reshape(-1, 1)
    return left @ (w.to(dtype) * w_scale.to(dtype).reshape(-1, 1)).T


def gemm_grouped_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x [t, k] sorted by expert, w [e, n, k]; rows offsets[i] to offsets[i + 1] are expert i's → [t, n] of `dtype`."""
    y = torch.zeros(x.shape[0], w.shape[1], dtype=dtype, device=x.device)
    for expert, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        rows = slice(first, last)
        y[rows] = gemm_block_reference(x[rows], x_scale[rows], w[expert], w_scale[expert], None, dtype)
    return y
