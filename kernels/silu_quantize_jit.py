"""silu(gate) · up and its FP8 quantisation in one pass, between the two projections of a gated layer: the kernel.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.quantize_jit import codes_of, constants, scale_of
from mtplab.kernels.targets import Target
from mtplab.kernels.variants import UNITS, Variant, integers

__all__ = ["silu_quantize", "variants"]


# `quantize_jit.py` says why
_NUMBERS = ["m", "k", "h_stride", "scale_stride_m", "scale_stride_g", "power_of_two"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["p_scale"])
def silu_quantize(
    p_h,
    p_code,
    p_scale,
    m,
    k,
    h_stride,
    scale_stride_m,
    scale_stride_g,
    power_of_two,
    UNIT: tl.constexpr,
    TOP: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """h [m, 2 · k], gate then up → codes [m, k] and float32 scales [m, ceil(k / BLOCK_K)] of silu(gate) · up.

    One program takes BLOCK_M rows of one group of BLOCK_K columns; a row's result depends on that row only. Scales are
    rounded up to powers of two where power_of_two is not 0. k and h_stride are in units of UNIT elements.
    """
    k = k * UNIT
    o_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    i_g = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    # [BLOCK_M, BLOCK_K]
    mask = (o_m < m)[:, None] & (o_k < k)[None, :]
    p_gate = p_h + o_m[:, None] * (h_stride.to(tl.int64) * UNIT) + o_k[None, :]
    b_gate = tl.load(p_gate, mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + k, mask, other=0.0).to(tl.float32)
    b_x = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    b_nan = tl.max((b_x != b_x).to(tl.int32), axis=1)
    b_scale = scale_of(tl.max(tl.abs(b_x), axis=1), b_nan, power_of_two, TOP, FLOOR)
    tl.store(p_scale + o_m * scale_stride_m + i_g * scale_stride_g, b_scale, o_m < m)
    b_code = codes_of(b_x, b_scale, TOP, p_code.dtype.element_ty)
    tl.store(p_code + o_m[:, None] * k + o_k[None, :], b_code, mask)


def variants(target: Target) -> list[Variant]:
    """Every choice that `silu_quantize.py` can make on the target."""
    return [
        Variant(
            silu_quantize,
            f"{rows}×{h}→{target.e4m3}{' unaligned' if unit == 1 else ''}",
            {"p_h": f"*{h}", "p_code": f"*{target.e4m3}", "p_scale": "*fp32", **integers(silu_quantize, _NUMBERS)},
            constants(unit, rows, target.top(target.e4m3)),
            divisible=("p_h", "p_code"),
            quick=(rows, h, unit) == (8, "bf16", 16),
        )
        for rows, unit, h in itertools.product((1, 8), UNITS, ("bf16", "fp16", "fp32"))
    ]
