"""Encoding of K and V rows for each cache policy, with lmdeploy's numerics (its `fill_kv_cache` kernels).

A row is one token's one head: [..., d]. Encoding gives codes [..., d or d/2] and, for the integer policies, meta
[..., 2] = (scale, zero) in the checkpoint's dtype; reading back gives (code − zero) · scale. Knows nothing of
where the codes are kept. Results of a row depend on that row alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """How one policy turns rows into what is stored, and back."""

    def code_shape(self, d: int) -> int:
        """Elements stored for a row of `d` values."""

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the stored elements, where unquantised rows have `value_dtype`."""

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Rows [..., d] → (codes, meta [..., 2] of `meta_dtype`, or None)."""

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What attention reads: [..., d] of `dtype`."""


class _Plain:
    """Rows as they are."""

    def code_shape(self, d: int) -> int:
        return d

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        return value_dtype

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, None]:
        return rows, None

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype)


class _Integer:
    """Asymmetric integers per row: scale = (max − min)/levels, zero = −min/scale, q = trunc(x/scale + zero + ½).

    A constant row has scale 0 in that formula; it gets scale 1 and zero −min, so that code 0 reads back as the row.
    Scale and zero are rounded to the checkpoint's dtype, as they are stored, before codes are made with them:
    lmdeploy keeps them in the model's dtype, and a code made with one scale and read with another would be off.
    """

    def __init__(self, bits: int):
        self.levels = (1 << bits) - 1
        self.packed = bits == 4

    def code_shape(self, d: int) -> int:
        return d // 2 if self.packed else d

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = rows.float()
        low, high = x.aminmax(dim=-1, keepdim=True)
        scale = (high - low).div_(self.levels)
        # a range below the stored dtype's smallest step, or a zero beyond its largest number, is as constant as a tie
        constant = (scale.to(meta_dtype) == 0) | (low.abs() > scale * torch.finfo(meta_dtype).max)
        scale = scale.masked_fill_(constant, 1.0)
        zero = -low / scale
        top = torch.finfo(meta_dtype).max  # a row beyond what the stored dtype holds reads back as its largest number
        meta = torch.cat([scale, zero], dim=-1).clamp_(-top, top).to(meta_dtype)
        scale, zero = meta.float().split(1, dim=-1)
        codes = (x / scale).add_(zero).add_(0.5).trunc_().clamp_(0, self.levels)
        codes = codes.masked_fill_(constant, 0.0).to(torch.uint8)
        if self.packed:
            # split-half packing: element d shares a byte with element d + head_dim/2
            first, second = codes.chunk(2, dim=-1)
            codes = first + second * 16
        return codes, meta

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert meta is not None
        if self.packed:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        scale, zero = meta.float().split(1, dim=-1)
        return codes.float().sub_(zero).mul_(scale).to(dtype)


class _Float8:
    """FP8 with scale 1: clamp to the format's range, cast. No metadata (lmdeploy's buffers are fixed at 1.0)."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.top = dtype, torch.finfo(dtype).max

    def code_shape(self, d: int) -> int:
        return d

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, None]:
        return rows.float().clamp(-self.top, self.top).to(self.dtype), None

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        return codes.float().to(dtype)


CODECS: dict[str, Codec] = {
    "none": _Plain(),
    "int8": _Integer(8),
    "int4": _Integer(4),
    "fp8_e4m3": _Float8(torch.float8_e4m3fn),
    "fp8_e5m2": _Float8(torch.float8_e5m2),
}
