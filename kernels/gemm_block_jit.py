"""Block-scaled FP8 matrix product, [m, k] × [n, k]ᵀ: the kernels.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools
from typing import Any

import triton
import triton.language as tl

from mtplab.kernels.gemm_tiles import BLOCK, Tile, tiles
from mtplab.kernels.targets import Target
from mtplab.kernels.variants import UNITS, Variant, integers, with_large

__all__ = [
    "SUM_COLUMNS", "constants", "gemm_block", "inside", "offsets", "place", "product", "sum_blocks", "sum_splits",
    "tile_of", "variants",
]  # fmt: skip

SUM_COLUMNS = 1024  # columns of one row that a program of `sum_splits` takes

# What varies from call to call: a size that happens to be 1 or a multiple of 16 must not compile a kernel anew; UNIT
# says what is known of them.
_GEMM_SIZES = [
    "m", "n", "k", "x_stride", "w_stride", "y_stride", "residual_stride", "x_scale_stride_m", "x_scale_stride_k",
    "w_scale_stride_n", "w_scale_stride_k", "blocks",
]  # fmt: skip
_SUM_SIZES = ["m", "n", "splits", "y_stride", "residual_stride"]


@triton.jit
def place(i_tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Number of a program → its tile: GROUP rows of tiles side by side, whose operands then stay in L2."""
    per_group = GROUP * tiles_n
    first = i_tile // per_group * GROUP
    height = min(tiles_m - first, GROUP)
    return first + i_tile % per_group % height, i_tile % per_group // height


@triton.jit
def tile_of(i_tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Number of a program → its tile's place, its rows and columns of y, and those of x and w that can all be read.

    Rows beyond the last read the last one again, and are not stored.
    """
    i_m, i_n = place(i_tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP)
    o_m = (i_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    o_n = (i_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    return i_m, i_n, o_m, o_n, tl.minimum(o_m, m - 1), tl.minimum(o_n, n - 1)


@triton.jit
def offsets(o_m, o_n, stride, SWAP: tl.constexpr):
    """Of a tile in rows `stride` apart: [BLOCK_M, BLOCK_N], or its transpose with SWAP."""
    if SWAP:
        return o_m[None, :] * stride + o_n[:, None]
    else:
        return o_m[:, None] * stride + o_n[None, :]


@triton.jit
def inside(o_m, o_n, m, n, SWAP: tl.constexpr):
    """Which of a tile's elements there are, as `offsets` lays them out."""
    if SWAP:
        return (o_m < m)[None, :] & (o_n < n)[:, None]
    else:
        return (o_m < m)[:, None] & (o_n < n)[None, :]


@triton.jit
def sum_blocks(
    x,
    w,
    p_x_scale,
    p_w_scale,
    row_x,
    row_w,
    o_x,
    o_w,
    k,
    x_stride,
    w_stride,
    x_scale_stride_k,
    w_scale_stride_k,
    first,
    last,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Blocks first to last of k, in float32: [BLOCK_M, BLOCK_N], or its transpose with SWAP.

    Each block's product is summed by the matrix unit, multiplied by the product of its two scales and added. x and w
    are pointers whose rows o_x and o_w can all be read, or descriptors of blocks from rows row_x and row_w.
    p_x_scale [BLOCK_M] and p_w_scale [] point to block 0.
    """
    o_k = tl.arange(0, BLOCK_K)
    # scales that lie block by block are as far apart as there are rows
    x_scale_stride_k = x_scale_stride_k.to(tl.int64)
    w_scale_stride_k = w_scale_stride_k.to(tl.int64)
    if SWAP:
        b_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i_k in range(first, last):
        start = i_k * BLOCK_K
        if DESCRIPTORS:
            # beyond the last row and column they read zeros
            b_x = x.load([row_x, start])
            b_w = w.load([row_w, start])
        else:
            m_k = (start + o_k < k)[None, :]
            b_x = tl.load(x + o_x[:, None] * x_stride + (start + o_k)[None, :], m_k, other=0.0)
            b_w = tl.load(w + o_w[:, None] * w_stride + (start + o_k)[None, :], m_k, other=0.0)
        b_scale = tl.load(p_x_scale + i_k * x_scale_stride_k) * tl.load(p_w_scale + i_k * w_scale_stride_k)
        if SWAP:
            b_sum += tl.dot(b_w, b_x.T) * b_scale[None, :]
        else:
            b_sum += tl.dot(b_x, b_w.T) * b_scale[:, None]
    return b_sum


@triton.jit(do_not_specialize=_GEMM_SIZES, do_not_specialize_on_alignment=["p_x_scale", "p_w_scale"])
def gemm_block(
    x,
    w,
    p_y,
    p_residual,
    p_x_scale,
    p_w_scale,
    m,
    n,
    k,
    x_stride,
    w_stride,
    y_stride,
    residual_stride,
    x_scale_stride_m,
    x_scale_stride_k,
    w_scale_stride_n,
    w_scale_stride_k,
    blocks,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """x [m, k] · w [n, k]ᵀ (+ residual [m, n]) → y [m, n], or y [splits, m, n] of partial sums.

    Program (tile, split) sums `blocks` blocks of k. x_scale [m, ceil(k / BLOCK_K)], w_scale by blocks of BLOCK_K ×
    BLOCK_K. n, k and the strides of x, w, y and the residual are in units of UNIT elements, from which the compiler
    knows how they are aligned.
    """
    n = n * UNIT
    k = k * UNIT
    i_m, i_n, o_m, o_n, o_x, o_w = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP)
    i_split = tl.program_id(1)
    first = i_split * blocks
    last = min(first + blocks, tl.cdiv(k, BLOCK_K))
    b_y = sum_blocks(
        x, w, p_x_scale + o_x * x_scale_stride_m,
        p_w_scale + (i_n * BLOCK_N // BLOCK_K).to(tl.int64) * w_scale_stride_n,
        i_m * BLOCK_M, i_n * BLOCK_N, o_x, o_w, k, x_stride * UNIT, w_stride * UNIT, x_scale_stride_k,
        w_scale_stride_k, first, last, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, DESCRIPTORS,
    )  # fmt: skip
    mask = inside(o_m, o_n, m, n, SWAP)
    if p_residual is not None:
        b_y += tl.load(p_residual + offsets(o_m, o_n, residual_stride * UNIT, SWAP), mask, other=0.0).to(tl.float32)
    p_split = p_y + i_split.to(tl.int64) * m * (y_stride * UNIT)
    tl.store(p_split + offsets(o_m, o_n, y_stride * UNIT, SWAP), b_y.to(p_y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=_SUM_SIZES)
def sum_splits(
    p_part,
    p_y,
    p_residual,
    m,
    n,
    splits,
    y_stride,
    residual_stride,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """part [splits, m, n] float32 (+ residual [m, n]) → y [m, n], split after split, BLOCK_N columns of one row."""
    n = n * UNIT
    i_m = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = o_n < n
    b_y = tl.zeros((BLOCK_N,), tl.float32)
    for i_split in range(splits):
        b_y += tl.load(p_part + (i_split * m + i_m) * n + o_n, mask, other=0.0)
    if p_residual is not None:
        b_y += tl.load(p_residual + i_m * (residual_stride * UNIT) + o_n, mask, other=0.0).to(tl.float32)
    tl.store(p_y + i_m * (y_stride * UNIT) + o_n, b_y.to(p_y.dtype.element_ty), mask)


def variants(target: Target) -> list[Variant]:
    """Every choice that `gemm.py` can make on the target, with addresses as whole tensors have them.

    Where a slice's address is no multiple of 16 the unaligned tile is compiled once more without that; it reads single
    bytes either way.
    """
    outputs = list(itertools.product(("bf16", "fp16", "fp32"), (False, True)))
    found = []
    for tile, (y, residual) in itertools.product(tiles(target), outputs):
        more = {"p_residual": f"*{y}"} if residual else {}
        fixed = {} if residual else {"p_residual": None}
        found.append(product(gemm_block, target, tile, y, _GEMM_SIZES, more, fixed, "p_residual"))
    found = with_large(found, target, ("w",))
    for unit, (y, residual) in itertools.product(UNITS, outputs):
        pointers = ["p_part", "p_y", *(["p_residual"] if residual else [])]
        found.append(
            Variant(
                sum_splits,
                f"{'aligned' if unit == 16 else 'unaligned'}→{y}{' +residual' if residual else ''}",
                {"p_part": "*fp32", "p_y": f"*{y}"}
                | ({"p_residual": f"*{y}"} if residual else {})
                | integers(sum_splits, _SUM_SIZES),
                {"UNIT": unit, "BLOCK_N": SUM_COLUMNS} | ({} if residual else {"p_residual": None}),
                divisible=tuple(pointers),
                quick=(unit, y, residual) == (16, "bf16", False),
            )
        )
    return found


def product(
    kernel: Any, target: Target, tile: Tile, y: str, sizes: list[str], more: dict[str, str], fixed: dict[str, Any],
    *divisible: str,
) -> Variant:  # fmt: skip
    """A product in one tile, results of type y: what all kernels of products have, and of its own the run-time
    arguments `more`, the constants `fixed`, and those of `divisible` that it has.
    """
    signature = operands(tile, target.e4m3) | {"p_y": f"*{y}", "p_x_scale": "*fp32", "p_w_scale": "*fp32"} | more
    whole = ("p_y", *(name for name in divisible if name in more), *(() if tile.descriptors else ("x", "w")))
    return Variant(
        kernel,
        f"{tile.label}→{y}{' +residual' if 'p_residual' in more else ''}",
        signature | integers(kernel, sizes),
        constants(tile) | fixed,
        divisible=whole,
        num_warps=tile.warps,
        num_stages=tile.stages,
        fp8_mma=True,
        quick=(tile, y) == (tiles(target)[1], "bf16") and "p_residual" not in more,
    )


def constants(tile: Tile) -> dict[str, int]:
    """What `gemm_block` is compiled with for a tile."""
    return {
        "UNIT": tile.unit, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": BLOCK, "GROUP": 8,
        "SWAP": tile.swap, "DESCRIPTORS": tile.descriptors,
    }  # fmt: skip


def operands(tile: Tile, e4m3: str) -> dict[str, str]:
    """Triton's types of x and w."""
    if tile.descriptors:
        return {name: f"tensordesc<{e4m3}[{size}, {BLOCK}]>" for name, size in (("x", tile.rows), ("w", tile.columns))}
    return {"x": f"*{e4m3}", "w": f"*{e4m3}"}
