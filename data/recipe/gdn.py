"""The gated delta rule over whole sequences, chunked (the training form), in plain torch.

S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t k_t v_t^T, o_t = S_t^T q_t, computed chunk by chunk with the
WY / UT transform (Yang et al., "Gated Delta Networks", and transformers' torch_chunk_gated_delta_rule). This module
does not know about layers, convolutions or training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 32) -> Tensor:
    """q and k [b, t, kh, d] (normalised here), v [b, t, vh, e], g (log decay) and beta [b, t, vh] -> [b, t, vh, e].

    Each key head serves vh / kh consecutive value heads. float32; t is padded to whole chunks.
    """
    b, t, vh, e = v.shape
    repeat = vh // k.shape[2]
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    pad = -t % chunk
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    n = (t + pad) // chunk
    # [b, n, kh, 1, chunk, d] against [b, n, kh, repeat, chunk, e]: the products of q and k are shared by value heads
    q, k = (x.view(b, n, chunk, -1, x.shape[-1]).transpose(2, 3).unsqueeze(3) for x in (q, k))
    v = v.reshape(b, n, chunk, -1, repeat, e).permute(0, 1, 3, 4, 2, 5)
    g, beta = (x.view(b, n, chunk, -1, repeat).permute(0, 1, 3, 4, 2) for x in (g, beta))
    decay = g.cumsum(-1)
    within = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(
        torch.ones(chunk, chunk, dtype=torch.bool).triu(1), float("-inf")
    )
    within = within.exp()  # [b, n, kh, r, chunk, chunk], zero above the diagonal
    kk, qk = k @ k.transpose(-1, -2), q @ k.transpose(-1, -2)
    system = (kk * within) * beta.unsqueeze(-1)
    grown = decay.exp().unsqueeze(-1)
    right = torch.cat([v, k * grown], dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, read = solved.split([e, k.shape[-1]], dim=-1)
    inner = qk * within
    query = q * grown
    write = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    kept = decay[..., -1].exp()[..., None, None]
    state, out = None, []
    for i in range(n):
        if state is None:
            change = new[:, i]
            out.append(inner[:, i] @ change)
            state = write[:, i] @ change
        else:
            change = new[:, i] - read[:, i] @ state
            out.append(query[:, i] @ state + inner[:, i] @ change)
            state = state * kept[:, i] + write[:, i] @ change
    y = torch.stack(out, dim=1)  # [b, n, kh, r, chunk, e]
    return y.permute(0, 1, 4, 2, 3, 5).reshape(b, n * chunk, vh, e)[:, :t]
