"""silu(gate) · up, what an MLP's and an expert's two first products become; clamped where a family says so.

Knows nothing of the products.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["gated"]


def gated(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """Of one shape, and new. `limit`: silu(gate) is at most that, up at most that far from 0 (Step-3.5's
    `swiglu_limits`)."""
    opened = F.silu(gate)
    if limit is None:
        return opened.mul_(up)
    return opened.clamp_(max=limit).mul_(up.clamp(-limit, limit))
