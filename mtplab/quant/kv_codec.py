"""Encoding of K and V rows for each way of storing them; the numerics are in `kernels/*_reference.py`.

A row is one token's one head: rows are [..., h_kv, d]. Encoding gives codes [..., h_kv, d'] and, where a row has
numbers of its own (scale and zero, or norms), meta [..., h_kv, m] in the checkpoint's dtype. Knows nothing of where the
codes are kept. Results of a row depend on that row alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mtplab.kernels import turboquant_reference as turboquant
from mtplab.kernels.kv_reference import decode_integer, encode_float8, encode_integer
from mtplab.quant.policy import Storage


class Codec(Protocol):
    """How rows become what is stored, and back."""

    def code_shape(self, d: int) -> int:
        """Elements stored for a row of `d` values."""

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the stored elements, where unquantised rows have `value_dtype`."""

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Rows [..., h_kv, d] → (codes, meta [..., h_kv, m] of `meta_dtype`, or None)."""

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What attention reads: [..., h_kv, d] of `dtype`."""


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
    """FP8: divide by the scale, clamp to the format's range, cast; times the scale when read. No metadata.

    `scale` is float32 [1] or [h_kv], or [sides, 1 or h_kv] for rows [sides, ..., h_kv, d] of K and V; None is 1, where
    lmdeploy's buffers are fixed.
    """

    def __init__(self, dtype: torch.dtype, scale: Tensor | None = None):
        self.dtype, self.scale = dtype, scale

    def code_shape(self, d: int) -> int:
        return d

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, None]:
        return encode_float8(rows, self.dtype, 1.0 if self.scale is None else self._spread(rows)), None

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        values = codes.float()
        return (values if self.scale is None else values * self._spread(codes)).to(dtype)

    def _spread(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        shape = self.scale.shape
        return self.scale.view(*shape[:-1], *[1] * (x.dim() - len(shape) - 1), shape[-1], 1)


class _Turbo:
    """Rotated rows as centroids of a normal distribution, `turboquant_reference.py`."""

    def __init__(self, share, encode, decode):
        self.share, self.encode_rows, self.decode_rows = share, encode, decode

    def code_shape(self, d: int) -> int:
        return d // self.share

    def code_dtype(self, value_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.encode_rows(rows, meta_dtype)

    def decode(self, codes: Tensor, meta: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert meta is not None
        return self.decode_rows(codes, meta, dtype)


# by storage; TurboQuant's differ for K and V
CODECS: dict[str, Codec] = {
    "none": _Plain(),
    "int8": _Integer(8),
    "int4": _Integer(4),
    "fp8_e4m3": _Float8(torch.float8_e4m3fn),
    "fp8_e5m2": _Float8(torch.float8_e5m2),
    "turboquant K": _Turbo(2, turboquant.encode_k, turboquant.decode_k),
    "turboquant V": _Turbo(4, turboquant.encode_v, turboquant.decode_v),
}


def codec_of(storage: Storage, scale: Tensor | None = None) -> Codec:
    """The codec of a way of storing rows; `scale` for FP8 only, see `_Float8`."""
    if storage.name == "turboquant":
        return CODECS["turboquant K" if storage.bits == 4 else "turboquant V"]
    found = CODECS[storage.name]
    return found if scale is None else _Float8(found.code_dtype(torch.float32), scale)
