"""The short causal convolution of a few tokens, and the window it leaves: the kernel.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.sizes import TAPS
from mtplab.kernels.targets import Target
from mtplab.kernels.variants import UNITS, Variant, integers

__all__ = ["BLOCK_C", "conv_tokens", "variants"]

BLOCK_C = 512  # channels of a program: 8 bytes of BF16 a thread

# no number is specialised: one token and several run the same machine code, whatever strides they come with
_NUMBERS = ["t", "c", "width", "x_stride_b", "x_stride_t"]


@triton.jit(do_not_specialize=_NUMBERS)
def conv_tokens(
    p_x,
    p_state,
    p_weight,
    p_window,
    p_out,
    t,
    c,
    width,
    x_stride_b,
    x_stride_t,
    UNIT: tl.constexpr,
    MOST_TAPS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """silu(Σ_i w_i · row_{j+i}) of the rows state, then x: x [b, t, c], state [b, width−1, c], weight [width, c] → out.

    One program takes BLOCK_C channels of one token. Window [b, width−1+t, c] gets the rows, state first; IN_PLACE, for
    one token, state gets the last width−1 of them instead, each element from the thread that has read it. c and the
    strides are in units of UNIT elements; what taps beyond `width` would read is left out.
    """
    c = c * UNIT
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    i_t = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    m_c = o_c < c
    last = width - 1
    x_stride = x_stride_t.to(tl.int64) * UNIT
    p_x += i_b * (x_stride_b.to(tl.int64) * UNIT)
    p_state += i_b * last * c
    if not IN_PLACE:
        p_window += i_b * (last + t) * c
    b_sum = tl.zeros([BLOCK_C], dtype=tl.float32)
    for i in tl.static_range(MOST_TAPS):
        i_row = i_t + i
        m_row = m_c & (i <= last)
        kept = i_row < last
        b_old = tl.load(p_state + i_row * c + o_c, m_row & kept, other=0.0)
        b_new = tl.load(p_x + (i_row - last) * x_stride + o_c, m_row & (i_row >= last), other=0.0)
        b_row = tl.where(kept, b_old, b_new)
        b_sum += b_row.to(tl.float32) * tl.load(p_weight + i * c + o_c, m_row, other=0.0).to(tl.float32)
        if IN_PLACE:
            if i > 0:
                tl.store(p_state + (i - 1) * c + o_c, b_row, m_row)
        else:
            # each row once: the first token's program writes the old ones
            tl.store(p_window + i_row * c + o_c, b_row, m_row & ((i_t == 0) | (i == last)))
    b_out = b_sum * tl.sigmoid(b_sum)
    tl.store(p_out + (i_b * t + i_t) * c + o_c, b_out.to(p_out.dtype.element_ty), m_c)


def variants(target: Target) -> list[Variant]:
    """Every choice that `conv_update.py` can make, the same on all targets."""
    return [
        Variant(
            conv_tokens,
            f"{x}{' in place' if in_place else ''}{' unaligned' if unit == 1 else ''}",
            {
                "p_x": f"*{x}", "p_state": f"*{x}", "p_weight": f"*{x}", "p_out": f"*{x}",
                **({} if in_place else {"p_window": f"*{x}"}), **integers(conv_tokens, _NUMBERS),
            },
            {
                "UNIT": unit, "MOST_TAPS": max(TAPS), "IN_PLACE": in_place, "BLOCK_C": BLOCK_C,
                **({"p_window": None} if in_place else {}),
            },
            divisible=("p_x", "p_state", "p_weight", "p_out", *(() if in_place else ("p_window",))),
            quick=(x, in_place, unit) == ("bf16", False, 16),
        )
        for unit, x, in_place in itertools.product(UNITS, ("bf16", "fp16", "fp32"), (False, True))
    ]  # fmt: skip
