"""Linear layers that share one input: their weights side by side, with W8A8 activation rounding where asked.

Knows nothing of checkpoints or layers. On a CPU weights are dequantised once, at load; on a GPU they stay FP8 in memory
(`products.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtplab.quant.block import ScaledTensor, Unread
from mtplab.quant.products import Product, make_product
from mtplab.quant.rounding import BY_GROUP, Rounding


@dataclass(frozen=True)
class LinearWeight:
    """One weight [n, k] of a product x · wᵀ, and whether x is rounded to FP8 before it (W8A8), and how."""

    name: str
    value: Tensor | ScaledTensor | Unread
    rounded: bool
    rounding: Rounding = BY_GROUP


@dataclass(frozen=True)
class _Part:
    """Members with the same treatment: one product, which rounds its input or does not."""

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    product: Product


class PackedLinear:
    """Several weights applied to one input with as few products as their treatment allows.

    Members whose input is rounded alike share one rounding and one GEMM, those with none another; `__call__` returns
    the members' outputs in the order given. Only the products hold weights.
    """

    def __init__(self, weights: list[LinearWeight], dtype: torch.dtype, device: torch.device):
        self.names = tuple(w.name for w in weights)
        self.rounded = tuple(w.rounded for w in weights)
        self._parts: list[_Part] = []
        treatments = [w.rounding if w.rounded else None for w in weights]
        for rounding in sorted(dict.fromkeys(treatments), key=lambda treatment: treatment is None):
            chosen = tuple(i for i, treatment in enumerate(treatments) if treatment == rounding)
            sizes = tuple(weights[i].value.shape[0] for i in chosen)
            product = make_product([weights[i].value for i in chosen], dtype, device, rounding)
            self._parts.append(_Part(chosen, sizes, product))

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [m, k] → one tensor [m, n_i] per member."""
        if len(self._parts) == 1:  # every member alike: their order is the weight's
            (part,) = self._parts
            out = part.product(x)
            # Tensor.split is a Python function that costs more than a small operator
            return torch.split_with_sizes(out, part.sizes, dim=-1) if len(part.sizes) > 1 else (out,)
        found = dict(self._outputs(x))
        return tuple(found[i] for i in range(len(self.names)))

    def joined(self, x: Tensor) -> Tensor:
        """x [m, k] → [m, Σ n_i], the members' outputs side by side."""
        if len(self._parts) == 1:
            return self._parts[0].product(x)
        return torch.cat(self(x), dim=-1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [m, n] + the only member's product, in one operator."""
        (part,) = self._parts
        return part.product.add_to(residual, x)

    def prepare_compiled(self) -> None:
        """Get ready for passes under torch.compile."""
        for part in self._parts:
            part.product.prepare_compiled()

    def weights(self) -> list[Tensor]:
        """Each member's values [n_i, k], dequantised, in the compute dtype."""
        found: dict[int, Tensor] = {}
        for part in self._parts:
            found |= dict(zip(part.members, part.product.dense().split(part.sizes), strict=True))
        return [found[i] for i in range(len(self.names))]

    def _outputs(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        for part in self._parts:
            out = part.product(x)
            yield from zip(part.members, out.split(part.sizes, dim=-1), strict=True)
