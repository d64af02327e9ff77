"""Dynamic FP8 quantisation of activations: the launcher. Its torch reference is in `fp8_reference.py`.

Knows nothing of what is multiplied afterwards.
"""

from __future__ import annotations

import torch

from mtplab.kernels.fp8_reference import quantize_activation
from mtplab.kernels.launch import FLOATS, check, chosen, interpreted, step, unit_of

__all__ = ["quantize"]

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def quantize(
    x: torch.Tensor,
    group: int | None = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    scale_by_group: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes of x, with a scale for each token and group of columns, or for each token.

    Args:
        x: [m, k], BF16, FP16 or FP32, rows contiguous, k at least 1.
        group: 128, or None for one scale a token.
        dtype: of the codes, E4M3 or E5M2 (their FNUZ forms on gfx942, where ±240 and ±57344 are the largest).
        power_of_two: round scales up to powers of two, as UE8M0 scales are (DeepSeek-V3.1, MXFP8).
        scale_by_group: lay scales out group by group, as the block-scaled GEMM reads them fastest; same shape.

    Returns: codes [m, k], float32 scales [m, ceil(k / group)] (or [m, 1]) with value = code · scale, where scale =
    max(amax, 1e-6) / largest code. A row's result depends on that row only. A NaN makes its whole group NaN.
    """
    check("x", x, (None, None), FLOATS)
    if dtype not in _CODES:
        raise ValueError(f"dtype is {dtype}; expected {' or '.join(map(str, _CODES))}")
    if group not in (128, None):
        raise ValueError(f"group is {group!r}; expected 128, or None for one scale a token")
    m, k = x.shape
    if k == 0:
        raise ValueError("x has no columns; expected at least one")
    if chosen(x.device) == "reference":
        codes, scale = quantize_activation(x, group or k, dtype, power_of_two)
        return codes, scale.t().contiguous().t() if scale_by_group else scale
    interpreted()
    from mtplab.kernels.quantize_jit import GROUP, constants, quantize_rows, rows_for

    if x.stride(1) != 1:
        x = x.contiguous()
    groups = 1 if group is None else -(-k // GROUP)
    codes = torch.empty(m, k, dtype=dtype, device=x.device)
    scale = torch.empty((groups, m) if scale_by_group else (m, groups), dtype=torch.float32, device=x.device)
    scale = scale.t() if scale_by_group else scale
    rows = 1 if group is None else rows_for(m)
    unit = unit_of((k, step(x)), x)
    if m:
        quantize_rows[(-(-m // rows), groups)](
            x, codes, scale, m, k // unit, step(x) // unit, *scale.stride(), int(power_of_two),
            **constants(unit, rows, torch.finfo(dtype).max, group is None), WHOLE=group is None,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return codes, scale
