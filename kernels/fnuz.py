"""E4M3 codes as gfx942 reads them.

Its matrix unit takes E4M3 FNUZ, in which the same bits mean half as much, one code is NaN and none is minus zero (OCP
8-bit Floating Point Specification, section 5; AMD Instinct MI300 ISA reference, FP8 formats). Done once, at load.
"""

from __future__ import annotations

import torch

__all__ = ["to_fnuz"]


def to_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in FNUZ.

    Args:
        codes: E4M3 (torch.float8_e4m3fn), any shape.
        scale: any float dtype and shape.

    Returns: codes as torch.float8_e4m3fnuz and 2 · scale, both new. The product of code and scale stays what it was,
    except that minus zero becomes zero; NaN stays NaN. A scale that overflows its type becomes infinite.

    Raises ValueError for other codes.
    """
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes are {codes.dtype}; expected torch.float8_e4m3fn")
    bits = codes.view(torch.uint8)
    # 0x80 is minus zero, and means NaN in FNUZ; 0x7F and 0xFF are NaN, and mean ±240 in FNUZ
    nan = bits.bitwise_and(0x7F) == 0x7F
    bits = bits.masked_fill(bits == 0x80, 0).masked_fill_(nan, 0x80)
    return bits.view(torch.float8_e4m3fnuz), scale * 2
