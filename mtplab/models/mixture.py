"""The mixture of experts in place of an MLP: a router, the experts it chooses, and one that every token goes through.

Knows nothing of files or names, nor of how experts multiply (`quant/experts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtplab.kernels.gemm_grouped import route
from mtplab.models.layers import MLP
from mtplab.quant.experts import Experts
from mtplab.quant.linear import PackedLinear

__all__ = ["Mixture"]


class Mixture:
    """x + Σ wᵢ · expertᵢ(n) + sigmoid(g · n) · shared(n), for n the normed x.

    The weights are the softmax over all e experts, of which the `top_k` largest are taken and made to sum to 1, as in
    transformers' Qwen3_5MoeTopKRouter. `router` [e, hidden], `shared_gate` [1, hidden].
    """

    def __init__(
        self, router: PackedLinear, experts: Experts, shared: MLP, shared_gate: PackedLinear, count: int, top_k: int
    ):
        self.router, self.experts, self.shared, self.shared_gate = router, experts, shared, shared_gate
        self.count, self.top_k = count, top_k

    def __call__(self, residual: Tensor, x: Tensor, rows: int) -> Tensor:
        """residual, x [m, hidden] of which the first `rows` count → [m, hidden]."""
        share = self.shared_gate(x)[0].float().sigmoid_().to(x.dtype)
        out = self.shared.alone(x).mul_(share).add_(residual)
        # over all m: a row's bits must not depend on how many there are
        weights, chosen = self.router(x)[0].float().softmax(-1).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        # those past `rows` are nobody's: experts need not multiply them
        self._add_experts(out[:rows], x[:rows], weights[:rows], chosen[:rows])
        return out

    @torch.compiler.disable
    def _add_experts(self, out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """out [m, hidden] += the chosen experts [m, top_k] by their weights."""
        routing = route(chosen, self.count)
        found = self.experts(x, routing)
        place = torch.empty_like(routing.token)
        place[routing.token * self.top_k + routing.slot] = torch.arange(len(place), device=place.device)
        # one choice after the other: the order of a sum decides its last bits
        for i, slot in enumerate(place.view(-1, self.top_k).unbind(1)):
            out.addcmul_(found[slot], weights[:, i, None])

    def linears(self) -> Iterator[PackedLinear]:
        """Every linear layer of it."""
        yield from (self.router, self.shared_gate, *self.shared.linears(), *self.experts.linears())
