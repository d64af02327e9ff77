"""The gated delta rule over the few tokens of a round, one after another: the kernel.

Prefixes: i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.sizes import HEAD_STEP, LARGEST_HEAD
from mtplab.kernels.targets import Target
from mtplab.kernels.variants import Variant, integers, with_large

__all__ = ["UNIT", "delta_rule_tokens", "tile_for", "variants"]

UNIT = HEAD_STEP  # what dk, dv and the strides of q, k and v are given in, so that their rows are read in vectors

# Rows of a state that a program holds: columns, warps. One warp, where it can hold them without spilling on any GPU,
# keeps the four sums over dk of a token (two norms, kᵀS, qᵀS) inside it; across warps each costs two barriers. A row of
# the tile is at least two 32-byte sectors.
_BLOCKS = {64: (16, 1), 128: (16, 1), LARGEST_HEAD: (16, 4)}

# no number is specialised: one token and several run the same machine code, so that a round's states are those of as
# many single steps, bit for bit
_STRIDES = [f"{name}_stride_{axis}" for name in ("q", "k", "v", "g", "beta") for axis in "bt"]
_NUMBERS = ["t", "heads", "group", "dk", "dv", "ring_stride", *_STRIDES, "normalize", "slots"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["p_g", "p_beta", "p_slot"])
def delta_rule_tokens(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_state,
    p_slot,
    p_ring,
    p_o,
    t,
    heads,
    group,
    dk,
    dv,
    ring_stride: tl.int64,
    q_stride_b,
    q_stride_t,
    k_stride_b,
    k_stride_t,
    v_stride_b,
    v_stride_t,
    g_stride_b,
    g_stride_t,
    beta_stride_b,
    beta_stride_t,
    normalize,
    slots,
    scale,
    eps,
    UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """S ← exp(g) S + k ⊗ β (v − exp(g) kᵀ S), o = qᵀ S, token by token; S after token i goes to slot i of the ring.

    q, k [b, t, heads / group, dk], v [b, t, heads, dv], g, beta [b, t, heads] → o [b, t, heads, dv] float32 and ring
    [≥ t, b · heads, dk, dv]. The state before is state [b · heads, dk, dv] or, where `slots` is not 0, state [.., b ·
    heads, dk, dv] at slot[b]. q and k are normalised where `normalize` is not 0. dk, dv, ring_stride and the strides of
    q, k and v are in units of UNIT elements.

    One program takes BLOCK_V columns of one head of one sequence through all tokens, all dk rows in registers. It has
    read its part of the state before it writes any of the ring, and no other program touches that part: state and ring
    may be the same memory. Where the ring is narrower than float32, S is rounded after each token, as it is when every
    token has a launch of its own.
    """
    dk = dk * UNIT
    dv = dv * UNIT
    ring_stride = ring_stride * UNIT
    v_blocks = tl.cdiv(dv, BLOCK_V)
    i_n = tl.program_id(0) // v_blocks
    o_v = (tl.program_id(0) % v_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, BLOCK_K)
    i_b = (i_n // heads).to(tl.int64)
    i_h = i_n % heads
    m_k = o_k < dk
    m_v = o_v < dv
    m_s = m_k[:, None] & m_v[None, :]
    # [BLOCK_K, BLOCK_V] within a head's state; pointers that move stay scalar, which spares a register pair an address
    o_s = o_k[:, None] * dv + o_v[None, :]
    i_head = i_n.to(tl.int64) * dk * dv
    # not read, and not waited for, where there are no slots
    p_state += i_head + tl.load(p_slot + i_b, slots != 0, other=0) * ring_stride
    b_s = tl.load(p_state + o_s, m_s, other=0.0).to(tl.float32)
    p_ring += i_head
    p_q += i_b * q_stride_b * UNIT + (i_h // group) * dk
    p_k += i_b * k_stride_b * UNIT + (i_h // group) * dk
    p_v += i_b * v_stride_b * UNIT + i_h * dv
    p_g += i_b * g_stride_b + i_h
    p_beta += i_b * beta_stride_b + i_h
    p_o += (i_b * t * heads + i_h) * dv
    b_q = tl.load(p_q + o_k, m_k, other=0.0)
    b_k = tl.load(p_k + o_k, m_k, other=0.0)
    b_v = tl.load(p_v + o_v, m_v, other=0.0)
    b_g = tl.load(p_g)
    b_beta = tl.load(p_beta)
    for i in range(0, t):
        # the next token is on its way while this one is worked on: its addresses do not depend on the state
        p_q += q_stride_t * UNIT
        p_k += k_stride_t * UNIT
        p_v += v_stride_t * UNIT
        p_g += g_stride_t
        p_beta += beta_stride_t
        more = i + 1 < t
        b_next_q = tl.load(p_q + o_k, m_k & more, other=0.0)
        b_next_k = tl.load(p_k + o_k, m_k & more, other=0.0)
        b_next_v = tl.load(p_v + o_v, m_v & more, other=0.0)
        b_next_g = tl.load(p_g, more, other=0.0)
        b_next_beta = tl.load(p_beta, more, other=0.0)
        b_qf = b_q.to(tl.float32)
        b_kf = b_k.to(tl.float32)
        # the norms stay factors: only sums and u are scaled by them, not the vectors
        b_q_factor = scale
        b_k_factor = 1.0
        if normalize != 0:
            b_q_factor = tl.div_rn(scale, tl.sqrt_rn(tl.sum(b_qf * b_qf, axis=0) + eps))
            b_k_factor = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_kf * b_kf, axis=0) + eps))
        b_s = b_s * tl.exp(b_g)
        # [BLOCK_V]
        b_u = (b_v.to(tl.float32) - tl.sum(b_s * b_kf[:, None], axis=0) * b_k_factor) * b_beta
        b_s = b_s + b_kf[:, None] * (b_u * b_k_factor)[None, :]
        tl.store(p_o + o_v, tl.sum(b_s * b_qf[:, None], axis=0) * b_q_factor, m_v)
        b_kept = b_s.to(p_ring.dtype.element_ty)
        tl.store(p_ring + o_s, b_kept, m_s)
        b_s = b_kept.to(tl.float32)
        p_ring += ring_stride
        p_o += heads * dv
        b_q = b_next_q
        b_k = b_next_k
        b_v = b_next_v
        b_g = b_next_g
        b_beta = b_next_beta


def tile_for(dk: int) -> tuple[int, int, int]:
    """(BLOCK_K, BLOCK_V, warps) for states of dk rows, dk at most 256.

    Neither batch nor tokens matter: a sum over dk is taken in one order however many sequences share the launch.
    """
    return next((rows, *rest) for rows, rest in _BLOCKS.items() if dk <= rows)


def variants(target: Target) -> list[Variant]:
    """Every choice that `delta_rule.py` can make, the same on all targets."""
    found = []
    for rows, x, state in itertools.product(_BLOCKS, ("bf16", "fp16", "fp32"), ("fp32", "bf16")):
        block_k, block_v, warps = tile_for(rows)
        found.append(
            Variant(
                delta_rule_tokens,
                f"dk {block_k} {x} S {state}",
                {
                    "p_q": f"*{x}", "p_k": f"*{x}", "p_v": f"*{x}", "p_g": "*fp32", "p_beta": "*fp32",
                    "p_state": f"*{state}", "p_slot": "*i64", "p_ring": f"*{state}", "p_o": "*fp32",
                    **integers(delta_rule_tokens, _NUMBERS), "scale": "fp32", "eps": "fp32",
                },
                {"UNIT": UNIT, "BLOCK_K": block_k, "BLOCK_V": block_v},
                divisible=("p_q", "p_k", "p_v", "p_state", "p_ring", "p_o"),
                num_warps=warps,
                quick=(block_k, x, state) == (128, "bf16", "fp32"),
            )
        )  # fmt: skip
    return with_large(found, target, ("p_ring",), ("p_state", "p_ring"))
