"""Dynamic FP8 quantisation of activations, per token and group of columns or per whole token: the kernel.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.targets import Target
from mtplab.kernels.variants import UNITS, Variant, integers

__all__ = [
    "GROUP", "TOKEN_BLOCK", "codes_of", "constants", "nearest_float8", "quantize_rows", "rows_for", "scale_of",
    "variants",
]  # fmt: skip

GROUP = 128  # columns that share a scale
# columns of one token that a program holds at a time when a token has one scale
TOKEN_BLOCK = 2048

# what changes as a batch drains, or from one layer to the next, must not compile a kernel anew
_NUMBERS = ["m", "k", "x_stride", "scale_stride_m", "scale_stride_g", "power_of_two"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["p_scale"])
def quantize_rows(
    p_x,
    p_code,
    p_scale,
    m,
    k,
    x_stride,
    scale_stride_m,
    scale_stride_g,
    power_of_two,
    UNIT: tl.constexpr,
    TOP: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """x [m, k] → codes [m, k], contiguous, and float32 scales [m, groups]; k and x_stride are in UNITs of elements.

    One program quantises BLOCK_M rows of one group of BLOCK_K columns or, with WHOLE, all columns of the rows, of which
    it reads those past the first BLOCK_K twice. A row's result depends on that row only. scale = max(amax, FLOOR) /
    TOP, rounded up to a power of two where power_of_two is not 0; a NaN anywhere makes its group NaN.
    """
    k = k * UNIT
    o_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    i_g = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_m = o_m < m
    p_rows = p_x + o_m[:, None] * (x_stride.to(tl.int64) * UNIT)
    p_codes = p_code + o_m[:, None] * k
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
    b_scale = scale_of(b_amax, b_nan, power_of_two, TOP, FLOOR)
    tl.store(p_scale + o_m * scale_stride_m + i_g * scale_stride_g, b_scale, m_m)
    tl.store(p_codes + o_k[None, :], codes_of(b_x, b_scale, TOP, p_code.dtype.element_ty), mask)
    if WHOLE:
        for start in range(BLOCK_K, k, BLOCK_K):
            more = m_m[:, None] & (start + o_k < k)[None, :]
            b_more = tl.load(p_rows + start + o_k[None, :], more, other=0.0).to(tl.float32)
            b_code = codes_of(b_more, b_scale, TOP, p_code.dtype.element_ty)
            tl.store(p_codes + start + o_k[None, :], b_code, more)


@triton.jit
def scale_of(b_amax, b_nan, power_of_two, TOP: tl.constexpr, FLOOR: tl.constexpr):
    """Scales [BLOCK_M] of groups with these largest magnitudes and, where b_nan is above 0, a NaN among them."""
    b_scale = tl.div_rn(tl.maximum(b_amax, FLOOR), TOP)
    # the exponent, one more where the mantissa is not zero: 2^ceil(log2 scale) without a logarithm's rounding
    b_bits = b_scale.to(tl.int32, bitcast=True)
    b_exponent = (b_bits >> 23) + ((b_bits & 0x7FFFFF) != 0).to(tl.int32)
    b_scale = tl.where(power_of_two != 0, (b_exponent << 23).to(tl.float32, bitcast=True), b_scale)
    return tl.where(b_nan > 0, float("nan"), b_scale)


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


def constants(unit: int, rows: int, top: float, whole: bool = False) -> dict[str, int | float]:
    """What `quantize_rows` and `silu_quantize` are compiled with."""
    return {
        "UNIT": unit, "TOP": top, "FLOOR": 1e-6, "BLOCK_M": rows, "BLOCK_K": TOKEN_BLOCK if whole else GROUP,
    }  # fmt: skip


def variants(target: Target) -> list[Variant]:
    """Every choice that `quantize.py` can make on the target."""
    rows = [(False, 1), (False, 8), (True, 1)]  # whole token or group, rows of a program
    sources, codes = ("bf16", "fp16", "fp32"), (target.e4m3, target.e5m2)
    return [
        Variant(
            quantize_rows,
            f"{'token' if whole else 'group'} {m}×{x}→{code}{' unaligned' if unit == 1 else ''}",
            {"p_x": f"*{x}", "p_code": f"*{code}", "p_scale": "*fp32", **integers(quantize_rows, _NUMBERS)},
            {**constants(unit, m, target.top(code), whole), "WHOLE": whole},
            divisible=("p_x", "p_code"),
            quick=(whole, m, x, code, unit) == (False, 8, "bf16", target.e4m3, 16),
        )
        for (whole, m), unit, x, code in itertools.product(rows, UNITS, sources, codes)
    ]
