"""Attention over a cache, with a reduction order that a query's neighbours cannot change.

Knows nothing of how keys and values are stored: it gets them as they are read back, whole heads at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtplab.models.rows import pad_rows, round_up, row_count

# keys are reduced in blocks of this many, in order; a block that no query sees adds exact zeros
KEY_BLOCK = 256


def padded_key_length(length: int, exact: bool) -> int:
    """How many cache slots to read so that `length` of them are covered. Exact attention reads whole blocks."""
    return round_up(length, KEY_BLOCK) if exact else length


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """Softmax attention of grouped query heads.

    q [b, h, t, d], already multiplied by d^-½; k [b, h_kv, L, d]; v [b, h_kv, L, dv]; bias
    [b, t·h/h_kv, L] (`attention_bias`), or None when every query sees every key. Returns [b, t, h·dv].

    With `exact`, L is a multiple of KEY_BLOCK, the rows of every product are padded to a multiple of 8, and the sums
    over keys are taken block by block, so that a query's result is bit-equal whatever t, b or L.
    """
    b, h, t, d = q.shape
    h_kv, length = k.shape[1], k.shape[2]
    rows = h // h_kv * t
    q = q.reshape(b, h_kv, rows, d)
    q = pad_rows(q, row_count(rows, exact))
    scores = torch.matmul(q, k.transpose(2, 3))
    if bias is not None:
        scores[:, :, :rows].add_(bias.unsqueeze(1))
    if not exact:
        out = torch.matmul(scores.softmax(-1), v)
    else:
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        out = total = None
        for start in range(0, length, KEY_BLOCK):
            block = weights[..., start : start + KEY_BLOCK].contiguous()
            part, part_total = torch.matmul(block, v[:, :, start : start + KEY_BLOCK]), block.sum(-1, keepdim=True)
            out, total = (part, part_total) if out is None else (out.add_(part), total.add_(part_total))
        out = out.div_(total)[:, :, :rows]
    return out.reshape(b, h, t, -1).transpose(1, 2).reshape(b, t, -1)


def attention_bias(
    positions: Tensor, keys: Tensor, group: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """What is added to the scores of a KV head's query rows [b, group·t, L]: 0 up to the query's position, −inf after,
    and before the last `window` of those.

    positions [b, t]; keys [L] (0, 1, …); `group` query heads share a KV head, each with its t queries side by side.
    """
    hidden = keys > positions.unsqueeze(-1)
    if window is not None:
        hidden = hidden | (keys <= positions.unsqueeze(-1) - window)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
    return bias.repeat(1, group, 1)
