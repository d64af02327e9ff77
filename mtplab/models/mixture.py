"""The mixture of experts in place of an MLP: a router, the experts it chooses, and one that every token goes through.

Knows nothing of files or names, nor of how experts multiply (`quant/experts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mtplab.kernels.gemm_grouped import route
from mtplab.models.layers import MLP
from mtplab.models.part import Part, Swap, SwapExperts
from mtplab.models.rows import by_element
from mtplab.models.spec import MixtureSpec
from mtplab.quant.experts import Experts
from mtplab.quant.linear import PackedLinear

__all__ = ["Mixture", "leave_experts_uncompiled"]


class Mixture(Part):
    """x + Σ wᵢ · expertᵢ(n) + shared(n), for n the normed x; the shared expert times sigmoid(g · n) where it is gated.

    Which experts, and with what weights, `MixtureSpec` says: as in transformers' Qwen3_5MoeTopKRouter (softmax) and
    DeepseekV3TopkRouter (sigmoid, groups). `router` [e, hidden], `shared_gate` [1, hidden], `bias` [e] float32.
    """

    def __init__(
        self,
        spec: MixtureSpec,
        router: PackedLinear,
        experts: Experts,
        shared: MLP | None,
        shared_gate: PackedLinear | None,
        bias: Tensor | None,
    ):
        self.spec, self.router, self.experts, self.shared = spec, router, experts, shared
        self.shared_gate, self.bias = shared_gate, bias

    def __call__(self, residual: Tensor, x: Tensor, rows: int) -> Tensor:
        """residual, x [m, hidden] of which the first `rows` count → [m, hidden]."""
        out = residual.clone() if self.shared is None else self.shared.alone(x)
        if self.shared_gate is not None:
            out.mul_(by_element(torch.sigmoid, self.shared_gate(x)[0].float()).to(x.dtype))
        if self.shared is not None:
            out.add_(residual)
        # over all m: a row's bits must not depend on how many there are
        weights, chosen = self._chosen(self.router(x)[0].float())
        # those past `rows` are nobody's: experts need not multiply them
        self._add_experts(out[:rows], x[:rows], weights.to(x.dtype)[:rows], chosen[:rows])
        return out

    def _chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [m, e] → weights and numbers of the experts of each row [m, top_k]."""
        c = self.spec
        if c.scores == "softmax":
            weights, chosen = logits.softmax(-1).topk(c.top_k, dim=-1)
        else:
            scores = by_element(torch.sigmoid, logits)
            chosen = self._in_groups(scores + self.bias).topk(c.top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        if c.normalised:
            # sigmoids may all be zero; of a softmax's sum so little changes nothing
            weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
        return weights * c.factor if c.factor != 1.0 else weights, chosen

    def _in_groups(self, scores: Tensor) -> Tensor:
        """Scores [m, e], −inf outside each row's best groups."""
        c = self.spec
        if c.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (c.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(c.top_groups, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)

    def _add_experts(self, out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """out [m, hidden] += the chosen experts [m, top_k] by their weights."""
        routing = route(chosen, self.spec.count)
        found = self.experts(x, routing)
        place = torch.empty_like(routing.token)
        place[routing.token * self.spec.top_k + routing.slot] = torch.arange(len(place), device=place.device)
        # one choice after the other: the order of a sum decides its last bits
        for i, slot in enumerate(place.view(-1, self.spec.top_k).unbind(1)):
            out.addcmul_(found[slot], weights[:, i, None])

    def linears(self) -> Iterator[PackedLinear]:
        """Every linear layer of it."""
        yield from super().linears()
        yield from self.experts.linears()

    def _other(self, value: Any, swap: Swap, experts: SwapExperts) -> Any:
        return experts(value, self.spec) if value is self.experts else super()._other(value, swap, experts)


@cache
def leave_experts_uncompiled() -> None:
    """Tells torch.compile to call the experts as they are: how many rows each has is not known when it compiles.

    Called before anything is compiled, and no decorator: `torch.compiler.disable` loads all of torch.compile, which
    takes as long as loading torch itself.
    """
    Mixture._add_experts = torch.compiler.disable(Mixture._add_experts)
