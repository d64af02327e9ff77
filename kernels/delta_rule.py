"""The gated delta rule over the few tokens of a round: the launcher.

Knows nothing of prompts, which have a chunked form elsewhere, nor of which tokens are kept.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mtplab.kernels.delta_rule_reference import delta_rule_reference
from mtplab.kernels.launch import FLOATS, check, chosen, interpreted, unit_of
from mtplab.kernels.sizes import HEAD_STEP, LARGEST_HEAD

__all__ = ["delta_rule"]

_STATES = (torch.float32, torch.bfloat16)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    ring: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    normalize: bool = False,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """Advance states by t tokens, one after another, keeping the state after each.

        S_t = exp(g_t) · S_{t−1} + k_t ⊗ β_t (v_t − exp(g_t) · k_tᵀ S_{t−1}),     o_t = q_tᵀ S_t

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, eq. 10.)

    Args:
        q, k: [b, t, h_k, dk], BF16, FP16 or FP32; key head h serves the value heads h · h_v/h_k and those after it.
        v: [b, t, h_v, dv], of their dtype. dk and dv are multiples of 16, at most 256.
        g: [b, t, h_v] float32, the logarithm of the decay, ≤ 0; beta: [b, t, h_v] float32.
        state: [b · h_v, dk, dv] float32 or BF16, contiguous: before the first token.
        ring: [at least t, b · h_v, dk, dv], of state's dtype, contiguous: slot i is written with the state after token
            i, so that going back is an index. `state` may be one of its slots. None, for t = 1 only: written in place.
        slots: [b] int64. If given, `state` is [s, b · h_v, dk, dv] (often the ring itself), and sequence i starts from
            slot slots[i] of it; on a GPU nobody checks that it is one of the s.
        normalize: divide q and k by √(Σ x² + eps) first. scale: what q is multiplied by, dk^-½ as a rule.

    Returns: o [b, t, h_v, dv] float32. Raises ValueError for other shapes or dtypes.

    Arithmetic is float32. A BF16 state is rounded after each token, once o has been read from it: t tokens in one
    launch and in t launches give the same bits, whatever the state's dtype, and a sequence's result depends neither on
    the batch nor, for a head, on the other heads. Two runs give the same bits. NaN stays NaN, in its head.
    """
    b, t, heads, dv = _check(q, k, v, g, beta)
    key_heads, dk = q.shape[2:]
    held = b * heads
    check("state", state, (held, dk, dv) if slots is None else (None, held, dk, dv), _STATES)
    if slots is not None:
        check("slots", slots, (b,), (torch.int64,))
    if ring is None:
        if t != 1 or slots is not None:
            given = ", slots given" if slots is not None else ""
            raise ValueError(
                f"ring is None with t = {t}{given}; expected a ring [at least t, b · h_v, dk, dv], or one token and no "
                "slots, which is written in place"
            )
        ring = state.unsqueeze(0)
    check("ring", ring, (None, held, dk, dv), (state.dtype,))
    if len(ring) < t:
        raise ValueError(f"ring has {len(ring)} slots; expected at least t = {t}")
    for name, x in (("state", state), ("ring", ring)):
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}; expected it contiguous")
    if chosen(v.device) == "reference":
        return _plain(q, k, v, g, beta, state, ring, slots, normalize, scale, eps)
    interpreted()
    from mtplab.kernels.delta_rule_jit import UNIT, delta_rule_tokens, tile_for

    q, k, v = (x if _dense(x) and _in_units(x, UNIT) else _copy(x) for x in (q, k, v))
    g, beta = (x if _dense(x) else x.contiguous() for x in (g, beta))
    out = torch.empty(b, t, heads, dv, dtype=torch.float32, device=v.device)
    block_k, block_v, warps = tile_for(dk)
    if out.numel():
        delta_rule_tokens[(held * -(-dv // block_v),)](
            q, k, v, g, beta, state, _nothing(v.device) if slots is None else slots.contiguous(), ring, out,
            t, heads, heads // key_heads, dk // UNIT, dv // UNIT, held * dk * dv // UNIT,
            *(stride // UNIT for x in (q, k, v) for stride in x.stride()[:2]), *g.stride()[:2], *beta.stride()[:2],
            int(normalize), int(slots is not None), float(scale), float(eps),
            UNIT=UNIT, BLOCK_K=block_k, BLOCK_V=block_v,
            num_warps=warps, num_stages=1,
        )  # fmt: skip
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[int, int, int, int]:
    """Sizes of v, once all five agree."""
    check("v", v, (None, None, None, None), FLOATS)
    b, t, heads, dv = v.shape
    check("q", q, (b, t, None, None), (v.dtype,))
    check("k", k, tuple(q.shape), (v.dtype,))
    for name, x in (("g", g), ("beta", beta)):
        check(name, x, (b, t, heads), (torch.float32,))
    key_heads, dk = q.shape[2:]
    if not key_heads or heads % key_heads:
        raise ValueError(f"v has {heads} heads and q {key_heads}; expected a multiple of q's")
    for name, size in (("dk", dk), ("dv", dv)):
        if not 0 < size <= LARGEST_HEAD or size % HEAD_STEP:
            raise ValueError(f"{name} is {size}; expected a multiple of {HEAD_STEP}, at most {LARGEST_HEAD}")
    return b, t, heads, dv


def _dense(x: Tensor) -> bool:
    """Whether all but batch and time lie side by side, as in a slice of a projection's columns."""
    return x[:1, :1].is_contiguous()


def _in_units(x: Tensor, unit: int) -> bool:
    return unit_of(x.stride()[:2], x, unit=unit) == unit


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _nothing(device: torch.device) -> Tensor:
    """Stands for slots where there are none, and is not read."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ring: Tensor, slots: Tensor | None,
    normalize: bool, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """The reference in float32, on the launcher's arguments."""
    b, t, heads, _ = v.shape
    if slots is not None:
        rows = torch.arange(b, device=slots.device)
        state = state.unflatten(1, (b, heads))[slots, rows].flatten(0, 1)
    out, states = delta_rule_reference(
        q.float(), k.float(), v.float(), g, beta, state.float(),
        normalize=normalize, scale=scale, eps=eps, kept=state.dtype,
    )  # fmt: skip
    ring[:t].copy_(states)
    return out
