"""The gated delta rule and its short convolution in plain torch: what the kernels beside this file are compared with.

In the dtype of its inputs, float64 included. Knows nothing of layers, caches or weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["conv_reference", "delta_rule_reference"]


def delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, normalize: bool, scale: float,
    eps: float, kept: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token, as the formula stands.

        S_t = exp(g_t) · S_{t−1} + k_t ⊗ β_t (v_t − exp(g_t) · k_tᵀ S_{t−1}),     o_t = q_tᵀ S_t

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, eq. 10), with q and k divided by √(Σ x² + eps) first if
    `normalize`, and q times `scale`. Shapes as `delta_rule.delta_rule`'s, all of one dtype; state [b · h_v, dk, dv]. A
    state is rounded to `kept`, if given, once o has been read from it and before the next token.

    Returns: o [b, t, h_v, dv], states [t, b · h_v, dk, dv].
    """
    b, t, heads, dv = v.shape
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + eps).sqrt() for x in (q, k))
    # each key head serves consecutive value heads
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q * scale, k))
    s = state.reshape(b, heads, *state.shape[1:])
    outs, states = [], []
    for i in range(t):
        s = s * g[:, i, :, None, None].exp()
        read = torch.einsum("bhk,bhkv->bhv", k[:, i], s)
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, i], beta[:, i, :, None] * (v[:, i] - read))
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, i], s))
        if kept is not None:
            s = s.to(kept).to(state.dtype)
        states.append(s.flatten(0, 1))
    if not outs:
        return v.new_zeros(v.shape), state.new_zeros(0, *state.shape)
    return torch.stack(outs, 1), torch.stack(states)


def conv_reference(window: Tensor, weight: Tensor) -> Tensor:
    """silu of the causal depthwise convolution: window [b, kernel−1+t, c], weight [kernel, c] → [b, t, c].

    weight[−1] meets the token itself.
    """
    kernel = weight.shape[0]
    t = window.shape[1] - kernel + 1
    mixed = sum(window[:, i : i + t] * weight[i] for i in range(kernel))
    return torch.nn.functional.silu(mixed)
