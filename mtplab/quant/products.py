"""One matrix product x · wᵀ with a weight held the way its device likes best.

Knows nothing of names, activations or what the product is for. On a CPU in float32 the weight is packed once
(`cpu_products.py`); on a GPU FP8 codes stay FP8 (`fp8_products.py`); anything else stays as it is.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.quant.block import ScaledTensor, Unread
from mtplab.quant.cpu_products import packed_product
from mtplab.quant.fp8_products import Fp8Gemm, Fp8Product, Fp8ScaledGemm, uses_kernels
from mtplab.quant.rounding import BY_GROUP, Rounding, by_group


class Product(Protocol):
    """x [m, k] → x · wᵀ [m, n]."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [m, n] + the product."""

    def dense(self) -> Tensor:
        """The weight's values [n, k]."""

    def prepare_compiled(self) -> None:
        """Get ready for passes under torch.compile."""


class RoundedProduct:
    """Another product of x rounded to E4M3 (W8A8)."""

    def __init__(self, product: Product, rounding: Rounding):
        self._product = product
        self._round = by_group if rounding == BY_GROUP else rounding

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(self._round(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._product.add_to(residual, self._round(x))

    def dense(self) -> Tensor:
        return self._product.dense()

    def prepare_compiled(self) -> None:
        self._product.prepare_compiled()


class DenseProduct:
    """Any device and dtype: weight [n, k] as torch keeps it."""

    def __init__(self, weight: Tensor):
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(residual, x, self._weight.t())

    def dense(self) -> Tensor:
        return self._weight

    def prepare_compiled(self) -> None:
        pass


def make_product(
    weights: list[Tensor | ScaledTensor | Unread],
    dtype: torch.dtype,
    device: torch.device,
    rounding: Rounding | None = None,
) -> Product:
    """The product with these weights one below the other, computed in `dtype` on `device`; `rounding`: x in FP8 too."""
    if all(isinstance(w, ScaledTensor) for w in weights):
        on_device = [w.to(device) for w in weights]
        if rounding is not None and uses_kernels(device):
            if all(Fp8Gemm.takes(w, rounding) for w in weights):
                return Fp8Gemm(on_device, dtype)
            if all(Fp8ScaledGemm.takes(w, rounding) for w in weights):
                return Fp8ScaledGemm(on_device, dtype, rounding)
        if device.type != "cpu":
            return _rounded(Fp8Product(on_device, dtype), rounding)
    return _rounded(_dense(weights, dtype, device), rounding)


def _rounded(product: Product, rounding: Rounding | None) -> Product:
    return RoundedProduct(product, rounding) if rounding is not None else product


def keeps_codes(device: torch.device) -> bool:
    """Whether FP8 weights stay FP8 in memory; elsewhere their values are what is held."""
    return device.type != "cpu" or uses_kernels(device)


def _dense(weights: list[Tensor | ScaledTensor | Unread], dtype: torch.dtype, device: torch.device) -> Product:
    weight, own = _joined(weights, dtype, device)
    packed = packed_product(weight, own) if device.type == "cpu" and dtype == torch.float32 else None
    return packed or DenseProduct(weight)


def _joined(
    weights: list[Tensor | ScaledTensor | Unread], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, bool]:
    """Values [n, k], one weight below the other, each written once to where it stays; and whether nobody else has them.
    Peak memory is that of the result."""
    first = weights[0]
    if len(weights) == 1 and isinstance(first, Tensor):
        weight = first.to(dtype).to(device)
        return weight, weight is not first
    out = torch.empty(sum(w.shape[0] for w in weights), first.shape[1], dtype=dtype, device=device)
    for w, rows in zip(weights, out.split([w.shape[0] for w in weights]), strict=True):
        if isinstance(w, Unread):
            w.fill(rows)
        else:
            rows.copy_(w.dequantize(dtype) if isinstance(w, ScaledTensor) else w)
    return out, True
