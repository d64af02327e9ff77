"""How the input of an FP8 product is rounded to E4M3 (W8A8): by groups, by tokens, or by a stored scale.

Knows nothing of weights or checkpoints; `fp8_reference.py` has the numerics.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mtplab.kernels.fp8_reference import round_activation, round_static

__all__ = ["BY_GROUP", "Rounding", "by_group"]


class Rounding(NamedTuple):
    """x [m, k] → codes times scale, [m, k] in the dtype of x; worked in float32."""

    group: int = 128  # columns of a token that share a scale of amax / 448; 0: all of them
    scale: float | None = None  # the one scale of every x, where it is stored: beyond 448 of it, values are cut

    def __call__(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            return round_static(x, self.scale).to(x.dtype)
        return round_activation(x, self.group or x.shape[-1]).to(x.dtype)


BY_GROUP = Rounding()


def by_group(x: Tensor) -> Tensor:
    """What `BY_GROUP` makes of x, without asking how: most products are of this kind, and some take microseconds."""
    return round_activation(x, BY_GROUP.group).to(x.dtype)
