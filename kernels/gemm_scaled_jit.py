"""FP8 matrix product [m, k] × [n, k]ᵀ with a scale for the tensor, or for each row of x and of w: the kernel.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.gemm_block_jit import inside, offsets, product, tile_of
from mtplab.kernels.gemm_tiles import tiles
from mtplab.kernels.targets import Target
from mtplab.kernels.variants import Variant, with_large

__all__ = ["PROMOTE", "gemm_scaled", "variants"]

# GPUs whose FP8 matrix instructions add into fewer bits than float32 has, so that there each sum of 128 products is
# added to the float32 sum by ordinary instructions: 14 bits on Hopper (DeepSeek-V3, arXiv:2412.19437, section 3.3.2);
# Ada likewise (SageAttention2, arXiv:2411.10958). NVIDIA says nothing of sm_120, which is treated alike.
PROMOTE = ("sm_89", "sm_90", "sm_120")


# `gemm_block_jit.py` says why
_SIZES = ["m", "n", "k", "x_stride", "w_stride", "y_stride", "x_scale_stride", "w_scale_stride", "blocks"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["p_x_scale", "p_w_scale"])
def gemm_scaled(
    x,
    w,
    p_y,
    p_x_scale,
    p_w_scale,
    m,
    n,
    k,
    x_stride,
    w_stride,
    y_stride,
    x_scale_stride,
    w_scale_stride,
    blocks,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PROMOTED: tl.constexpr,
):
    """x [m, k] · w [n, k]ᵀ → y [m, n], or y [splits, m, n] of partial sums; scales [m] and [n], whose stride may be 0.

    Program (tile, split) sums `blocks` blocks of k and multiplies the sum by the product of the two scales. n, k and
    the strides of x, w and y are in units of UNIT elements.
    """
    n = n * UNIT
    k = k * UNIT
    x_stride = x_stride * UNIT
    w_stride = w_stride * UNIT
    i_m, i_n, o_m, o_n, o_x, o_w = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP)
    i_split = tl.program_id(1)
    first = i_split * blocks
    o_k = tl.arange(0, BLOCK_K)
    if SWAP:
        b_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i_k in range(first, min(first + blocks, tl.cdiv(k, BLOCK_K))):
        start = i_k * BLOCK_K
        if DESCRIPTORS:
            b_x = x.load([i_m * BLOCK_M, start])
            b_w = w.load([i_n * BLOCK_N, start])
        else:
            m_k = (start + o_k < k)[None, :]
            b_x = tl.load(x + o_x[:, None] * x_stride + (start + o_k)[None, :], m_k, other=0.0)
            b_w = tl.load(w + o_w[:, None] * w_stride + (start + o_k)[None, :], m_k, other=0.0)
        if SWAP:
            b_left, b_right = b_w, b_x.T
        else:
            b_left, b_right = b_x, b_w.T
        if PROMOTED:
            # a number at all keeps the compiler from adding into the instruction's own accumulator
            b_sum += tl.dot(b_left, b_right, max_num_imprecise_acc=BLOCK_K)
        else:
            b_sum = tl.dot(b_left, b_right, b_sum)
    b_x_scale = tl.load(p_x_scale + o_x * x_scale_stride)
    b_w_scale = tl.load(p_w_scale + o_w * w_scale_stride)
    if SWAP:
        b_sum *= b_w_scale[:, None] * b_x_scale[None, :]
    else:
        b_sum *= b_x_scale[:, None] * b_w_scale[None, :]
    p_split = p_y + i_split.to(tl.int64) * m * (y_stride * UNIT)
    o_y = offsets(o_m, o_n, y_stride * UNIT, SWAP)
    tl.store(p_split + o_y, b_sum.to(p_y.dtype.element_ty), inside(o_m, o_n, m, n, SWAP))


def variants(target: Target) -> list[Variant]:
    """Every choice that `gemm.py` can make on the target."""
    fixed = {"PROMOTED": target.name in PROMOTE}
    found = [
        product(gemm_scaled, target, tile, y, _SIZES, {}, fixed)
        for tile, y in itertools.product(tiles(target), ("bf16", "fp16", "fp32"))
    ]
    return with_large(found, target, ("w",))
