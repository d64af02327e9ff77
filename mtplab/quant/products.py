"""One matrix product x · wᵀ with a weight held the way its device likes best.

Knows nothing of names, activations or what the product is for. On a CPU in float32 the weight is packed once
(`cpu_products.py`); on a GPU FP8 codes stay FP8 (`fp8_products.py`); anything else stays as it is.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.kernels.fp8_reference import round_activation
from mtplab.quant.block import ScaledTensor
from mtplab.quant.cpu_products import packed_product
from mtplab.quant.fp8_products import ACTIVATION_GROUP, Fp8Gemm, Fp8Product, uses_kernels


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
    """Another product of x rounded to FP8 (W8A8): E4M3, one scale a token and 128 values."""

    def __init__(self, product: Product):
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(_round(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._product.add_to(residual, _round(x))

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
    weights: list[Tensor | ScaledTensor], dtype: torch.dtype, device: torch.device, rounded: bool = False
) -> Product:
    """The product with these weights one below the other, computed in `dtype` on `device`; `rounded`: x in FP8 too."""
    if all(isinstance(w, ScaledTensor) for w in weights):
        on_device = [w.to(device) for w in weights]
        if rounded and uses_kernels(device) and all(Fp8Gemm.takes(w) for w in weights):
            return Fp8Gemm(on_device, dtype)
        if device.type != "cpu":
            return _rounding(Fp8Product(on_device, dtype), rounded)
    return _rounding(_dense(weights, dtype, device), rounded)


def _rounding(product: Product, rounded: bool) -> Product:
    return RoundedProduct(product) if rounded else product


def _dense(weights: list[Tensor | ScaledTensor], dtype: torch.dtype, device: torch.device) -> Product:
    dense = [(w.dequantize(dtype) if isinstance(w, ScaledTensor) else w.to(dtype)).to(device) for w in weights]
    weight = torch.cat(dense) if len(dense) > 1 else dense[0]
    packed = packed_product(weight) if device.type == "cpu" and dtype == torch.float32 else None
    return packed or DenseProduct(weight)


def _round(x: Tensor) -> Tensor:
    # worked in float32, back in the dtype of x
    return round_activation(x, ACTIVATION_GROUP).to(x.dtype)
