"""The speculative step: which drafts of a batch of rounds are kept and what follows them, as kernels.

Two launches each: one over blocks of the vocabulary, whose results are whole numbers (a largest key, sums of
probabilities in units of 2⁻⁵²) and so do not depend on the order they are combined in; one that decides. Prefixes:
i_ program index, o_ offsets, m_ mask, p_ pointer, b_ loaded block. Imports no torch.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from mtplab.kernels.targets import Target
from mtplab.kernels.variants import UNITS, Variant, integers

__all__ = [
    "BLOCK", "BLOCK_J", "BLOCK_S", "WARPS", "block_best", "block_mass", "draw_tokens",
    "match_tokens", "variants",
]  # fmt: skip

BLOCK_J = 32  # places of a round: up to 31 drafts and the token after them
BLOCK = 4096  # tokens of the vocabulary a program takes; of 8192, logits spill on sm_100
BLOCK_S = 16  # blocks looked at together when one is chosen; of 32, a draw spills on sm_120
WARPS = 8

_NAN: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # above the key of +∞
_UNITS: tl.constexpr = tl.constexpr(2.0**52)


# numbers that differ from launch to launch, none of which is worth compiling anew for
_ROW_NUMBERS = ["k", "v", "ragged", "logits_stride_b", "logits_stride_t"]
_MATCH_NUMBERS = ["k", "blocks", "ragged"]
_STRIDES = [f"{name}_stride_{axis}" for name in ("target", "draft") for axis in "bt"]
_MASS_NUMBERS = ["k", "v", "ragged", *_STRIDES, "seed_low", "seed_high", "purpose"]
_DRAW_NUMBERS = [*_MASS_NUMBERS, "blocks", "draw_purpose"]
# read element by element
_SINGLE = ["p_drafts", "p_best", "p_count", "p_prompt", "p_position", "p_mass", "p_tokens", "p_emitted"]


@triton.jit
def _count(p_count, i_b, k, ragged):
    """How many drafts the round has: k, or where `ragged` is not 0 what count says."""
    n = tl.load(p_count + i_b, ragged != 0, other=k)
    return tl.minimum(tl.maximum(n, 0), k).to(tl.int32)


# greedy


@triton.jit(do_not_specialize=_ROW_NUMBERS, do_not_specialize_on_alignment=_SINGLE)
def block_best(
    p_logits,
    p_count,
    p_best,
    k,
    v,
    ragged,
    logits_stride_b,
    logits_stride_t,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits [b, k+1, v] → best [b, k+1, blocks] int64, the largest (logit, −id) of each block as one number.

    One program takes one block of one row; rows past a round's drafts and the one after them are left out. v and the
    strides are in units of UNIT elements.
    """
    v = v * UNIT
    i_s = tl.program_id(0)
    i_j = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    if i_j <= _count(p_count, i_b, k, ragged):
        o_v = i_s * BLOCK + tl.arange(0, BLOCK)
        p_row = p_logits + (i_b * logits_stride_b + i_j * logits_stride_t) * UNIT
        b_x = tl.load(p_row + o_v, o_v < v, other=float("-inf")).to(tl.float32)
        # bits in the order of the numbers; −0 equals 0
        b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
        b_key = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
        b_key = tl.where(b_x == b_x, b_key, _NAN).to(tl.int64)
        b_best = tl.max((b_key << 32) | (0x7FFFFFFF - o_v).to(tl.int64), axis=0)
        tl.store(p_best + (i_b * (k + 1) + i_j) * tl.num_programs(0) + i_s, b_best)


@triton.jit(do_not_specialize=_MATCH_NUMBERS, do_not_specialize_on_alignment=_SINGLE)
def match_tokens(
    p_drafts,
    p_best,
    p_count,
    p_tokens,
    p_emitted,
    k,
    blocks,
    ragged,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Drafts [b, k], best [b, k+1, blocks] → tokens [b, k+1] and emitted [b], int64. One program a round."""
    i_b = tl.program_id(0).to(tl.int64)
    o_j = tl.arange(0, BLOCK_J)
    n = _count(p_count, i_b, k, ragged)
    p_rows = p_best + (i_b * (k + 1) + o_j[:, None]) * blocks
    b_best = tl.full([BLOCK_J], -0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
    for start in range(0, blocks, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        m_s = (o_j <= n)[:, None] & (o_s < blocks)[None, :]
        b_more = tl.load(p_rows + o_s[None, :], m_s, other=-0x7FFFFFFFFFFFFFFF)
        b_best = tl.maximum(b_best, tl.max(b_more, axis=1))
    b_choice = tl.where((b_best >> 32) == _NAN, -1, 0x7FFFFFFF - (b_best & 0xFFFFFFFF))
    b_draft = tl.load(p_drafts + i_b * k + o_j, o_j < n, other=-1)
    kept = (o_j < n) & (b_draft == b_choice) & (b_draft >= 0)
    accepted = tl.min(tl.where(kept, BLOCK_J, o_j), axis=0)
    tl.store(p_tokens + i_b * (k + 1) + o_j, tl.where(o_j <= accepted, b_choice, -1), o_j <= k)
    tl.store(p_emitted + i_b, (accepted + 1).to(tl.int64))


# sampled


@triton.jit
def _uniform(p_prompt, p_position, i_b, o_j, seed_low, seed_high, purpose):
    """Numbers in [0, 1) with 53 bits of Philox4x32-10, [BLOCK_J] float64, as `philox.uniform` makes them."""
    b_zero = (o_j * 0).to(tl.uint32)
    b_position = (tl.load(p_position + i_b) + o_j).to(tl.uint32)
    b_prompt = b_zero + tl.load(p_prompt + i_b).to(tl.uint32)
    b_purpose = b_zero + purpose.to(tl.uint32)
    b_high, b_low, _, _ = tl.philox_impl(
        b_position, b_prompt, b_purpose, b_zero,
        seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True), 10,
    )  # fmt: skip
    b_bits = ((b_high >> 5).to(tl.int64) << 26) + (b_low >> 6).to(tl.int64)
    return b_bits.to(tl.float64) * (2.0**-53)


@triton.jit
def _accepted(
    p_drafts, p_target, p_draft, p_count, p_prompt, p_position, i_b, k, v, ragged, target_stride_b, target_stride_t,
    draft_stride_b, draft_stride_t, seed_low, seed_high, purpose, SAMPLED: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """How many drafts the round has, how many are kept, and the target's row after those.

    Every program of a round works it out: a few loads instead of a launch.
    """
    n = _count(p_count, i_b, k, ragged)
    o_j = tl.arange(0, BLOCK_J)
    b_draft = tl.load(p_drafts + i_b * k + o_j, o_j < n, other=-1)
    there = (o_j < n) & (b_draft >= 0) & (b_draft < v)
    o_row = o_j.to(tl.int64)
    b_p = tl.load(p_target + i_b * target_stride_b + o_row * target_stride_t + b_draft, there, other=0.0)
    b_u = _uniform(p_prompt, p_position, i_b, o_j, seed_low, seed_high, purpose)
    if SAMPLED:
        b_q = tl.load(p_draft + i_b * draft_stride_b + o_row * draft_stride_t + b_draft, there, other=0.0)
        # u < p/q, without dividing: q is positive at a token that was drawn from it
        b_u = b_u * b_q.to(tl.float64)
    accepted = tl.min(tl.where(there & (b_u < b_p.to(tl.float64)), BLOCK_J, o_j), axis=0)
    return n, accepted, p_target + i_b * target_stride_b + accepted.to(tl.int64) * target_stride_t


@triton.jit
def _units(b_weight):
    """Whole units of 2⁻⁵², rounded down; what is negative or NaN has none."""
    return (tl.where(b_weight > 0, b_weight, 0.0) * _UNITS).to(tl.int64)


@triton.jit
def _left(
    p_drafts, p_draft, i_b, accepted, k, draft_stride_b, draft_stride_t, o_v, m_v, b_p, SAMPLED: tl.constexpr
):
    """Units of max(0, p − q) at the draft that was not kept; q is 1 at it where drafts were not drawn."""
    if SAMPLED:
        p_row = p_draft + i_b * draft_stride_b + accepted.to(tl.int64) * draft_stride_t
        return _units(b_p - tl.load(p_row + o_v, m_v, other=0.0))
    else:
        return tl.where(o_v == tl.load(p_drafts + i_b * k + accepted), 0, _units(b_p))


@triton.jit(do_not_specialize=_MASS_NUMBERS, do_not_specialize_on_alignment=_SINGLE)
def block_mass(
    p_drafts,
    p_target,
    p_draft,
    p_count,
    p_prompt,
    p_position,
    p_mass,
    k,
    v,
    ragged,
    target_stride_b,
    target_stride_t,
    draft_stride_b,
    draft_stride_t,
    seed_low,
    seed_high,
    purpose,
    UNIT: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Target [b, k+1, v], draft [b, k, v] → mass [b, 2, blocks] int64: units of p, and of what a rejection leaves.

    Both of the row after the kept drafts. One program takes one block of one round. v and the strides are in units of
    UNIT elements.
    """
    i_s = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    v = v * UNIT
    draft_stride_b = draft_stride_b.to(tl.int64) * UNIT
    draft_stride_t = draft_stride_t.to(tl.int64) * UNIT
    n, accepted, p_row = _accepted(
        p_drafts, p_target, p_draft, p_count, p_prompt, p_position, i_b, k, v, ragged,
        target_stride_b.to(tl.int64) * UNIT, target_stride_t.to(tl.int64) * UNIT, draft_stride_b, draft_stride_t,
        seed_low, seed_high, purpose, SAMPLED, BLOCK_J,
    )  # fmt: skip
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < v
    b_p = tl.load(p_row + o_v, m_v, other=0.0)
    p_mass += i_b * 2 * tl.num_programs(0) + i_s
    tl.store(p_mass, tl.sum(_units(b_p), axis=0))
    if accepted < n:
        b_left = _left(
            p_drafts, p_draft, i_b, accepted, k, draft_stride_b, draft_stride_t, o_v, m_v, b_p, SAMPLED
        )
        tl.store(p_mass + tl.num_programs(0), tl.sum(b_left, axis=0))


@triton.jit(do_not_specialize=_DRAW_NUMBERS, do_not_specialize_on_alignment=_SINGLE)
def draw_tokens(
    p_drafts,
    p_target,
    p_draft,
    p_count,
    p_prompt,
    p_position,
    p_mass,
    p_tokens,
    p_emitted,
    k,
    v,
    ragged,
    blocks,
    target_stride_b,
    target_stride_t,
    draft_stride_b,
    draft_stride_t,
    seed_low,
    seed_high,
    purpose,
    draw_purpose,
    UNIT: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass [b, 2, blocks] → tokens [b, k+1] and emitted [b], int64. One program a round.

    It finds the block in which the running sum passes u · total, then the token in that block. v and the strides are in
    units of UNIT elements.
    """
    i_b = tl.program_id(0).to(tl.int64)
    v = v * UNIT
    draft_stride_b = draft_stride_b.to(tl.int64) * UNIT
    draft_stride_t = draft_stride_t.to(tl.int64) * UNIT
    n, accepted, p_row = _accepted(
        p_drafts, p_target, p_draft, p_count, p_prompt, p_position, i_b, k, v, ragged,
        target_stride_b.to(tl.int64) * UNIT, target_stride_t.to(tl.int64) * UNIT, draft_stride_b, draft_stride_t,
        seed_low, seed_high, purpose, SAMPLED, BLOCK_J,
    )  # fmt: skip
    rejected = accepted < n
    p_mass += i_b * 2 * blocks
    end, left = tl.to_tensor(0).to(tl.int64), tl.to_tensor(0).to(tl.int64)
    for start in range(0, blocks, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        end += tl.sum(tl.load(p_mass + o_s, o_s < blocks, other=0), axis=0)
        left += tl.sum(tl.load(p_mass + blocks + o_s, (o_s < blocks) & rejected, other=0), axis=0)
    # p = q up to rounding leaves nothing to draw from; such a draft is rejected with probability 0 but for rounding
    usable = left > 0
    end = tl.where(usable, left, end)
    p_mass += tl.where(usable, blocks, 0)
    o_j = tl.arange(0, BLOCK_J)
    b_u = _uniform(p_prompt, p_position, i_b, o_j, seed_low, seed_high, draw_purpose)
    u = tl.sum(tl.where(o_j == accepted, b_u, 0.0), axis=0)
    # kept below the total even where the product rounds up
    at = tl.minimum((u * end.to(tl.float64)).to(tl.int64), end - 1)
    seen, before, i_s = tl.to_tensor(0).to(tl.int64), tl.to_tensor(0).to(tl.int64), tl.to_tensor(0)
    for start in range(0, blocks, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        b_mass = tl.load(p_mass + o_s, o_s < blocks, other=0)
        passed = (seen + tl.cumsum(b_mass, axis=0) <= at) & (o_s < blocks)
        i_s += tl.sum(passed.to(tl.int32), axis=0)
        before += tl.sum(tl.where(passed, b_mass, 0), axis=0)
        seen += tl.sum(b_mass, axis=0)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < v
    b_p = tl.load(p_row + o_v, m_v, other=0.0)
    b_units = _units(b_p)
    if usable:
        b_units = _left(
            p_drafts, p_draft, i_b, accepted, k, draft_stride_b, draft_stride_t, o_v, m_v, b_p, SAMPLED
        )
    token = i_s * BLOCK + tl.sum((before + tl.cumsum(b_units, axis=0) <= at).to(tl.int32), axis=0)
    token = tl.where(end > 0, token, -1).to(tl.int64)
    b_draft = tl.load(p_drafts + i_b * k + o_j, o_j < accepted, other=-1)
    tl.store(p_tokens + i_b * (k + 1) + o_j, tl.where(o_j == accepted, token, b_draft), o_j <= k)
    tl.store(p_emitted + i_b, (accepted + 1).to(tl.int64))


def variants(target: Target) -> list[Variant]:
    """Every choice that `acceptance.py` can make, the same on all targets."""
    words = {16: "", 1: " unaligned"}
    found = [
        Variant(
            block_best,
            f"{x}{words[unit]}",
            {"p_logits": f"*{x}", "p_count": "*i64", "p_best": "*i64", **integers(block_best, _ROW_NUMBERS)},
            {"UNIT": unit, "BLOCK": BLOCK},
            divisible=("p_logits",),
            num_warps=WARPS,
            quick=(x, unit) == ("bf16", 16),
        )
        for unit, x in itertools.product(UNITS, ("bf16", "fp16", "fp32"))
    ]
    whole = dict.fromkeys(("p_drafts", "p_count", "p_tokens", "p_emitted"), "*i64")
    found.append(
        Variant(
            match_tokens,
            "any drafts",
            {**whole, "p_best": "*i64", **integers(match_tokens, _MATCH_NUMBERS)},
            {"BLOCK_J": BLOCK_J, "BLOCK_S": BLOCK_S},
            num_warps=WARPS,
            quick=True,
        )
    )
    for unit, x, sampled in itertools.product(UNITS, ("fp32", "fp64"), (False, True)):
        rows = {"p_target": f"*{x}", **({"p_draft": f"*{x}"} if sampled else {})}
        single = dict.fromkeys(("p_drafts", "p_count", "p_prompt", "p_position", "p_mass"), "*i64")
        fixed = {"UNIT": unit, "SAMPLED": sampled, "BLOCK_J": BLOCK_J, "BLOCK": BLOCK}
        fixed |= {} if sampled else {"p_draft": None}
        how = {"divisible": tuple(rows), "num_warps": WARPS, "quick": (x, sampled, unit) == ("fp32", True, 16)}
        label = f"{x} {'drawn' if sampled else 'likeliest'} drafts{words[unit]}"
        found += [
            Variant(block_mass, label, {**rows, **single, **integers(block_mass, _MASS_NUMBERS)}, fixed, **how),
            Variant(
                draw_tokens,
                label,
                {**rows, **single, **whole, **integers(draw_tokens, _DRAW_NUMBERS)},
                {**fixed, "BLOCK_S": BLOCK_S},
                **how,
            ),
        ]
    return found
