"""The speculative step: which drafts are kept and what follows them. A pure function of what the target and draft said.

Leviathan et al., "Fast inference from transformers via speculative decoding" (2023), algorithm 1, in the paper's
letters: p is the target's distribution, q the draft's. A draft x is kept with probability min(1, p(x)/q(x)); the first
one that is not is replaced by a draw from max(0, p − q), normalised; if all are kept, one more token comes from p.
Knows nothing of models, caches or random generators.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtplab.decode.sampling import sample


class Verdict(NamedTuple):
    """`accepted` [b]: drafts kept; `tokens` [b, k+1]: kept drafts, then the target's token; the rest is undefined."""

    accepted: Tensor
    tokens: Tensor


def accept_greedy(drafts: Tensor, choices: Tensor) -> Verdict:
    """Temperature 0: drafts [b, k], the target's own choices [b, k+1] → drafts equal to the choices are kept."""
    k = drafts.shape[1]
    if k == 0:
        return Verdict(drafts.new_zeros(len(drafts)), choices)
    accepted = (drafts == choices[:, :k]).long().cumprod(1).sum(1)
    # a kept draft equals the choice, and the token after the kept ones is the choice: the row is the choices
    return Verdict(accepted, choices)


def accept_sampled(
    drafts: Tensor, target_probs: Tensor, draft_probs: Tensor | None, accept_uniforms: Tensor, sample_uniforms: Tensor
) -> Verdict:
    """Temperature above 0.

    drafts [b, k]; target_probs [b, k+1, v]; draft_probs [b, k, v], or None when drafts are the draft's likeliest tokens
    (q is then 1 at the draft); accept_uniforms [b, k] and sample_uniforms [b, k+1] in [0, 1).
    """
    b, k = drafts.shape
    p = target_probs[:, :k].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    q = draft_probs.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) if draft_probs is not None else torch.ones_like(p)
    # u < p/q, without dividing: q is positive at a token that was drawn from it
    accepted = (accept_uniforms * q < p).long().cumprod(1).sum(1)
    rows = torch.arange(b, device=drafts.device)
    left = target_probs[rows, accepted]
    rejected = accepted < k
    if k:
        last = accepted.clamp_max(k - 1)
        if draft_probs is not None:
            residual = (left - draft_probs[rows, last]).clamp_min_(0.0)
        else:
            residual = left.scatter(-1, drafts[rows, last].unsqueeze(-1), 0.0)
        # p = q up to rounding leaves nothing to draw from; such a draft is rejected with probability 0 but for rounding
        usable = rejected & (residual.sum(-1) > 0)
        left = torch.where(usable.unsqueeze(-1), residual, left)
    following = sample(left, sample_uniforms[rows, accepted])
    tokens = torch.cat([drafts, drafts.new_zeros(b, 1)], dim=1)
    tokens[rows, accepted] = following
    return Verdict(accepted, tokens)
