"""Linear layers that share one input: their weights side by side, with W8A8 activation rounding where asked.

Knows nothing of checkpoints or layers. On a CPU weights are dequantised once, at load; on a GPU they stay FP8 in memory
and are dequantised by the product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.kernels.fp8_reference import round_activation
from mtplab.quant.block import ScaledTensor

ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class LinearWeight:
    """One weight [n, k] of a product x · wᵀ, and whether x is rounded to FP8 before it (W8A8)."""

    name: str
    value: Tensor | ScaledTensor
    rounded: bool

    @property
    def out_features(self) -> int:
        """n, the number of output features."""
        return (self.value.data if isinstance(self.value, ScaledTensor) else self.value).shape[0]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight's values [n, k] in `dtype`."""
        return self.value.dequantize(dtype) if isinstance(self.value, ScaledTensor) else self.value.to(dtype)


class PackedLinear:
    """Several weights applied to one input with as few products as their treatment allows.

    Members whose input is rounded share one rounding and one GEMM, the others one more; `__call__` returns the
    members' outputs in the order given.
    """

    def __init__(self, members: list[LinearWeight], dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        kept = list(members)
        self._parts: list[tuple[bool, list[int], Tensor | tuple[Tensor | ScaledTensor, ...], list[int]]] = []
        for rounded in (True, False):
            chosen = [i for i, m in enumerate(members) if m.rounded is rounded]
            if not chosen:
                continue
            sizes = [members[i].out_features for i in chosen]
            if device.type == "cpu":
                weight = torch.cat([members[i].dense(dtype) for i in chosen])
                values = weight.split(sizes)
            else:
                weight = values = tuple(members[i].value.to(device) for i in chosen)
            for i, value in zip(chosen, values, strict=True):
                kept[i] = replace(members[i], value=value)
            self._parts.append((rounded, chosen, weight, sizes))
        # the members as they are held: views of the packed weight, so that nothing is kept twice
        self.members = tuple(kept)

    def _products(self, x: Tensor):
        for rounded, chosen, weight, sizes in self._parts:
            # the rounding is worked in float32 and comes back in the dtype of x
            inputs = round_activation(x, ACTIVATION_GROUP).to(x.dtype) if rounded else x
            yield inputs, chosen, weight, sizes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [m, k] → one tensor [m, n_i] per member."""
        outs: list[Tensor | None] = [None] * len(self.members)
        for inputs, chosen, weight, sizes in self._products(x):
            if isinstance(weight, Tensor):
                parts = F.linear(inputs, weight).split(sizes, dim=-1) if len(sizes) > 1 else [F.linear(inputs, weight)]
            else:
                parts = [F.linear(inputs, _dense(w, self.dtype)) for w in weight]
            for i, part in zip(chosen, parts, strict=True):
                outs[i] = part
        return tuple(outs)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [m, n] + the only member's product, in one operator."""
        ((inputs, _, weight, _),) = self._products(x)
        dense = weight if isinstance(weight, Tensor) else _dense(weight[0], self.dtype)
        return torch.addmm(residual, inputs, dense.t())


def _dense(weight: Tensor | ScaledTensor, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, ScaledTensor) else weight.to(dtype)
