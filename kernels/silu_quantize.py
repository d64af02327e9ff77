"""silu(gate) · up, quantised to FP8: the launcher and its torch reference.

Knows nothing of what is multiplied before and afterwards.
"""

from __future__ import annotations

import torch

from mtplab.kernels.fp8_reference import quantize_activation
from mtplab.kernels.launch import FLOATS, check, chosen, interpreted, step, unit_of

__all__ = ["silu_quantize", "silu_quantize_reference"]

_CODES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def silu_quantize_reference(
    h: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """h [m, 2 · k], gate then up → codes [m, k] of `dtype`, float32 scales [m, ceil(k / 128)]."""
    gate, up = h.float().chunk(2, dim=1)
    return quantize_activation(torch.nn.functional.silu(gate) * up, 128, dtype, power_of_two)


def silu_quantize(
    h: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes of silu(gate) · up, with a scale for each row and 128 columns.

    Args:
        h: [m, 2 · k], BF16, FP16 or FP32, k at least 1: the columns of gate, then those of up.
        dtype: of the codes, E4M3 or its FNUZ form (gfx942).
        power_of_two: round scales up to powers of two, as UE8M0 scales are (DeepSeek-V3.1, MXFP8).

    Returns: codes [m, k], float32 scales [m, ceil(k / 128)], laid out group by group, as `gemm_block` reads them
    fastest; value = code · scale, scale = max(amax, 1e-6) / largest code. silu(x) = x / (1 + exp(-x)); all of it is
    computed in float32, without the roundings to h's type that two separate steps would make. A row's result depends
    on that row only. A NaN makes its whole group NaN.

    Raises ValueError for shapes and dtypes other than these.
    """
    check("h", h, (None, None), FLOATS)
    if dtype not in _CODES:
        raise ValueError(f"dtype is {dtype}; expected {' or '.join(map(str, _CODES))}")
    m, columns = h.shape
    if columns % 2 or not columns:
        raise ValueError(f"h has {columns} columns; expected as many of gate as of up, at least one of each")
    k = columns // 2
    if chosen(h.device) == "reference":
        codes, scale = silu_quantize_reference(h, dtype, power_of_two)
        return codes, scale.t().contiguous().t()
    interpreted()
    from mtplab.kernels.quantize_jit import GROUP, constants, rows_for
    from mtplab.kernels.silu_quantize_jit import silu_quantize as kernel

    if h.stride(1) != 1:
        h = h.contiguous()
    groups = -(-k // GROUP)
    codes = torch.empty(m, k, dtype=dtype, device=h.device)
    scale = torch.empty(groups, m, dtype=torch.float32, device=h.device).t()
    rows, unit = rows_for(m), unit_of((k, step(h)), h)
    if m:
        kernel[(-(-m // rows), groups)](
            h, codes, scale, m, k // unit, step(h) // unit, *scale.stride(), int(power_of_two),
            **constants(unit, rows, torch.finfo(dtype).max), num_warps=4, num_stages=1,
        )  # fmt: skip
    return codes, scale
