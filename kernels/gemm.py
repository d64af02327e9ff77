"""FP8 matrix products: the launchers. Their torch references are in `gemm_reference.py`.

Knows nothing of how x was quantised; `quantize.py` does that. Experts' products are in `gemm_grouped.py`.
"""

from __future__ import annotations

import torch

from mtplab.kernels.gemm_plan import Plan, check_operands, check_target, operand, plan
from mtplab.kernels.gemm_reference import gemm_block_reference, gemm_scaled_reference
from mtplab.kernels.gemm_tiles import BLOCK
from mtplab.kernels.launch import check, check_together, chosen, interpreted, step, target

__all__ = ["gemm_block", "gemm_scaled"]


def gemm_block(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · wᵀ (+ residual) of block-scaled FP8.

    Args:
        x: E4M3 codes [m, k], k at least 1 (FNUZ on gfx942, see `fnuz.py`).
        x_scale: float32 [m, ceil(k / 128)], of any strides.
        w: E4M3 codes [n, k], rows contiguous.
        w_scale: float32 [ceil(n / 128), ceil(k / 128)]; ragged last blocks follow the grid of 128.
        out_dtype: BF16, FP16 or FP32.
        residual: [m, n] of out_dtype, rows contiguous, added in float32 before the one rounding.

    Returns: [m, n] of out_dtype. Products of 128 columns are summed by the matrix unit, multiplied by the product of
    their two scales and added in float32 (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    The same arguments give the same bits: nothing is added atomically. A row's bits depend on that row, w and the tile;
    the tile and the order of the sum on how many rows there are, never on what is in them. Up to 16 rows take one tile
    and 17 to 64 another, and either may divide k among programs, as n, k and the GPU say; more rows take one of two
    more. Bits of different tiles may differ. Where k, n, a stride or an address is no multiple of 16 a slow tile is
    taken for any number of rows.

    Raises ValueError for shapes and dtypes other than these.
    """
    m, k = check_operands(x, w, out_dtype)
    check("w", w, (None, k), (x.dtype,))
    n, blocks = w.shape[0], -(-k // BLOCK)
    check("x_scale", x_scale, (m, blocks), (torch.float32,))
    check("w_scale", w_scale, (-(-n // BLOCK), blocks), (torch.float32,))
    if residual is not None:
        check("residual", residual, (m, n), (out_dtype,))
    check_together(x=x, x_scale=x_scale, w=w, w_scale=w_scale, residual=residual)
    if chosen(x.device) == "reference":
        return gemm_block_reference(x, x_scale, w, w_scale, residual).to(out_dtype)
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    interpreted()
    from mtplab.kernels.gemm_block_jit import constants
    from mtplab.kernels.gemm_block_jit import gemm_block as kernel

    check_target(x)
    x, w, residual = _rows_contiguous(x), _rows_contiguous(w, "w"), _rows_contiguous(residual)
    cut = plan(x, w, residual)
    tile, unit = cut.tile, cut.tile.unit
    part = _part(y, cut)
    added = residual if cut.parts == 1 else None
    kernel[cut.grid](
        operand(x, tile.rows, tile), operand(w, tile.columns, tile), part, added, x_scale, w_scale,
        m, n // unit, k // unit, step(x) // unit, step(w) // unit, n // unit, step(added) // unit,
        *x_scale.stride(), *w_scale.stride(), cut.blocks,
        **constants(tile), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return _sum(part, y, residual, cut)


def gemm_scaled(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x · wᵀ of FP8 with one scale for a whole tensor, or one for each of its rows.

    Args:
        x: E4M3 codes [m, k], k at least 1 (FNUZ on gfx942, see `fnuz.py`).
        x_scale: float32, one element (static, per tensor) or [m, 1] (dynamic, per token), never over the batch.
        w: E4M3 codes [n, k], rows contiguous.
        w_scale: float32, one element (per tensor) or [n, 1] (per channel).
        out_dtype: BF16, FP16 or FP32.

    Returns: [m, n] of out_dtype: the codes' product, summed in float32, times the product of the two scales. On GPUs
    whose matrix unit sums in fewer bits it sums 128 columns at a time. Of bits the same holds as for `gemm_block`.

    Raises ValueError for shapes and dtypes other than these.
    """
    m, k = check_operands(x, w, out_dtype)
    check("w", w, (None, k), (x.dtype,))
    n = w.shape[0]
    for name, scale, rows in (("x_scale", x_scale, m), ("w_scale", w_scale, n)):
        check(name, scale, tuple(scale.shape) if scale.numel() == 1 else (rows, 1), (torch.float32,))
    check_together(x=x, x_scale=x_scale, w=w, w_scale=w_scale)
    if chosen(x.device) == "reference":
        return gemm_scaled_reference(x, x_scale, w, w_scale).to(out_dtype)
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    interpreted()
    from mtplab.kernels.gemm_block_jit import constants
    from mtplab.kernels.gemm_scaled_jit import PROMOTE
    from mtplab.kernels.gemm_scaled_jit import gemm_scaled as kernel

    check_target(x)
    x, w = _rows_contiguous(x), _rows_contiguous(w, "w")
    cut = plan(x, w)
    tile, unit = cut.tile, cut.tile.unit
    part = _part(y, cut)
    kernel[cut.grid](
        operand(x, tile.rows, tile), operand(w, tile.columns, tile), part, x_scale, w_scale,
        m, n // unit, k // unit, step(x) // unit, step(w) // unit, n // unit,
        *(0 if scale.numel() == 1 else scale.stride(0) for scale in (x_scale, w_scale)), cut.blocks,
        **constants(tile), PROMOTED=target(x.device).name in PROMOTE, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return _sum(part, y, None, cut)


def _rows_contiguous(x: torch.Tensor | None, weight: str | None = None) -> torch.Tensor | None:
    """Activations of other strides are copied; to copy a weight at every call would be a mistake, and is refused."""
    if x is None or x.stride(1) == 1 or x.shape[1] == 1:
        return x
    if weight is not None:
        raise ValueError(f"{weight} has strides {x.stride()}; expected contiguous rows")
    return x.contiguous()


def _part(y: torch.Tensor, cut: Plan) -> torch.Tensor:
    """Where the programs write: y, or partial sums [parts, m, n] in float32."""
    if cut.parts == 1:
        return y
    return torch.empty(cut.parts, *y.shape, dtype=torch.float32, device=y.device)


def _sum(part: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None, cut: Plan) -> torch.Tensor:
    """Partial sums, if there are any, into y."""
    if cut.parts == 1:
        return y
    from mtplab.kernels.gemm_block_jit import SUM_COLUMNS, sum_splits

    (m, n), unit = y.shape, cut.tile.unit
    sum_splits[(m, -(-n // SUM_COLUMNS))](
        part, y, residual, m, n // unit, cut.parts, n // unit, step(residual) // unit,
        UNIT=unit, BLOCK_N=SUM_COLUMNS, num_warps=4, num_stages=1,
    )  # fmt: skip
    return y
