"""Muon for the weight matrices, AdamW for everything else. This module does not know what the parameters are part of.

Muon: K. Jordan, "Muon: an optimizer for hidden layers" (2024): Nesterov momentum, then five Newton-Schulz steps towards
the nearest semi-orthogonal matrix.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """g [n, k] with its singular values pushed towards one, in BF16 (the iteration is self-correcting)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = g.shape[0] <= g.shape[1]
    x = (g if wide else g.t()).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x if wide else x.t()).float()


class Muon(torch.optim.Optimizer):
    """`lr` is the spectral size of one update, times sqrt(max(1, n / k))."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum, "base": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(torch.lerp(p.grad, buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def make_optimizers(named: dict[str, nn.Parameter], muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the projections (2-D, at least 64 rows, not the embedding), AdamW on the rest."""
    matrices = {n: p for n, p in named.items() if p.ndim == 2 and p.shape[0] >= 64 and "embed" not in n}
    rest = [p for n, p in named.items() if n not in matrices]
    adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for group in adam.param_groups:
        group["base"] = adam_lr
    return [Muon(list(matrices.values()), lr=muon_lr), adam]


def descend(
    optimizers: list[torch.optim.Optimizer], params: Iterable[nn.Parameter], loss: Tensor, factor: float
) -> float:
    """One step down `loss`, its gradient clipped to norm 1, at `factor` of the base rates. Returns the norm before."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([p for p in params if p.requires_grad], 1.0)
    set_rate(optimizers, factor)
    for optimizer in optimizers:
        optimizer.step()
    return norm.item()


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Every learning rate becomes its base value times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * factor
