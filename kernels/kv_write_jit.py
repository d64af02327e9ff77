"""Writing rows of K and V to a cache, encoded as it stores them: the kernel.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.quantize_jit import nearest_float8
from mtplab.kernels.sizes import HEADS, half_block
from mtplab.kernels.targets import Target
from mtplab.kernels.variants import Variant, integers, with_large

__all__ = ["UNIT", "block_of", "rows_of", "variants", "write_rows"]

# What strides of rows are multiples of, in elements: what a thread takes of each half.
UNIT = 8

# numbers that differ from launch to launch, none of which is worth compiling anew for
_NUMBERS = [
    "rows", "tokens", "heads", "half", "page_size", "table_width", "pool",
    "k_stride_b", "k_stride_t", "k_stride_h", "v_stride_b", "v_stride_t", "v_stride_h",
    "code_stride_kv", "code_stride_page", "code_stride_h", "code_stride_slot",
    "meta_stride_kv", "meta_stride_page", "meta_stride_h", "meta_stride_slot",
    "position_stride_b", "position_stride_t", "table_stride",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["p_meta", "p_position", "p_table"])
def write_rows(
    p_k,
    p_v,
    p_code,
    p_meta,
    p_position,
    p_table,
    rows,
    tokens,
    heads,
    half,
    page_size,
    table_width,
    pool,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    code_stride_kv: tl.int64,
    code_stride_page: tl.int64,
    code_stride_h,
    code_stride_slot,
    meta_stride_kv: tl.int64,
    meta_stride_page: tl.int64,
    meta_stride_h,
    meta_stride_slot,
    position_stride_b,
    position_stride_t,
    table_stride,
    k_scale,
    v_scale,
    UNIT: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    TOP: tl.constexpr,
    META_TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """k, v [b, t, h_kv, d] → codes [2, pages, h_kv, page_size, d'] and, with LEVELS, meta [2, …, 2].

    Program (i, 0) writes BLOCK_M of the b·t·h_kv rows of K, program (i, 1) of V. A row is held as two halves of d/2
    values in blocks of BLOCK_H, as PACKED stores it. Rows whose position or page is outside the cache are left out.
    `half` and the strides of k, v and codes are in units of UNIT elements.
    """
    half = half * UNIT
    o_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    i_kv = tl.program_id(1)
    o_head = o_m % heads
    o_token = o_m // heads % tokens
    o_batch = o_m // heads // tokens
    m_m = o_m < rows
    b_slot = tl.load(p_position + o_batch * position_stride_b + o_token * position_stride_t, m_m, other=-1)
    m_m = m_m & (b_slot >= 0) & (b_slot < 0x7FFFFFFF)
    b_slot = b_slot.to(tl.int32)
    m_m = m_m & (b_slot // page_size < table_width)
    b_page = tl.load(p_table + o_batch * table_stride + b_slot // page_size, m_m, other=-1).to(tl.int64)
    m_m = m_m & (b_page >= 0) & (b_page < pool)
    o_h = tl.arange(0, BLOCK_H)
    # [BLOCK_M, BLOCK_H]
    m_h = tl.broadcast_to((o_h < half)[None, :], (BLOCK_M, BLOCK_H))
    mask = m_m[:, None] & m_h
    if i_kv == 0:
        o_row = (o_batch * k_stride_b + o_token * k_stride_t + o_head * k_stride_h) * UNIT
        p_row = p_k + o_row[:, None] + o_h[None, :]
        b_first = tl.load(p_row, mask, other=0.0)
        b_second = tl.load(p_row + half, mask, other=0.0)
    else:
        o_row = (o_batch * v_stride_b + o_token * v_stride_t + o_head * v_stride_h) * UNIT
        p_row = p_v + o_row[:, None] + o_h[None, :]
        b_first = tl.load(p_row, mask, other=0.0)
        b_second = tl.load(p_row + half, mask, other=0.0)
    # 64 bits: in a cache laid out token by token a slot's offset alone may pass 2^31
    o_slot = (b_slot % page_size).to(tl.int64)
    o_code = (b_page * code_stride_page + o_head * code_stride_h + o_slot * code_stride_slot) * UNIT
    p_out = p_code + i_kv * (code_stride_kv * UNIT) + o_code[:, None] + o_h[None, :]
    if LEVELS > 0:
        b_first, b_second = b_first.to(tl.float32), b_second.to(tl.float32)
        b_low = tl.min(tl.where(m_h, tl.minimum(b_first, b_second), float("inf")), axis=1)
        b_high = tl.max(tl.where(m_h, tl.maximum(b_first, b_second), float("-inf")), axis=1)
        b_nan = tl.max(((b_first != b_first) | (b_second != b_second)).to(tl.int32), axis=1)
        b_low = tl.where(b_nan > 0, float("nan"), b_low)
        b_scale = tl.div_rn(b_high - b_low, tl.full((BLOCK_M,), LEVELS, tl.float32))
        meta_type = p_meta.dtype.element_ty
        b_tie = (b_scale.to(meta_type).to(tl.float32) == 0.0) | (tl.abs(b_low) > b_scale * META_TOP)
        b_scale = tl.where(b_tie, 1.0, b_scale)
        # not −low: which of 0 and −0 is the smaller is nowhere said
        b_zero = _within(tl.div_rn(0.0 - b_low, b_scale), META_TOP).to(meta_type)
        b_scale = _within(b_scale, META_TOP).to(meta_type)
        p_pair = p_meta + i_kv * meta_stride_kv
        p_pair += b_page * meta_stride_page + o_head * meta_stride_h + o_slot * meta_stride_slot
        tl.store(p_pair, b_scale, m_m)
        tl.store(p_pair + 1, b_zero, m_m)
        b_scale, b_zero = b_scale.to(tl.float32), b_zero.to(tl.float32)
        b_tie = b_tie | (b_zero != b_zero)
        b_first = _level(b_first, b_scale, b_zero, b_tie, LEVELS)
        b_second = _level(b_second, b_scale, b_zero, b_tie, LEVELS)
        if PACKED:
            tl.store(p_out, (b_first + b_second * 16).to(tl.uint8), mask)
        else:
            tl.store(p_out, b_first.to(tl.uint8), mask)
            tl.store(p_out + half, b_second.to(tl.uint8), mask)
    elif TOP > 0:
        b_scale = tl.full((BLOCK_M, BLOCK_H), 1.0, tl.float32) * tl.where(i_kv == 0, k_scale, v_scale)
        code_type = p_code.dtype.element_ty
        tl.store(p_out, nearest_float8(tl.div_rn(b_first.to(tl.float32), b_scale), TOP, code_type), mask)
        tl.store(p_out + half, nearest_float8(tl.div_rn(b_second.to(tl.float32), b_scale), TOP, code_type), mask)
    else:
        tl.store(p_out, b_first.to(tl.float32).to(p_code.dtype.element_ty), mask)
        tl.store(p_out + half, b_second.to(tl.float32).to(p_code.dtype.element_ty), mask)


@triton.jit
def _within(b_x, TOP: tl.constexpr):
    """Clamped to ±TOP; a NaN stays."""
    return tl.where(b_x == b_x, tl.clamp(b_x, -TOP, TOP), b_x)


@triton.jit
def _level(b_x, b_scale, b_zero, b_tie, LEVELS: tl.constexpr):
    """int32 codes [BLOCK_M, BLOCK_H]: trunc(x/scale + zero + ½), kept from 0 to LEVELS; 0 where the row is a tie."""
    b_code = tl.div_rn(b_x, tl.broadcast_to(b_scale[:, None], b_x.shape)) + b_zero[:, None] + 0.5
    b_code = tl.where(b_tie[:, None], 0.0, tl.clamp(b_code, 0.0, LEVELS))
    return b_code.to(tl.int32)


def block_of(d: int) -> int:
    """BLOCK_H for rows of d values. Of shorter rows some lanes idle: no more bytes are read, nor waited for longer."""
    return max(64, half_block(d))


def rows_of(block_h: int) -> int:
    """BLOCK_M: a program holds 2048 values, 16 a thread; few rows leave most of it idle, and cost no more for it."""
    return 1024 // block_h


def variants(target: Target) -> list[Variant]:
    """Every choice that `kv_write.py` can make on the target."""
    tops = {"bf16": 3.3895313892515355e38, "fp16": 65504.0, "fp32": 3.4028234663852886e38}
    stores = [(x, None, 0, 0.0) for x in tops]  # codes, meta, levels, top
    stores += [("fp8e4nv", None, 0, 448.0), ("fp8e5", None, 0, 57344.0)]
    stores += [("u8", meta, levels, 0.0) for levels in (255, 15) for meta in tops]
    found = [
        Variant(
            write_rows,
            f"{x}→{ {255: 'int8', 15: 'int4'}.get(levels, code)}{f' meta {meta}' if meta else ''} d≤{2 * block_h}",
            {
                "p_k": f"*{x}", "p_v": f"*{x}", "p_code": f"*{code}", "p_position": "*i64", "p_table": "*i32",
                **({"p_meta": f"*{meta}"} if meta else {}),
                **integers(write_rows, _NUMBERS), "k_scale": "fp32", "v_scale": "fp32",
            },
            {
                **({} if meta else {"p_meta": None}), "UNIT": UNIT, "LEVELS": levels, "PACKED": levels == 15,
                "TOP": top, "META_TOP": tops[meta or "fp32"], "BLOCK_M": rows_of(block_h), "BLOCK_H": block_h,
            },
            divisible=("p_k", "p_v", "p_code"),
            quick=(x, levels, meta, block_h) == ("bf16", 15, "bf16", 64),
        )
        for (code, meta, levels, top), x, block_h in itertools.product(stores, tops, sorted(set(map(block_of, HEADS))))
    ]  # fmt: skip
    return with_large(found, target, ("p_code",))
