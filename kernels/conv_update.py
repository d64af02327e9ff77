"""The short causal convolution of a few tokens, and the window it leaves: the launcher.

Its torch reference is in `delta_rule_reference.py`. Knows nothing of what reads its output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtplab.kernels.delta_rule_reference import conv_reference
from mtplab.kernels.launch import FLOATS, check, chosen, interpreted, unit_of
from mtplab.kernels.sizes import TAPS

__all__ = ["conv_update"]


def conv_update(x: Tensor, state: Tensor, weight: Tensor, window: Tensor | None = None) -> Tensor:
    """silu of the causal depthwise convolution of t tokens that follow a state.

    Args:
        x: [b, t, c], BF16, FP16 or FP32, channels contiguous.
        state: [b, kernel−1, c], of its dtype, contiguous: the inputs before x.
        weight: [kernel, c], of its dtype, contiguous; weight[−1] meets the token itself; kernel is 2, 3 or 4.
        window: [b, kernel−1+t, c], contiguous, written with state and x, and state is left alone: after n kept tokens
            the state is window[:, n : n + kernel−1]. None, for t = 1 only: the state is moved on in place.

    Returns: [b, t, c] of x's dtype, summed in float32 and rounded once. A token's result depends on its own window
    only, not on the batch or on t. Raises ValueError for other shapes or dtypes.
    """
    check("x", x, (None, None, None), FLOATS)
    b, t, c = x.shape
    check("weight", weight, (None, c), (x.dtype,))
    width = len(weight)
    if width not in TAPS:
        raise ValueError(f"weight has {width} taps; expected {', '.join(map(str, TAPS))}")
    check("state", state, (b, width - 1, c), (x.dtype,))
    if window is not None:
        check("window", window, (b, width - 1 + t, c), (x.dtype,))
    elif t != 1:
        raise ValueError(f"window is None with t = {t}; expected a window [b, kernel−1+t, c], or one token")
    for name, held in (("state", state), ("weight", weight), ("window", window)):
        if held is not None and not held.is_contiguous():
            raise ValueError(f"{name} has strides {held.stride()}; expected it contiguous")
    if window is not None and state.untyped_storage().data_ptr() == window.untyped_storage().data_ptr():
        raise ValueError("state and window share memory; expected a window of its own: the state is read meanwhile")
    if chosen(x.device) == "reference":
        rows = torch.cat([state, x], dim=1)
        (window if window is not None else state).copy_(rows if window is not None else rows[:, 1:])
        return conv_reference(rows.float(), weight.float()).to(x.dtype)
    interpreted()
    from mtplab.kernels.conv_update_jit import BLOCK_C, conv_tokens

    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(b, t, c, dtype=x.dtype, device=x.device)
    if t == 0 and window is not None:
        window.copy_(state)
    unit = unit_of((c, *x.stride()[:2]), *(y for y in (x, state, weight, window) if y is not None))
    if out.numel():
        conv_tokens[(-(-c // BLOCK_C), t, b)](
            x, state, weight, window, out, t, c // unit, width, x.stride(0) // unit, x.stride(1) // unit,
            UNIT=unit, MOST_TAPS=max(TAPS), IN_PLACE=window is None, BLOCK_C=BLOCK_C, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
