"""The gated delta rule: one recurrent form for decoding, one chunked form for prompts.

    S_t = exp(g_t) · S_{t−1} + k_t ⊗ β_t (v_t − exp(g_t) · k_tᵀ S_{t−1}),     o_t = q_tᵀ S_t

(Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, eq. 10). Knows nothing of caches, layers or weights. Callers
normalise q and k, scale q, and repeat key heads to value heads. All arithmetic is in the dtype of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

# prompts are padded to whole chunks; short ones are the rule here, so a chunk is short too
CHUNK = 16


def delta_rule_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """Advance the state by one token, writing it to `out` (which may be `state` itself).

    q, k [n, 1, dk]; v [n, 1, dv]; decay = exp(g), beta [n, 1, 1]; state, out [n, dk, dv], where n = batch × value
    heads. Returns o [n, 1, dv]. Each of the n products is computed apart, so a sequence's result does not depend on
    what shares its batch.
    """
    if len(state) == 1:
        # a product that is alone goes to another routine than one of several, with other last bits on some CPUs
        twice = torch.empty(2, *out.shape[1:], dtype=out.dtype, device=out.device)
        found = delta_rule_step(*(x.repeat(2, 1, 1) for x in (q, k, v, decay, beta, state)), twice)
        out.copy_(twice[:1])
        return found[:1]
    torch.mul(state, decay, out=out)
    update = torch.baddbmm(v, k, out, alpha=-1).mul_(beta)
    out.baddbmm_(k.transpose(1, 2), update)
    return torch.bmm(q, out)


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a whole segment, chunk by chunk: the WY form of the same recurrence.

    q, k [n, t, dk]; v [n, t, dv]; g (log decay, ≤ 0), beta [n, t]; state [n, dk, dv]. `t` must be a multiple of CHUNK;
    pad with beta = 0 and g = 0, which leaves the state exactly as it was. Returns (o [n, t, dv], state after t).

    Within a chunk, u = (I + tril(diag(β) (K Kᵀ ⊙ Γ), −1))⁻¹ diag(β) (V − diag(exp G) K S), where G is the running sum
    of g and Γ_ij = exp(G_i − G_j); then o = (Q ⊙ exp G) S + tril(Q Kᵀ ⊙ Γ) u
    and S ← exp(G_C) S + (K ⊙ exp(G_C − G))ᵀ u.
    """
    n, t, dk = q.shape
    c = t // CHUNK
    assert c * CHUNK == t, f"segment of {t} tokens is not a multiple of {CHUNK}"
    q, k, v = (x.reshape(n, c, CHUNK, -1) for x in (q, k, v))
    total = g.reshape(n, c, CHUNK).cumsum(-1)
    beta = beta.reshape(n, c, CHUNK, 1)
    grown = total.exp().unsqueeze(-1)
    keep = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril_()
    ratio = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(~keep, -torch.inf).exp_()
    kb = k * beta
    # unitriangular solve: only what lies below the diagonal is read
    system = torch.matmul(kb, k.transpose(-1, -2)).mul_(ratio)
    right = torch.cat([v * beta, kb * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_v, old_k = solved.split([v.shape[-1], dk], dim=-1)
    inner = torch.matmul(q, k.transpose(-1, -2)).mul_(ratio)
    q_grown = q * grown
    k_left = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = grown[:, :, -1:]
    outs = []
    for i in range(c):
        u = new_v[:, i] - torch.bmm(old_k[:, i], state)
        outs.append(torch.baddbmm(torch.bmm(q_grown[:, i], state), inner[:, i], u))
        state = torch.baddbmm(state * chunk_decay[:, i], k_left[:, i], u)
    return torch.cat(outs, dim=1), state
