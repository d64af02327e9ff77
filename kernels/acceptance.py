"""The speculative step over a batch of rounds: the launchers. The rule in torch is `acceptance_reference.py`.

Random numbers are made where they are used, from the seed, the prompt and the position (`philox.py`): nothing is sent
to the GPU for a round, and nothing comes back before its tokens. Knows nothing of temperatures, top-k or models.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtplab.kernels.acceptance_reference import Verdict, accept_greedy, accept_sampled, choices
from mtplab.kernels.launch import check, chosen, interpreted, unit_of
from mtplab.kernels.philox import Purpose, uniform

__all__ = ["MOST_DRAFTS", "Emitted", "emit_greedy", "emit_sampled"]

MOST_DRAFTS = 31
_LOGITS = (torch.bfloat16, torch.float16, torch.float32)
_PROBABILITIES = (torch.float32, torch.float64)


class Emitted(NamedTuple):
    """`tokens` [b, k+1] int64: the kept drafts, the target's token after them, then −1; `num_emitted` [b] int64.

    The target's own token is −1, and still counted, where the target said nothing: its logits or probabilities are
    NaN. A caller that has tokens on the host anyway sees it there, and needs no pass over the logits to find out.
    """

    tokens: Tensor
    num_emitted: Tensor


def emit_greedy(drafts: Tensor, logits: Tensor, num_drafts: Tensor | None = None) -> Emitted:
    """Temperature 0: drafts are kept as long as they are the target's likeliest tokens.

    Args:
        drafts: [b, k] int64, k at most 31; contiguous.
        logits: [b, k+1, v], BF16, FP16 or FP32: row j is the target's of the token after j drafts.
        num_drafts: [b] int64, how many drafts each round has, 0 to k (beyond, it counts as the nearest); k if None.
            Neither drafts nor rows past them are read.

    Returns: tokens and their number. Among equal logits the lowest id is the likeliest (−0 equals 0). A row with a NaN
    gives −1, which keeps no draft and ends its round. A round's result does not depend on the others; two runs, and
    torch's reference, give the same. Raises ValueError for other shapes or dtypes.
    """
    b, k, v = _check_drafts(drafts, logits, "logits", _LOGITS, num_drafts)
    if chosen(logits.device) == "reference":
        return _padded(accept_greedy(drafts, choices(logits), _clamped(num_drafts, k)))
    interpreted()
    from mtplab.kernels.acceptance_jit import BLOCK, BLOCK_J, BLOCK_S, WARPS, block_best, match_tokens

    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    blocks = -(-v // BLOCK)
    best = torch.empty(b, k + 1, blocks, dtype=torch.int64, device=logits.device)
    out = _nothing(b, k, logits.device)
    strides = logits.stride()[:2]
    unit, count, ragged = unit_of((v, *strides), logits), *_counts(num_drafts, out)
    if b:
        block_best[(blocks, k + 1, b)](
            logits, count, best, k, v // unit, ragged, *(stride // unit for stride in strides),
            UNIT=unit, BLOCK=BLOCK, num_warps=WARPS, num_stages=1,
        )  # fmt: skip
        match_tokens[(b,)](
            drafts, best, count, *out, k, blocks, ragged,
            BLOCK_J=BLOCK_J, BLOCK_S=BLOCK_S, num_warps=WARPS, num_stages=1,
        )  # fmt: skip
    return out


def emit_sampled(
    drafts: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    seed: int,
    prompts: Tensor,
    positions: Tensor,
    num_drafts: Tensor | None = None,
) -> Emitted:
    """Temperature above 0: rejection sampling, p the target's and q the draft's.

    Args:
        drafts: [b, k] int64, k at most 31; contiguous.
        target_probs: p [b, k+1, v] float32 or float64, rows that sum to 1.
        draft_probs: q [b, k, v] of the same dtype; None where drafts are the draft's likeliest tokens: q is 1 there.
        seed: any; its low 64 bits count.
        prompts: [b] int64, index of each prompt in the call; positions: [b] int64, of the round's first token in its
            sequence. Token j of round i draws the numbers of (seed, prompts[i], positions[i] + j).
        num_drafts: as for `emit_greedy`.

    Returns: tokens and their number: what `acceptance_reference.accept_sampled` keeps and draws from the same numbers,
    token for token, since sums are of whole numbers. A draft that is no token, or whose p or q is NaN, is not kept; a
    NaN has no mass, and a row without any gives −1. A round's result does not depend on the others. Raises ValueError
    for other shapes or dtypes.
    """
    b, k, v = _check_drafts(drafts, target_probs, "target_probs", _PROBABILITIES, num_drafts)
    if draft_probs is not None:
        check("draft_probs", draft_probs, (b, k, v), (target_probs.dtype,))
    check("prompts", prompts, (b,), (torch.int64,))
    check("positions", positions, (b,), (torch.int64,))
    if chosen(target_probs.device) == "reference":
        at = positions[:, None].cpu().numpy() + np.arange(k + 1)
        accept, sample = (
            torch.from_numpy(uniform(seed, prompts.cpu().numpy(), at, purpose)).to(drafts.device)
            for purpose in (Purpose.ACCEPT, Purpose.SAMPLE)
        )
        kept = _clamped(num_drafts, k)
        return _padded(accept_sampled(drafts, target_probs, draft_probs, accept[:, :k], sample, kept))
    interpreted()
    from mtplab.kernels.acceptance_jit import BLOCK, BLOCK_J, BLOCK_S, WARPS, block_mass, draw_tokens

    target_probs = target_probs if target_probs.stride(2) == 1 else target_probs.contiguous()
    if draft_probs is not None and draft_probs.stride(2) != 1:
        draft_probs = draft_probs.contiguous()
    blocks = -(-v // BLOCK)
    mass = torch.empty(b, 2, blocks, dtype=torch.int64, device=target_probs.device)
    out = _nothing(b, k, target_probs.device)
    strides = (*target_probs.stride()[:2], *(draft_probs.stride()[:2] if draft_probs is not None else (0, 0)))
    halves = (_signed(seed), _signed(seed >> 32))
    unit = unit_of((v, *strides), *(x for x in (target_probs, draft_probs) if x is not None))
    strides = tuple(stride // unit for stride in strides)
    count, ragged = _counts(num_drafts, out)
    given = (drafts, target_probs, draft_probs, count, prompts.contiguous(), positions.contiguous(), mass)
    how = {"UNIT": unit, "SAMPLED": draft_probs is not None, "BLOCK_J": BLOCK_J, "BLOCK": BLOCK}
    how |= {"num_warps": WARPS, "num_stages": 1}
    if b:
        block_mass[(blocks, b)](*given, k, v // unit, ragged, *strides, *halves, int(Purpose.ACCEPT), **how)
        draw_tokens[(b,)](
            *given, *out, k, v // unit, ragged, blocks, *strides, *halves, int(Purpose.ACCEPT), int(Purpose.SAMPLE),
            BLOCK_S=BLOCK_S, **how,
        )  # fmt: skip
    return out


def _check_drafts(
    drafts: Tensor, rows: Tensor, name: str, dtypes: tuple[torch.dtype, ...], num_drafts: Tensor | None
) -> tuple[int, int, int]:
    """b, k and v, once the arguments that both forms share agree."""
    check("drafts", drafts, (None, None), (torch.int64,))
    b, k = drafts.shape
    if k > MOST_DRAFTS:
        raise ValueError(f"drafts has {k} columns; expected at most {MOST_DRAFTS}")
    if not drafts.is_contiguous():
        raise ValueError(f"drafts has strides {drafts.stride()}; expected it contiguous")
    check(name, rows, (b, k + 1, None), dtypes)
    if rows.shape[2] == 0:
        raise ValueError(f"{name} has no columns; expected one for each token of the vocabulary")
    if num_drafts is not None:
        check("num_drafts", num_drafts, (b,), (torch.int64,))
        if not num_drafts.is_contiguous():
            raise ValueError(f"num_drafts has strides {num_drafts.stride()}; expected it contiguous")
    return b, k, rows.shape[2]


def _nothing(b: int, k: int, device: torch.device) -> Emitted:
    tokens = torch.empty(b, k + 1, dtype=torch.int64, device=device)
    return Emitted(tokens, torch.empty(b, dtype=torch.int64, device=device))


def _counts(num_drafts: Tensor | None, out: Emitted) -> tuple[Tensor, int]:
    """What the kernels get for `num_drafts`, and whether they read it; what they do not read has its type too."""
    return (out.num_emitted, 0) if num_drafts is None else (num_drafts, 1)


def _clamped(num_drafts: Tensor | None, k: int) -> Tensor | None:
    return None if num_drafts is None else num_drafts.clamp(0, k)


def _padded(verdict: Verdict) -> Emitted:
    places = torch.arange(verdict.tokens.shape[1], device=verdict.tokens.device)
    return Emitted(verdict.tokens.masked_fill(places > verdict.accepted[:, None], -1), verdict.accepted + 1)


def _signed(word: int) -> int:
    """The low 32 bits as an int32, so that every seed has one type."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
