"""Attention of a few new tokens over a KV cache, in fixed pieces of the sequence, and their sum: two kernels.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import triton
import triton.language as tl

from mtplab.kernels.sizes import HEADS, half_block
from mtplab.kernels.targets import Target
from mtplab.kernels.variants import Variant, integers, with_large

__all__ = [
    "CHUNK", "Tile", "attend_piece", "family_of", "first_of", "options_of", "row_unit", "sum_block", "sum_pieces",
    "sum_warps", "tile_for", "variants",
]  # fmt: skip

CHUNK = 16  # pieces that are summed at a time

# numbers that differ from launch to launch, none of which is worth compiling anew for
_PIECE_NUMBERS = [
    "tokens", "heads", "group", "tiles", "first_width", "second_width", "page_size", "table_width", "piece", "pieces",
    "q_stride_b", "q_stride_t", "q_stride_h",
    "code_stride_kv", "code_stride_page", "code_stride_h", "code_stride_slot",
    "meta_stride_kv", "meta_stride_page", "meta_stride_h", "meta_stride_slot",
]  # fmt: skip
_SUM_NUMBERS = ["heads", "d", "limit", "piece", "pieces"]


@triton.jit(do_not_specialize=_PIECE_NUMBERS, do_not_specialize_on_alignment=["p_meta", "p_position", "p_table"])
def attend_piece(
    p_q,
    p_code,
    p_meta,
    p_position,
    p_table,
    p_out,
    p_part,
    p_stat,
    tokens,
    heads,
    group,
    tiles,
    first_width,
    second_width,
    page_size,
    table_width,
    piece,
    pieces,
    q_stride_b: tl.int64,
    q_stride_t,
    q_stride_h,
    code_stride_kv: tl.int64,
    code_stride_page: tl.int64,
    code_stride_h,
    code_stride_slot,
    meta_stride_kv: tl.int64,
    meta_stride_page: tl.int64,
    meta_stride_h,
    meta_stride_slot,
    score_scale,
    v_scale,
    INTEGER: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    CDNA3: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """q [b, t, h, d] over slots i_piece·piece … of codes [2, pages, h_kv, page_size, d'] (K, then V).

    Program (KV head and tile of rows, piece, sequence). The rows of a KV head are its group · t queries, token by
    token; a query sees the slots up to its position. A head's d values are held as the first and second `*_width` of
    them, d/2 each where PACKED, in blocks of BLOCK_H.
    Where there is one piece, writes out [b, t, h, d]; otherwise what a piece adds, unscaled, to part
    [b, pieces, t·h, d] and (largest score, sum of weights) to stat [b, pieces, t·h, 2], both float32 and contiguous.
    score_scale is the softmax's, times log2 e. Widths and strides of q and codes are given in UNITs; positions [b, t],
    the table and out are contiguous.
    """
    i_h = tl.program_id(0) // tiles
    i_piece = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < tokens * group
    o_token, o_head = o_m // group, i_h * group + o_m % group
    b_position = tl.load(p_position + i_b * tokens + o_token, m_m, other=-1)
    # a position beyond the cache sees all of it, a negative one nothing, however far it is from what 32 bits hold
    b_position = tl.maximum(tl.minimum(b_position, table_width.to(tl.int64) * page_size - 1), -1).to(tl.int32)
    last = tl.max(b_position, axis=0)
    first = i_piece * piece
    if (pieces > 1) & (first > last):
        return

    o_h = tl.arange(0, BLOCK_H)
    split = first_width * UNIT
    m_first, m_second = (o_h < split)[None, :], (o_h < second_width * UNIT)[None, :]
    # [BLOCK_M, BLOCK_H]
    m_q0, m_q1 = m_m[:, None] & m_first, m_m[:, None] & m_second
    o_row = o_token * (q_stride_t.to(tl.int64) * UNIT) + o_head * (q_stride_h.to(tl.int64) * UNIT)
    p_query = p_q + i_b * (q_stride_b * UNIT) + o_row[:, None] + o_h[None, :]
    b_q0 = tl.load(p_query, m_q0, other=0.0)
    b_q1 = tl.load(p_query + split, m_q1, other=0.0)
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out0 = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    b_out1 = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)

    p_pages = p_table + i_b * table_width
    p_head = p_code + i_h * (code_stride_h.to(tl.int64) * UNIT)
    p_value = p_head + code_stride_kv * UNIT
    for start in range(first, tl.minimum(first + piece, last + 1), BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        if CDNA3:
            # masks are scalar registers there: beyond the last slot that one again, nothing sees it
            m_n = tl.full((BLOCK_N,), True, tl.int1)
            o_near = tl.minimum(o_n, last)
        else:
            m_n = o_n <= last
            o_near = o_n
        b_page = tl.load(p_pages + o_near // page_size, m_n, other=0).to(tl.int64)
        # 64 bits: in a cache laid out token by token a slot's offset alone may pass 2^31
        o_slot = (o_near % page_size).to(tl.int64)
        # [BLOCK_N, BLOCK_H]
        o_code = (b_page * code_stride_page + o_slot * code_stride_slot) * UNIT
        o_code = o_code[:, None] + o_h[None, :]
        m_code0, m_code1 = m_n[:, None] & m_first, m_n[:, None] & m_second
        if INTEGER:
            p_pair = p_meta + i_h * meta_stride_h.to(tl.int64) + b_page * meta_stride_page + o_slot * meta_stride_slot
            b_scale, b_zero = _pair(p_pair, m_n)
        else:
            b_scale, b_zero = 1.0, 0.0
        p_k = p_head + o_code
        b_k0, b_k1 = _row(p_k, m_code0, m_code1, split, b_scale, b_zero, INTEGER, PACKED, b_q0.dtype, CDNA3)
        b_score = tl.dot(b_q0, tl.trans(b_k0), input_precision="ieee")
        b_score = tl.dot(b_q1, tl.trans(b_k1), b_score, input_precision="ieee") * score_scale
        b_score = tl.where(o_n[None, :] <= b_position[:, None], b_score, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_score, axis=1))
        # a row that has seen nothing yet: −∞ − −∞ would be NaN
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_score - b_base[:, None])
        b_decay = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=1)
        b_max = b_new
        if INTEGER:
            b_scale, b_zero = _pair(p_pair + meta_stride_kv, m_n)
        p_v = p_value + o_code
        b_v0, b_v1 = _row(p_v, m_code0, m_code1, split, b_scale, b_zero, INTEGER, PACKED, b_q0.dtype, CDNA3)
        b_weight = _rounded(b_weight, b_q0.dtype, CDNA3)
        b_out0 = tl.dot(b_weight, b_v0, b_out0 * b_decay[:, None], input_precision="ieee")
        b_out1 = tl.dot(b_weight, b_v1, b_out1 * b_decay[:, None], input_precision="ieee")

    o_line = o_token * heads + o_head
    if pieces > 1:
        o_part = (i_b * pieces + i_piece) * (tokens * heads) + o_line
        p_parts = p_part + o_part[:, None] * ((first_width + second_width) * UNIT) + o_h[None, :]
        tl.store(p_parts, b_out0, m_q0)
        tl.store(p_parts + split, b_out1, m_q1)
        tl.store(p_stat + o_part * 2, b_max, m_m)
        tl.store(p_stat + o_part * 2 + 1, b_sum, m_m)
    else:
        o_out = i_b * (tokens * heads) + o_line
        p_lines = p_out + o_out[:, None] * ((first_width + second_width) * UNIT) + o_h[None, :]
        b_inverse = _inverse(b_sum, v_scale)[:, None]
        tl.store(p_lines, (b_out0 * b_inverse).to(p_out.dtype.element_ty), m_q0)
        tl.store(p_lines + split, (b_out1 * b_inverse).to(p_out.dtype.element_ty), m_q1)


@triton.jit
def _pair(p_pair, m_n):
    """Scale and zero of rows [BLOCK_N], float32."""
    return tl.load(p_pair, m_n, other=0.0).to(tl.float32), tl.load(p_pair + 1, m_n, other=0.0).to(tl.float32)


@triton.jit
def _row(
    p_row, m_first, m_second, split, b_scale, b_zero,
    INTEGER: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, CDNA3: tl.constexpr,
):  # fmt: skip
    """Both parts [BLOCK_N, BLOCK_H] of rows, as DTYPE."""
    if PACKED:
        b_code = tl.load(p_row, m_first, other=0)
        b_first, b_second = b_code & 15, b_code >> 4
    else:
        OTHER: tl.constexpr = 0 if INTEGER else 0.0
        b_first = tl.load(p_row, m_first, other=OTHER)
        b_second = tl.load(p_row + split, m_second, other=OTHER)
    if INTEGER:
        b_first = (b_first.to(tl.float32) - b_zero[:, None]) * b_scale[:, None]
        b_second = (b_second.to(tl.float32) - b_zero[:, None]) * b_scale[:, None]
    return _rounded(b_first, DTYPE, CDNA3), _rounded(b_second, DTYPE, CDNA3)


@triton.jit
def _rounded(b_x, DTYPE: tl.constexpr, CDNA3: tl.constexpr):
    """As DTYPE, to nearest even.

    CDNA3 has no instruction for BF16 and OCP's E4M3; the compiler would look for NaN at each value, and run out of
    scalar registers. A NaN that comes from BF16 or from arithmetic keeps its first bits here, and stays one.
    """
    if CDNA3 and b_x.dtype == tl.float32 and tl.bfloat16 == DTYPE:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        return b_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif CDNA3 and b_x.dtype == tl.float8e4nv:
        # E4M3 moved into an FP16's bits reads as value / 256, and its NaN as 1.875, which the last line mends
        b_code = b_x.to(tl.uint8, bitcast=True).to(tl.int32)
        b_half = ((b_code & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        b_bits = (b_half.to(tl.float32) * 256.0).to(tl.int32, bitcast=True) | ((b_code & 0x80) << 24)
        b_bits = b_bits | (((b_code & 0x7F) + 1) >> 7) * 0x7FC00000
        return _rounded(b_bits.to(tl.float32, bitcast=True), DTYPE, CDNA3)
    else:
        return b_x.to(DTYPE)


@triton.jit
def _inverse(b_sum, v_scale):
    """What sums of weighted values are multiplied by; 0 where nothing was seen, NaN where a weight was."""
    return tl.where(b_sum == 0.0, 0.0, tl.div_rn(tl.full(b_sum.shape, 1.0, tl.float32), b_sum)) * v_scale


@triton.jit(do_not_specialize=_SUM_NUMBERS, do_not_specialize_on_alignment=["p_position"])
def sum_pieces(
    p_part,
    p_stat,
    p_position,
    p_out,
    heads,
    d,
    limit,
    piece,
    pieces,
    v_scale,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """part [b, pieces, t·h, d], stat [b, pieces, t·h, 2] of `attend_piece` → out [b, t, h, d].

    Program (row of t·h, sequence). Pieces up to the row's position are summed in order, CHUNK at a time; those that are
    missing in the last chunk add exact zeros, so a row's result does not depend on `pieces`.
    """
    i_row = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(0)
    position = tl.load(p_position + i_b * (rows // heads) + i_row // heads)
    seen = (tl.minimum(position, limit.to(tl.int64) - 1) // piece + 1).to(tl.int32)
    # more than there are only where `longest` was too small: what lies there is another sequence's
    seen = tl.where(position < 0, 0, tl.minimum(seen, pieces))
    o_d = tl.arange(0, BLOCK_D)
    b_max = tl.full((1,), float("-inf"), tl.float32)
    b_sum = tl.zeros((1,), tl.float32)
    b_out = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, seen, CHUNK):
        o_piece = start + tl.arange(0, CHUNK)
        m_piece = o_piece < seen
        o_part = (i_b * pieces + o_piece) * rows + i_row
        b_piece_max = tl.load(p_stat + o_part * 2, m_piece, other=float("-inf"))
        b_piece_sum = tl.load(p_stat + o_part * 2 + 1, m_piece, other=0.0)
        # [CHUNK, BLOCK_D]
        b_part = tl.load(p_part + o_part[:, None] * d + o_d[None, :], m_piece[:, None] & (o_d < d)[None, :], other=0.0)
        b_new = tl.maximum(b_max, tl.max(b_piece_max, axis=0))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_piece_max - b_base)
        b_decay = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_decay + tl.sum(b_piece_sum * b_weight, axis=0)
        b_out = b_out * b_decay + tl.sum(b_part * b_weight[:, None], axis=0)
        b_max = b_new
    p_row = p_out + (i_b * rows + i_row) * d
    tl.store(p_row + o_d, (b_out * _inverse(b_sum, v_scale)).to(p_out.dtype.element_ty), o_d < d)


@dataclass(frozen=True)
class Tile:
    """Rows (queries) and slots that a program holds at a time, and how it runs."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def row_unit(packed: bool) -> int:
    """What strides of rows are multiples of, in elements, so that loads are vectors: rows of INT4 are half as long."""
    return 8 if packed else 16


def options_of(family: str) -> dict[str, int]:
    """What else is told the compiler: NVIDIA's would rather spill a little than leave the next occupancy."""
    return {} if family.startswith("cdna") else {"maxnreg": 255}


def first_of(d: int, packed: bool) -> int:
    """How many of a head's d values the first part has: half, or so that the second starts at a multiple of 16."""
    return d // 2 if packed else -(-d // 32) * 16


def family_of(arch: int | str) -> str:
    """Whose tiles a GPU takes, by compute capability (90) or name ("gfx942").

    "hopper": 9 and 10, whose matrix units read operands from shared memory and leave registers free; "ada": NVIDIA's
    others; "cdna3": AMD's without an instruction that makes BF16; "cdna4": the others.
    """
    if isinstance(arch, str):
        return "cdna3" if arch.startswith(("gfx90", "gfx94")) else "cdna4"
    return "hopper" if arch // 10 in (9, 10) else "ada"


def tile_for(family: str, block_h: int, rows: int, fp32: bool, stored: str) -> Tile:
    """The tile for `rows` queries of a KV head. `fp32`: operands are; `stored`: "integer", "fp8" or "none".

    Every choice is the largest of those tried that spills no register; more rows than it has make more tiles, which
    find the cache in L2.
    """
    if fp32:  # no matrix unit on NVIDIA: few rows, many threads
        return Tile(16, 16 if block_h == 128 else 32, 4 if block_h == 32 else 8, 1)
    if rows <= 16:
        few = block_h == 128 or (family.startswith("cdna") and stored == "integer")
        return Tile(16, 32 if few else 64, 4, 2)
    if family.startswith("cdna"):
        few = block_h == 128 or (stored == "integer" and (block_h == 64 or family == "cdna3"))
        return Tile(64, 16 if few else 32, 4, 2)
    if family == "hopper":
        return Tile(64, 32, 8, 2) if block_h == 128 else Tile(64, 64, 4, 2)
    # what has to be converted is not fetched ahead: it would wait in registers
    return Tile(64, 32, 8, 2 if stored == "none" else 1)


def sum_block(d: int) -> int:
    """BLOCK_D of `sum_pieces` for heads of d values; it waits for memory, and idle lanes cost it nothing."""
    return 128 if d <= 128 else 256


def sum_warps(block_d: int) -> int:
    """Warps of `sum_pieces`."""
    return block_d // 32


def variants(target: Target) -> list[Variant]:
    """Every choice that `attention.py` can make on the target."""
    floats = ("bf16", "fp16", "fp32")
    family = family_of(target.arch)
    found, sums = [], []
    for q in floats:
        metas = floats if q == "fp32" else (q,)
        stored = [(q, None, False), ("fp8e4nv", None, False), ("fp8e5", None, False)]
        stored += [("u8", meta, packed) for packed in (False, True) for meta in metas]
        for block_h, form in itertools.product(sorted(set(map(half_block, HEADS))), stored):
            kind = "integer" if form[1] else "none" if form[0] == q else "fp8"
            tiles = dict.fromkeys(tile_for(family, block_h, rows, q == "fp32", kind) for rows in (16, 17))
            found += [_piece_variant(family, q, block_h, *form, tile) for tile in tiles]
        for block_d in sorted(set(map(sum_block, HEADS))):
            sums.append(
                Variant(
                    sum_pieces,
                    f"→{q} d≤{block_d}",
                    {
                        "p_part": "*fp32", "p_stat": "*fp32", "p_position": "*i64", "p_out": f"*{q}",
                        **integers(sum_pieces, _SUM_NUMBERS), "v_scale": "fp32",
                    },
                    {"CHUNK": CHUNK, "BLOCK_D": block_d},
                    divisible=("p_part", "p_stat", "p_out"),
                    num_warps=sum_warps(block_d),
                    num_stages=2,
                    quick=(q, block_d) == ("bf16", 128),
                )
            )  # fmt: skip
    return with_large(found, target, ("p_code",)) + sums


def _piece_variant(family: str, q: str, block_h: int, code: str, meta: str | None, packed: bool, tile: Tile) -> Variant:
    pointers = {
        "p_q": f"*{q}", "p_code": f"*{code}", "p_position": "*i64", "p_table": "*i32", "p_out": f"*{q}",
        "p_part": "*fp32", "p_stat": "*fp32", **({"p_meta": f"*{meta}"} if meta else {}),
    }  # fmt: skip
    name = ("int4" if packed else "int8") if meta else code
    return Variant(
        attend_piece,
        f"{q}·{name}{f' meta {meta}' if meta else ''} d≤{2 * block_h} {tile.block_m}×{tile.block_n}",
        {**pointers, **integers(attend_piece, _PIECE_NUMBERS), "score_scale": "fp32", "v_scale": "fp32"},
        {
            **({} if meta else {"p_meta": None}), "INTEGER": meta is not None, "PACKED": packed,
            "UNIT": row_unit(packed), "CDNA3": family == "cdna3",
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_H": block_h,
        },
        divisible=("p_q", "p_code", "p_out", "p_part", "p_stat"),
        num_warps=tile.warps,
        num_stages=tile.stages,
        options=options_of(family),
        quick=(q, packed, block_h, tile.block_m) == ("bf16", True, 64, 16),
    )  # fmt: skip
