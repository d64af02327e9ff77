"""Dynamic FP8 quantisation of activations, per token and group of columns or per whole token: the kernel.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.targets import Target
from mtplab.kernels.variants import Variant

__all__ = ["GROUP", "TOKEN_BLOCK", "codes_of", "nearest_float8", "quantize_rows", "rows_for", "variants"]

GROUP = 128  # columns that share a scale
# columns of one token that a program holds at a time when a token has one scale
TOKEN_BLOCK = 2048


@triton.jit
def quantize_rows(
    p_x,
    p_code,
    p_scale,
    m,
    k,
    x_stride,
    code_stride,
    scale_stride_m,
    scale_stride_g,
    TOP: tl.constexpr,
    FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """x [m, k] → codes [m, k] and float32 scales [m, groups].

    One program quantises BLOCK_M rows of one group of BLOCK_K columns or, with WHOLE, all columns of the rows, of which
    it reads those past the first BLOCK_K twice. A row's result depends on that row only. scale = max(amax, FLOOR) /
    TOP, rounded up to a power of two if asked; a NaN anywhere makes its group NaN.
    """
    o_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    i_g = tl.program_id(1)
    o_k = i_g * BLOCK_K + tl.arange(0, BLOCK_K)
    m_m = o_m < m
    p_rows = p_x + o_m[:, None] * x_stride
    p_codes = p_code + o_m[:, None] * code_stride
    # [BLOCK_M, BLOCK_K]
    mask = m_m[:, None] & (o_k < k)[None, :]
    b_x = tl.load(p_rows + o_k[None, :], mask, other=0.0).to(tl.float32)
    b_amax = tl.max(tl.abs(b_x), axis=1)
    b_nan = tl.max((b_x != b_x).to(tl.int32), axis=1)
    if WHOLE:
        for start in range(BLOCK_K, k, BLOCK_K):
            b_more = tl.load(p_rows + start + o_k[None, :], m_m[:, None] & (start + o_k < k)[None, :], other=0.0)
            b_more = b_more.to(tl.float32)
            b_amax = tl.maximum(b_amax, tl.max(tl.abs(b_more), axis=1))
            b_nan = tl.maximum(b_nan, tl.max((b_more != b_more).to(tl.int32), axis=1))
    b_scale = tl.div_rn(tl.maximum(b_amax, FLOOR), TOP)
    if POWER_OF_TWO:
        # the exponent, one more where the mantissa is not zero: 2^ceil(log2 scale) without a logarithm's rounding
        b_bits = b_scale.to(tl.int32, bitcast=True)
        b_exponent = (b_bits >> 23) + ((b_bits & 0x7FFFFF) != 0).to(tl.int32)
        b_scale = (b_exponent << 23).to(tl.float32, bitcast=True)
    b_scale = tl.where(b_nan > 0, float("nan"), b_scale)
    tl.store(p_scale + o_m * scale_stride_m + i_g * scale_stride_g, b_scale, m_m)
    tl.store(p_codes + o_k[None, :], codes_of(b_x, b_scale, TOP, p_code.dtype.element_ty), mask)
    if WHOLE:
        for start in range(BLOCK_K, k, BLOCK_K):
            more = m_m[:, None] & (start + o_k < k)[None, :]
            b_more = tl.load(p_rows + start + o_k[None, :], more, other=0.0).to(tl.float32)
            b_code = codes_of(b_more, b_scale, TOP, p_code.dtype.element_ty)
            tl.store(p_codes + start + o_k[None, :], b_code, more)


@triton.jit
def codes_of(b_x, b_scale, TOP: tl.constexpr, code: tl.constexpr):
    """[BLOCK_M, BLOCK_K] / [BLOCK_M] as FP8 of type `code`, rounded as division and a cast to nearest even are."""
    return nearest_float8(tl.div_rn(b_x, tl.broadcast_to(b_scale[:, None], b_x.shape)), TOP, code)


@triton.jit
def nearest_float8(b_x, TOP: tl.constexpr, code: tl.constexpr):
    """float32 → FP8 of type `code`, ties to even, kept within ±TOP, its largest number; a NaN stays.

    Rounded before the cast, which is then exact however it is done: for sm_89 Triton cuts float32 to FP16 first, which
    makes a tie of what is a little more. Adding 1.5 · 2^(e + 23 − mantissa bits) rounds a value of exponent e; below
    the least normal number the spacing stays.
    """
    b_x = tl.where(b_x == b_x, tl.clamp(b_x, -TOP, TOP), b_x)
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_power = (b_bits & 0x7F800000).to(tl.float32, bitcast=True)
    if code == tl.float8e4nv:
        b_magic = tl.maximum(b_power, 0.015625) * 1572864.0
    elif code == tl.float8e4b8:
        b_magic = tl.maximum(b_power, 0.0078125) * 1572864.0
    elif code == tl.float8e5:
        b_magic = tl.maximum(b_power, 0.00006103515625) * 3145728.0
    else:
        tl.static_assert(code == tl.float8e5b16)
        b_magic = tl.maximum(b_power, 0.000030517578125) * 3145728.0
    b_round = (b_x + b_magic) - b_magic
    # a negative value that becomes zero keeps its sign
    b_bits = b_round.to(tl.int32, bitcast=True) | (b_bits & -0x80000000)
    return b_bits.to(tl.float32, bitcast=True).to(code)


def rows_for(m: int) -> int:
    """Rows a program takes of m: 1 keeps a decode's programs many, 8 a prompt's few."""
    return 1 if m <= 64 else 8


def variants(target: Target) -> list[Variant]:
    """Every choice that `quantize.py` can make on the target."""
    rows = [(False, 1), (False, 8), (True, 1)]  # whole token or group, rows of a program
    sources, codes = ("bf16", "fp16", "fp32"), (target.e4m3, target.e5m2)
    return [
        Variant(
            quantize_rows,
            f"{'token' if whole else 'group'} {m}×{x}→{code}{' ue8m0' if power else ''}",
            {
                "p_x": f"*{x}", "p_code": f"*{code}", "p_scale": "*fp32", "m": "i32", "k": "i32",
                "x_stride": "i64", "code_stride": "i64", "scale_stride_m": "i64", "scale_stride_g": "i64",
            },
            {
                "TOP": target.top(code), "FLOOR": 1e-6, "POWER_OF_TWO": power, "BLOCK_M": m,
                "BLOCK_K": TOKEN_BLOCK if whole else GROUP, "WHOLE": whole,
            },
            divisible=("p_x", "p_code", "p_scale"),
            quick=(whole, m, power, x, code) == (False, 8, False, "bf16", target.e4m3),
        )
        for (whole, m), power, x, code in itertools.product(rows, (False, True), sources, codes)
    ]  # fmt: skip
