"""Bands of rows to E4M3 codes and scales, in memory that is used again: what `kernels/fp8_reference.py` gives, faster.

Codes are torch's own cast, so every code is the reference's, bit for bit; what is saved are passes over memory and
fresh memory. Knows nothing of files or names. Shapes: m rows of k columns, blocks of (bm, bn).
"""

from __future__ import annotations

import threading

import torch

__all__ = ["block_amax", "encode", "scales_of"]

E4M3_MAX = 448.0
# elements divided and cast at a time, so that they stay in cache
_PIECE = 1 << 18
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}
_memory = threading.local()


def scratch(key: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count] of any content, the same memory for each call of a thread with this key."""
    kept: dict[str, torch.Tensor] = _memory.__dict__.setdefault("kept", {})
    size = count * dtype.itemsize
    if key not in kept or kept[key].numel() < size:
        with torch.inference_mode(False):
            kept[key] = torch.empty(size, dtype=torch.uint8)
    return kept[key][:size].view(dtype)


def block_amax(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block of values [m, k] (BF16, F16 or F32), float32 [ceil(m/bm), ceil(k/bn)].

    Zero for a block of zeros; NaN where a block holds one. Ragged last blocks are what they are.
    """
    (m, k), (bm, bn) = values.shape, block
    kind, mask = _BITS[values.dtype]
    # without the sign, the bits of floats are ordered as the floats are, and integers compare faster
    bits = torch.bitwise_and(values.view(kind), mask, out=scratch("bits", m * k, kind).view(m, k))
    if bm == 1:
        by_row = bits
    else:
        whole = m // bm * bm
        parts = [bits[:whole].view(-1, bm, k).amax(1)] if whole else []
        if whole < m:
            parts.append(bits[whole:].amax(0, keepdim=True))
        by_row = torch.cat(parts) if len(parts) > 1 else parts[0]
    whole = k // bn * bn
    parts = [by_row[:, :whole].unflatten(1, (-1, bn)).amax(2)] if whole else []
    if whole < k:
        parts.append(by_row[:, whole:].amax(1, keepdim=True))
    found = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return found.contiguous().view(values.dtype).float()


def scales_of(amax: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """float32 scales from float32 magnitudes: amax / 448, or the power of two not below it; 1.0 where that is 0."""
    scale = amax / E4M3_MAX
    scale.masked_fill_(scale == 0, 1.0)
    if power_of_two:
        bits = scale.view(torch.int32)
        exponent = bits.bitwise_right_shift(23).add_(bits.bitwise_and(0x7FFFFF).ne(0))
        scale = torch.where(scale.isfinite(), exponent.bitwise_left_shift(23).view(torch.float32), scale)
    return scale


def encode(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """E4M3 codes of values [m, k] (BF16, F16 or F32) into `out` uint8 [m, k], by scales [ceil(m/bm), ceil(k/bn)]."""
    (m, k), (bm, bn) = values.shape, block
    codes = out.view(torch.float8_e4m3fn)
    step = max(1, _PIECE // max(1, k))
    rows = torch.arange(m) // bm
    whole = k // bn * bn
    for start in range(0, m, step):
        part = slice(start, min(m, start + step))
        piece = scratch("piece", (part.stop - start) * k, torch.float32).view(-1, k)
        piece.copy_(values[part])
        by_row = scale[rows[part]]
        if whole:
            piece[:, :whole].unflatten(1, (-1, bn)).div_(by_row[:, : k // bn, None])
        if whole < k:
            piece[:, whole:].div_(by_row[:, -1:])
        # matters only where the division that made the scale was subnormal
        codes[part].copy_(piece.clamp_(-E4M3_MAX, E4M3_MAX))
