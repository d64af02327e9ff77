"""Attention over a KV cache in plain torch, float64: what the kernels of `attention.py` are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from mtplab.kernels.kv_layout import Format
from mtplab.kernels.kv_reference import decode_rows, gather

__all__ = ["attend"]


def attend(
    q: Tensor,
    codes: Tensor,
    meta: Tensor | None,
    positions: Tensor,
    table: Tensor,
    form: Format,
    scale: float,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Softmax attention of q [b, t, h, d] over the slots up to each query's position; see `attention.attend_cache`.

    Keys and values are what the cache reads back in q's dtype, times (k_scale, v_scale); everything after is float64.
    Returns [b, t, h, d] in q's dtype. A query with a negative position sees nothing, and gets zeros.
    """
    b, t, heads, d = q.shape
    length = max(0, min(int(positions.max()) + 1, table.shape[1] * codes.shape[3])) if positions.numel() else 0
    if length == 0:
        return torch.zeros_like(q)
    stored = gather(codes, table, length)  # [2, b, h_kv, length, d']
    k, v = decode_rows(stored, None if meta is None else gather(meta, table, length), form, q.dtype).double()
    slots = torch.arange(length, device=q.device)
    seen = slots <= positions[:, :, None]  # [b, t, length]
    # what stands beyond a sequence's end was never written
    v = v.masked_fill(~seen.any(1)[:, None, :, None], 0.0)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k * scales[0], v * scales[1]))
    scores = torch.matmul(q.double().transpose(1, 2), k.transpose(2, 3)) * scale  # [b, h, t, length]
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    weights = weights.masked_fill(~seen.any(-1)[:, None, :, None], 0.0)
    return torch.matmul(weights, v).transpose(1, 2).to(q.dtype)
