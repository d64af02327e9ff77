"""Block-scaled FP8 matrix products of mixture-of-experts layers, a weight for each group of rows: the kernel.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.gemm_block_jit import inside, offsets, place, product, sum_blocks
from mtplab.kernels.gemm_tiles import tiles
from mtplab.kernels.targets import Target
from mtplab.kernels.variants import Variant, with_large

__all__ = ["gemm_grouped", "variants"]

# `gemm_block_jit.py` says why
_SIZES = [
    "tiles_m", "n", "k", "x_stride", "x_scale_stride_t", "x_scale_stride_k", "w_scale_stride_e", "w_scale_stride_n",
    "w_scale_stride_k",
]  # fmt: skip
# read element by element: their alignment is of no use, and must not compile a kernel anew either
_SINGLE = ["p_x_scale", "p_w_scale", "p_offset", "p_tile_expert", "p_tile_row"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SINGLE)
def gemm_grouped(
    x,
    w,
    p_y,
    p_x_scale,
    p_w_scale,
    p_offset,
    p_tile_expert,
    p_tile_row,
    tiles_m,
    n,
    k,
    x_stride,
    x_scale_stride_t,
    x_scale_stride_k,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """x [t, k] · w [e, n, k]ᵀ of each row's expert → y [t, n].

    Rows offset[i] to offset[i + 1] are expert i's. Tile j begins at row tile_row[j] and ends before its expert's last
    row does; its expert is tile_expert[j], or -1 where there is nothing to do. x_scale [t, ceil(k / BLOCK_K)], w_scale
    [e, ceil(n / BLOCK_K), ceil(k / BLOCK_K)]; w and y are contiguous. n, k and x_stride are in units of UNIT elements.
    """
    n = n * UNIT
    k = k * UNIT
    i_m, i_n = place(tl.program_id(0), tiles_m, tl.cdiv(n, BLOCK_N), GROUP)
    expert = tl.load(p_tile_expert + i_m)
    if expert < 0:
        return
    row = tl.load(p_tile_row + i_m)
    end = tl.load(p_offset + expert + 1)
    o_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows of w, as if the experts' weights stood below each other
    first_w = expert.to(tl.int64) * n
    # rows beyond the last read the last one again, or through a descriptor another expert's; they are not stored
    o_x = tl.minimum(o_m, end - 1)
    o_w = first_w + tl.minimum(o_n, n - 1)
    i_block = (i_n * BLOCK_N // BLOCK_K).to(tl.int64)
    p_w_block = p_w_scale + expert.to(tl.int64) * w_scale_stride_e + i_block * w_scale_stride_n
    b_y = sum_blocks(
        x, w, p_x_scale + o_x * x_scale_stride_t, p_w_block, row, first_w.to(tl.int32) + i_n * BLOCK_N, o_x, o_w, k,
        x_stride * UNIT, k, x_scale_stride_k, w_scale_stride_k, 0, tl.cdiv(k, BLOCK_K), BLOCK_M, BLOCK_N, BLOCK_K, SWAP,
        DESCRIPTORS,
    )  # fmt: skip
    tl.store(p_y + offsets(o_m, o_n, n, SWAP), b_y.to(p_y.dtype.element_ty), inside(o_m, o_n, end, n, SWAP))


def variants(target: Target) -> list[Variant]:
    """Every choice that `gemm_grouped.py` can make on the target."""
    routing = dict.fromkeys(("p_offset", "p_tile_expert", "p_tile_row"), "*i32")
    found = [
        product(gemm_grouped, target, tile, y, _SIZES, routing, {})
        for tile, y in itertools.product(tiles(target), ("bf16", "fp16", "fp32"))
    ]
    return with_large(found, target, ("w",))
