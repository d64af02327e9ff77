"""A projection from one row to keys and values of every head, multiplied from either side head by head.

Multi-head latent attention never makes those keys and values (`models/latent.py`): queries go through the keys' half
backwards, and what was attended to goes through the values' half. Knows nothing of attention.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from mtplab.quant.linear import PackedLinear

__all__ = ["HeadwiseLinear"]


class HeadwiseLinear(PackedLinear):
    """Weight [h·(dk + dv), r], each head's dk rows for its key above its dv rows for its value, held as two stacks of
    matrices in the compute dtype, on every device. No input of it is rounded, whatever the plan says: there is none."""

    def __init__(self, name: str, keys: Tensor, values: Tensor):
        """keys [h, dk, r]; values [h, r, dv]."""
        self.names, self.rounded, self._keys, self._values = (name,), (False,), keys, values

    @classmethod
    def of(cls, packed: PackedLinear, heads: int, key_dim: int) -> Self:
        """The same weight as a packed linear layer's only one."""
        if isinstance(packed, cls):
            return packed
        (weight,) = packed.weights()
        keys, values = weight.view(heads, -1, weight.shape[1]).tensor_split([key_dim], dim=1)
        return cls(packed.names[0], keys.contiguous(), values.transpose(1, 2).contiguous())

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [m, r] → keys and values [m, h·(dk + dv)]."""
        return (torch.nn.functional.linear(x, *self.weights()),)

    def joined(self, x: Tensor) -> Tensor:
        """The same: there is one member."""
        return self(x)[0]

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + that."""
        return residual + self(x)[0]

    def prepare_compiled(self) -> None:
        """Nothing is packed."""

    def weights(self) -> list[Tensor]:
        """[h·(dk + dv), r]."""
        return [torch.cat([self._keys, self._values.transpose(1, 2)], dim=1).flatten(0, 1)]

    def through_keys(self, q: Tensor) -> Tensor:
        """Queries q [m, h, dk] → [m, h, r], whose products with rows are q's with the keys made of those."""
        return torch.bmm(q.transpose(0, 1), self._keys).transpose(0, 1)

    def through_values(self, mixed: Tensor) -> Tensor:
        """Sums of rows, mixed [m, h, r] → [m, h, dv], the same sums of the values made of those."""
        return torch.bmm(mixed.transpose(0, 1), self._values).transpose(0, 1)
