"""Block-scaled FP8 matrices: codes and scale together, and the way to and from float.

Knows nothing of checkpoints, names or layers. The numerics are `kernels/fp8_reference.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from mtplab.errors import CheckpointError
from mtplab.kernels import fp8_reference

__all__ = ["BLOCK", "ScaledTensor", "Unread", "quantize_block"]

BLOCK = (128, 128)  # rows and columns that share a scale in the published block-FP8 layout


class ScaledTensor(NamedTuple):
    """FP8 codes [n, k] and the float32 multipliers [ceil(n/bm), ceil(k/bn)] of their (bm, bn) blocks."""

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] = BLOCK

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str) -> ScaledTensor:
        """The same tensor on another device, still FP8."""
        return ScaledTensor(self.data.to(device), self.scale.to(device), self.block)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values [n, k]: the float32 product of code and scale, then rounded once to `dtype`."""
        return fp8_reference.dequantize_block(self.data, self.scale, self.block).to(dtype)


class Unread(NamedTuple):
    """A matrix [n, k] that is not in memory yet: `fill` writes its values where they are wanted, in any dtype and on
    any device. Reading it first and copying it there would hold it twice."""

    shape: tuple[int, int]
    fill: Callable[[torch.Tensor], None]


def quantize_block(weight: torch.Tensor, block: tuple[int, int] = BLOCK, name: str = "the weight") -> ScaledTensor:
    """E4M3 codes of a matrix [n, k], a float32 scale per block: amax / 448, and 1.0 where a block is all
    zero.

    Raises CheckpointError, saying `name`, for a weight that is not 2-D or holds NaN or infinity.
    """
    if weight.dim() != 2:
        raise CheckpointError(f"{name} has shape {list(weight.shape)}, expected 2 dimensions to quantise.")
    data, scale = fp8_reference.quantize_block(weight, block)
    # a NaN or an infinity reaches its block's scale, so looking at the few scales is enough
    if not bool(scale.isfinite().all()):
        bad = ~weight.isfinite()
        raise CheckpointError(
            f"{name}: {int(bad.sum())} of {weight.numel()} values are NaN or infinite, expected none to quantise; "
            f"the first is at {bad.nonzero()[0].tolist()}."
        )
    return ScaledTensor(data, scale, block)
