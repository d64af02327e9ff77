"""KV-cache numerics in plain torch: what the kernels beside this file are compared with, and what the CPU runs.

A row is one token's one head, [..., d]. Numerics are those of lmdeploy's `fill_kv_cache` kernels. A row's codes depend
on that row alone. Where rows lie is `kv_layout.py`'s to say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtplab.kernels.kv_layout import Format

__all__ = ["decode_integer", "decode_rows", "encode_float8", "encode_integer", "encode_rows", "gather", "write"]


def encode_integer(rows: Tensor, levels: int, packed: bool, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Asymmetric integers per row: scale = (max − min)/levels, zero = −min/scale, q = trunc(x/scale + zero + ½).

    A constant row has scale 0 in that formula; it gets scale 1 and zero −min, so that code 0 reads back as the row.
    Scale and zero are rounded to the checkpoint's dtype, as they are stored, before codes are made with them:
    lmdeploy keeps them in the model's dtype, and a code made with one scale and read with another would be off.

    rows [..., d] of any float dtype → uint8 codes [..., d], or [..., d/2] when packed, and meta [..., 2] = (scale,
    zero) of `meta_dtype`. A row with a NaN or −∞ has a NaN zero and codes 0, so that it reads back as NaN.
    """
    x = rows.float()
    low, high = x.aminmax(dim=-1, keepdim=True)
    # by a tensor: on a GPU torch multiplies by a number's reciprocal instead, which may be off by a bit
    scale = (high - low).div_(torch.full_like(low, levels))
    # a range below the stored dtype's smallest step, or a zero beyond its largest number, is as constant as a tie
    constant = (scale.to(meta_dtype) == 0) | (low.abs() > scale * torch.finfo(meta_dtype).max)
    scale = scale.masked_fill_(constant, 1.0)
    zero = (0 - low) / scale  # not −low: which of 0 and −0 is the smaller is nowhere said
    top = torch.finfo(meta_dtype).max  # a row beyond what the stored dtype holds reads back as its largest number
    meta = torch.cat([scale, zero], dim=-1).clamp_(-top, top).to(meta_dtype)
    scale, zero = meta.float().split(1, dim=-1)
    codes = (x / scale).add_(zero).add_(0.5).trunc_().clamp_(0, levels)
    codes = codes.masked_fill_(constant | zero.isnan(), 0.0).to(torch.uint8)
    if packed:
        # split-half packing: element d shares a byte with element d + head_dim/2
        first, second = codes.chunk(2, dim=-1)
        codes = first + second * 16
    return codes, meta


def decode_integer(codes: Tensor, meta: Tensor, packed: bool, dtype: torch.dtype) -> Tensor:
    """(code − zero) · scale in float32, [..., d] of `dtype`."""
    if packed:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    scale, zero = meta.float().split(1, dim=-1)
    return codes.float().sub_(zero).mul_(scale).to(dtype)


def encode_float8(rows: Tensor, dtype: torch.dtype, scale: float | Tensor = 1.0) -> Tensor:
    """FP8 codes [..., d] of rows / scale, clamped to the format's range; a tensor of scales is spread over the rows. A
    NaN stays one."""
    values = rows.float()
    if isinstance(scale, Tensor):
        values = values / scale
    elif scale != 1.0:
        values = values / torch.full_like(values, scale)
    top = torch.finfo(dtype).max
    return values.clamp(-top, top).to(dtype)


def encode_rows(
    rows: Tensor, form: Format, code_dtype: torch.dtype, meta_dtype: torch.dtype | None, scale: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Rows [..., d] → what is stored of them: codes, and meta for integers."""
    if form.levels:
        assert meta_dtype is not None
        return encode_integer(rows, form.levels, form.packed, meta_dtype)
    if form.top:
        return encode_float8(rows, code_dtype, scale), None
    return rows.to(code_dtype), None


def decode_rows(codes: Tensor, meta: Tensor | None, form: Format, dtype: torch.dtype) -> Tensor:
    """What attention reads: [..., d] of `dtype`."""
    if form.levels:
        assert meta is not None
        return decode_integer(codes, meta, form.packed, dtype)
    return codes.float().to(dtype) if form.top else codes.to(dtype)


def write(
    k: Tensor,
    v: Tensor,
    codes: Tensor,
    meta: Tensor | None,
    positions: Tensor,
    table: Tensor,
    form: Format,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Store k and v [b, t, h_kv, d] at positions [b, t]; see `kv_write.write_kv`, which has checked them."""
    pool, page_size = codes.shape[1], codes.shape[3]
    positions = positions.long()
    inside = (positions >= 0) & (positions < table.shape[1] * page_size)
    at = positions.masked_fill(~inside, 0)
    page = table.long().gather(1, at // page_size)
    inside &= (page >= 0) & (page < pool)
    page, slot = page[inside], (at % page_size)[inside]
    for which, (rows, scale) in enumerate(zip((k, v), scales, strict=True)):
        new, new_meta = encode_rows(rows[inside], form, codes.dtype, None if meta is None else meta.dtype, scale)
        # torch's index operators know no FP8
        bytes_of = torch.uint8 if form.top else codes.dtype
        codes[which].view(bytes_of)[page, :, slot] = new.view(bytes_of)
        if meta is not None:
            meta[which][page, :, slot] = new_meta


def gather(x: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` slots of every sequence, [2, b, h_kv, length, …], of x [2, pages, h_kv, page_size, …]."""
    slots = torch.arange(length, device=x.device)
    page = table.long()[:, slots // x.shape[3]]  # [b, length]
    flat = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    # indices apart from each other by a slice put [b, length] first
    rows = flat.transpose(2, 3)[:, page, (slots % x.shape[3]).expand_as(page)]  # [2, b, length, h_kv, …]
    return rows.transpose(2, 3).view(x.dtype) if x.dtype.itemsize == 1 else rows.transpose(2, 3)
