"""Encoding of K and V rows for each cache policy; the numerics are in `kernels/kv_reference.py`.

A row is one token's one head: [..., d]. Encoding gives codes [..., d or d/2] and, for the integer policies, meta
[..., 2] = (scale, zero) in the checkpoint's dtype; reading back gives (code − zero) · scale. Knows nothing of
where the codes are kept. Results of a row depend on that row alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mtplab.kernels.kv_reference import decode_integer, encode_float8, encode_integer


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
    """Asymmetric integers per row, with scale and zero beside them."""

    def __init__(self, bits: int):
        self.levels = (1 << bits) - 1
        self.packed = bits == 4

    def code_shape(self, d: int) -> int:
        return d // 2 if self.packed else d

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return encode_integer(rows, self.levels, self.packed, meta_dtype)

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert meta is not None
        return decode_integer(codes, meta, self.packed, dtype)


class _Float8:
    """FP8 with scale 1: clamp to the format's range, cast. No metadata (lmdeploy's buffers are fixed at 1.0)."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def code_shape(self, d: int) -> int:
        return d

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, None]:
        return encode_float8(rows, self.dtype), None

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        return codes.float().to(dtype)


CODECS: dict[str, Codec] = {
    "none": _Plain(),
    "int8": _Integer(8),
    "int4": _Integer(4),
    "fp8_e4m3": _Float8(torch.float8_e4m3fn),
    "fp8_e5m2": _Float8(torch.float8_e5m2),
}
