"""Writing keys and values to a cache: the launcher. Its torch reference is in `kv_reference.py`.

Knows nothing of what is read afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtplab.kernels import kv_reference
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
from mtplab.kernels.launch import check, chosen, interpreted

__all__ = ["write_kv"]


def write_kv(
    k: Tensor,
    v: Tensor,
    codes: Tensor,
    meta: Tensor | None,
    positions: Tensor,
    table: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Encode rows of K and V and store them in place, in one launch.

    Args:
        k, v: [b, t, h_kv, d], BF16, FP16 or FP32 (both the same), d at most 256: a multiple of 16 for the kernel,
            as attention wants it, and even for the reference.
        codes: the cache [2, pages, h_kv, page_size, d'], which is what `kv_layout.py` says; its dtype and d' say how
            rows are stored: uint8 with d' = d is INT8, with d' = d/2 INT4; E4M3 or E5M2; BF16, FP16 or FP32 is a cast.
            For the kernel rows begin at multiples of 8 elements, the first at one of 16 bytes.
        meta: [2, pages, h_kv, page_size, 2], BF16, FP16 or FP32: scale and zero of each row of an integer cache; None
            for the others.
        positions: [b, t] int64, the slot of each token. Two tokens of a sequence at one slot race.
        table: [b, pages of a sequence] int32, or None where sequence b has page b.
        k_scale, v_scale: FP8 codes are those of k / k_scale and v / v_scale.

    A row is not stored where its position is negative or beyond the table, or its page not one of the cache: nothing
    outside the cache is ever written. A row's codes depend on that row alone, and equal the reference's bit for bit
    (but for which code of FP8 a NaN gets). Formula: lmdeploy's `fill_kv_cache` kernels, as `kv_reference.py` has it.
    Raises ValueError.
    """
    check("k", k, (None, None, None, None), FLOATS)
    check("v", v, tuple(k.shape), (k.dtype,))
    b, t, heads, d = k.shape
    form = format_of(codes, meta, heads, d)
    check_positions(positions, b, t)
    table = table_of(table, codes, b)
    check_scales(form, k_scale, v_scale)
    if chosen(k.device) == "reference":
        kv_reference.write(k, v, codes, meta, positions, table, form, (k_scale, v_scale))
        return
    interpreted()
    from mtplab.kernels.kv_write_jit import UNIT, block_of, rows_of, write_rows

    check_head(d)
    check_codes(codes, UNIT)
    k, v = in_units(k, UNIT), in_units(v, UNIT)
    rows, block_h = b * t * heads, block_of(d)
    if rows:
        write_rows[(-(-rows // rows_of(block_h)), 2)](
            k, v, codes, meta, positions, table, rows, t, heads, d // 2 // UNIT,
            codes.shape[3], table.shape[1], codes.shape[1],
            *(stride // UNIT for x in (k, v) for stride in x.stride()[:3]),
            *(stride // UNIT for stride in codes.stride()[:4]),
            *(meta.stride()[:4] if meta is not None else (0, 0, 0, 0)),
            *positions.stride(), table.stride(0), float(k_scale), float(v_scale),
            UNIT=UNIT, LEVELS=form.levels, PACKED=form.packed, TOP=form.top,
            META_TOP=torch.finfo(meta.dtype if meta is not None else torch.float32).max,
            BLOCK_M=rows_of(block_h), BLOCK_H=block_h, num_warps=4, num_stages=1,
        )  # fmt: skip
