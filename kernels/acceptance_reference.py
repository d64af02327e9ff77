"""The speculative step in plain torch: which drafts are kept and what follows them. The one place of the rule.

Leviathan et al., "Fast inference from transformers via speculative decoding" (2023), algorithm 1, in the paper's
letters: p is the target's distribution, q the draft's. A draft x is kept with probability min(1, p(x)/q(x)); the first
one that is not is replaced by a draw from max(0, p − q), normalised; if all are kept, one more token comes from p.

Draws add whole numbers: a probability counts as its multiple of 2⁻⁵². Such sums are exact in any order, so that a
kernel that adds block by block, a GPU's scan and a loop draw the same tokens. Knows nothing of models, caches or random
generators.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["UNITS", "Verdict", "accept_greedy", "accept_sampled", "choices", "draw"]

# of a probability: with a sum of 1 a uniform number of 53 bits times the sum is exact to half a unit in float64
UNITS = 2.0**52


class Verdict(NamedTuple):
    """`accepted` [b]: drafts kept; `tokens` [b, k+1]: kept drafts, then the target's token; the rest is undefined."""

    accepted: Tensor
    tokens: Tensor


def choices(logits: Tensor) -> Tensor:
    """The likeliest token, the lowest id among ties, −1 where a logit is NaN: logits [.., v] → int64 [..]."""
    return logits.argmax(-1).masked_fill_(logits.isnan().any(-1), -1)


def accept_greedy(drafts: Tensor, choices: Tensor, num_drafts: Tensor | None = None) -> Verdict:
    """Temperature 0: drafts [b, k], the target's own choices [b, k+1] → drafts equal to the choices are kept.

    num_drafts [b]: how many of a row's drafts there are, k if None.
    """
    k = drafts.shape[1]
    if k == 0:
        return Verdict(drafts.new_zeros(len(drafts)), choices)
    equal = (drafts == choices[:, :k]) & (drafts >= 0)
    if num_drafts is not None:
        equal &= torch.arange(k, device=drafts.device) < num_drafts[:, None]
    # a kept draft equals the choice, and the token after the kept ones is the choice: the row is the choices
    return Verdict(equal.long().cumprod(1).sum(1), choices)


def accept_sampled(
    drafts: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    num_drafts: Tensor | None = None,
) -> Verdict:
    """Temperature above 0.

    drafts [b, k]; target_probs [b, k+1, v]; draft_probs [b, k, v], or None when drafts are the draft's likeliest tokens
    (q is then 1 at the draft); accept_uniforms [b, k] and sample_uniforms [b, k+1] in [0, 1), float64; num_drafts [b]:
    how many of a row's drafts there are, k if None. A draft that is no token is never kept. Where the target's row
    holds nothing to draw from, as when it is all NaN, its token is −1.
    """
    b, k = drafts.shape
    v = target_probs.shape[-1]
    there = (drafts >= 0) & (drafts < v)
    if num_drafts is not None:
        there &= torch.arange(k, device=drafts.device) < num_drafts[:, None]
    at = drafts.clamp(0, v - 1).unsqueeze(-1)
    p = target_probs[:, :k].gather(-1, at).squeeze(-1)
    q = draft_probs.gather(-1, at).squeeze(-1) if draft_probs is not None else torch.ones_like(p)
    # u < p/q, without dividing: q is positive at a token that was drawn from it
    accepted = (there & (accept_uniforms * q < p)).long().cumprod(1).sum(1)
    rows = torch.arange(b, device=drafts.device)
    left = target_probs[rows, accepted]
    mass = _mass(left)
    if k:
        last = accepted.clamp_max(k - 1)
        if draft_probs is not None:
            residual = _mass(left - draft_probs[rows, last])
        else:
            residual = mass.masked_fill(torch.arange(v, device=drafts.device) == drafts[rows, last][:, None], 0)
        rejected = accepted < (k if num_drafts is None else num_drafts)
        # p = q up to rounding leaves nothing to draw from; such a draft is rejected with probability 0 but for rounding
        usable = rejected & (residual.sum(-1) > 0)
        mass = torch.where(usable.unsqueeze(-1), residual, mass)
    tokens = torch.cat([drafts, drafts.new_zeros(b, 1)], dim=1)
    tokens[rows, accepted] = _draw(mass, sample_uniforms[rows, accepted])
    return Verdict(accepted, tokens)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: weights [.., v] in [0, 1], of a sum of at most about 1, uniforms [..] in [0, 1), float64.

    Returns token ids [..], −1 where no weight is 2⁻⁵² or more (NaN is none). A token of weight 0 is never drawn.
    """
    return _draw(_mass(weights), uniforms)


def _mass(weights: Tensor) -> Tensor:
    """Whole units, rounded down; what is negative or NaN has none."""
    return torch.where(weights > 0, weights, 0.0).mul_(UNITS).long()


def _draw(mass: Tensor, uniforms: Tensor) -> Tensor:
    total = mass.cumsum(-1)
    end = total[..., -1:]
    # kept below the total even where the product rounds up
    at = torch.minimum((uniforms.unsqueeze(-1) * end).long(), end - 1)
    token = torch.searchsorted(total, at, right=True)
    return token.masked_fill_(end == 0, -1).squeeze(-1)
