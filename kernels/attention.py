"""Attention of a few new tokens over a KV cache: the launcher. Its torch reference is in `attention_reference.py`.

Decoding (t = 1) and verification (t = drafted tokens + 1) alike; for a prompt, whose queries outnumber what one tile
holds, it is right but reads the cache once a tile. Knows nothing of who wrote the cache (`kv_write.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtplab.kernels import attention_reference
from mtplab.kernels.kv_layout import (
    FLOATS,
    check_codes,
    check_head,
    check_positions,
    check_scales,
    format_of,
    in_units,
    table_of,
)
from mtplab.kernels.launch import check, chosen, interpreted, target
from mtplab.kernels.sizes import half_block

__all__ = ["attend_cache"]

# of a sequence: the kernels count them in 32 bits, and a little past the last
_MOST_SLOTS = 2**31 - 2**16


def attend_cache(
    q: Tensor,
    codes: Tensor,
    meta: Tensor | None,
    positions: Tensor,
    table: Tensor | None = None,
    *,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    longest: int | None = None,
    most_tokens: int | None = None,
    piece: int = 512,
) -> Tensor:
    """Causal softmax attention of grouped query heads over the slots up to each query's own.

    Args:
        q: [b, t, h, d], BF16, FP16 or FP32, rows contiguous, d a multiple of 16 up to 256; h a multiple of h_kv.
        codes, meta: the cache [2, pages, h_kv, page_size, d'] and its scales and zeros, as `kv_layout.py` says. An
            unquantised cache has q's dtype; meta that of q where q is BF16 or FP16.
        positions: [b, t] int64; query i of sequence b sees the slots 0 … positions[b, i].
        table: [b, pages of a sequence] int32, or None where sequence b has page b. Entries up to the largest position
            must be pages of the cache; they are not checked, and beyond it they are not looked at.
        scale: what scores are multiplied by, d^-½ where it is None.
        k_scale, v_scale: an FP8 cache holds k / k_scale and v / v_scale.
        longest: one more than the largest position, where the caller knows it; the table's reach otherwise, which
            starts programs that end at once. It must not be too small: rounded up to a whole `piece`, slots beyond it
            are left out by the kernel, and not by the torch reference.
        most_tokens: the largest t that this cache will be asked for, t where it is None (see below).
        piece: slots that one program takes, a multiple of 64.

    Returns: [b, t, h, d] in q's dtype.

    Rows are read back as (code − zero) · scale in float32 and rounded to q's dtype; both products take operands of that
    dtype (weights included) and sum in float32, where the softmax with its running maximum is taken (FP32: no TF32).
    Sequences are cut at multiples of `piece`, pieces are summed in order by a second kernel, and nothing is atomic:
    two runs are bit-equal, and a query's result depends on its own vector and the slots it sees, not on b, on other
    sequences, on `longest`, or on how pages are shared out. It depends on `piece`, and on the tile, which follows from
    h / h_kv · most_tokens: give `most_tokens` and a token gets the same result whether it is decoded or verified.

    A query with a negative position sees nothing and gets zeros; one past the table's reach sees all of it. A NaN in a
    slot that a query sees makes its result NaN; what a slot holds that no query of the pass sees does not matter, but a
    NaN or infinity in V at a slot that only a later query of the pass sees may reach earlier ones (0 · NaN).
    Formula: FlashAttention-2 (arXiv 2307.08691), split as in Flash-Decoding. Raises ValueError.
    """
    check("q", q, (None, None, None, None), FLOATS)
    b, t, heads, d = q.shape
    check_head(d)
    if codes.dim() != 5 or codes.shape[2] == 0 or heads % codes.shape[2]:
        raise ValueError(f"q has {heads} heads and codes shape {list(codes.shape)}; expected heads to be a multiple")
    form = format_of(codes, meta, codes.shape[2], d)
    if form.name == "none" and codes.dtype != q.dtype:
        raise ValueError(f"codes are {codes.dtype} and q is {q.dtype}; expected the same of an unquantised cache")
    if meta is not None and q.dtype not in (torch.float32, meta.dtype):
        raise ValueError(f"meta is {meta.dtype} and q is {q.dtype}; expected the same, or q in torch.float32")
    check_positions(positions, b, t)
    table = table_of(table, codes, b)
    check_scales(form, k_scale, v_scale)
    width, page_size = table.shape[1], codes.shape[3]
    if width * page_size > _MOST_SLOTS:
        raise ValueError(f"table has {width} pages of {page_size} slots; expected at most {_MOST_SLOTS} slots in all")
    if piece <= 0 or piece % 64:
        raise ValueError(f"piece is {piece}; expected a multiple of 64")
    if most_tokens is not None and most_tokens < t:
        raise ValueError(f"most_tokens is {most_tokens}, and q has {t} tokens; expected at least those")
    scale = d**-0.5 if scale is None else scale
    if chosen(q.device) == "reference":
        return attention_reference.attend(q, codes, meta, positions, table, form, scale, (k_scale, v_scale))
    return _launch(
        q, codes, meta, positions, table, form.packed, scale * k_scale * math.log2(math.e), v_scale, longest,
        most_tokens or t, piece,
    )  # fmt: skip


def _launch(
    q: Tensor,
    codes: Tensor,
    meta: Tensor | None,
    positions: Tensor,
    table: Tensor,
    packed: bool,
    score_scale: float,
    v_scale: float,
    longest: int | None,
    most_tokens: int,
    piece: int,
) -> Tensor:
    """Both kernels, or the first alone where there is one piece."""
    interpreted()
    from mtplab.kernels.attention_jit import (
        CHUNK,
        attend_piece,
        family_of,
        first_of,
        options_of,
        row_unit,
        sum_block,
        sum_pieces,
        sum_warps,
        tile_for,
    )

    b, t, heads, d = q.shape
    kv_heads, page_size = codes.shape[2:4]
    group, unit, reach = heads // kv_heads, row_unit(packed), table.shape[1] * page_size
    q = in_units(q, unit)
    check_codes(codes, unit)
    positions, table = positions.contiguous(), table.contiguous()
    out = torch.empty(b, t, heads, d, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    stored = "integer" if meta is not None else "none" if codes.dtype == q.dtype else "fp8"
    family, block_h = family_of(target(q.device).arch), half_block(d)
    tile = tile_for(family, block_h, group * most_tokens, q.dtype == torch.float32, stored)
    first = first_of(d, packed) // unit
    tiles = -(-group * t // tile.block_m)
    pieces = max(1, -(-min(reach if longest is None else longest, reach) // piece))
    shape = (b, pieces, t * heads) if pieces > 1 else (0,)
    part = torch.empty(*shape, d, dtype=torch.float32, device=q.device)
    stat = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    attend_piece[(kv_heads * tiles, pieces, b)](
        q, codes, meta, positions, table, out, part, stat,
        t, heads, group, tiles, first, d // unit - first, page_size, table.shape[1], piece, pieces,
        *(x // unit for x in q.stride()[:3]),
        *(x // unit for x in codes.stride()[:4]), *(meta.stride()[:4] if meta is not None else (0, 0, 0, 0)),
        float(score_scale), float(v_scale),
        INTEGER=meta is not None, PACKED=packed, UNIT=unit, CDNA3=family == "cdna3",
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_H=block_h,
        num_warps=tile.warps, num_stages=tile.stages, **options_of(family),
    )  # fmt: skip
    if pieces > 1:
        sum_pieces[(t * heads, b)](
            part, stat, positions, out, heads, d, reach, piece, pieces, float(v_scale),
            CHUNK=CHUNK, BLOCK_D=sum_block(d), num_warps=sum_warps(sum_block(d)), num_stages=2,
        )  # fmt: skip
    return out
