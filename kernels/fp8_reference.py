"""FP8 block quantisation in plain torch: what every FP8 kernel beside this file is compared with.

Knows nothing of checkpoints, names or modules, and imports nothing of mtplab. "Scale" is always the
multiplier: `value = code * scale`, whatever a file calls it. Shapes use n (rows, output features),
k (columns, input features), g (columns of one activation group).

Numerics follow lmdeploy's blocked FP8 GEMM (`lmdeploy/pytorch/kernels/cuda/blocked_gemm_fp8.py`): amax in
float32, floored at 1e-6 for activations, scale = amax / 448. lmdeploy multiplies by float32(1/448); here both
divisions are true divisions, as DeepSeek's and transformers' quantisers have it, so a scale may differ
from lmdeploy's in its last bit.
"""

from __future__ import annotations

import threading

import torch

__all__ = [
    "ACTIVATION_AMAX_FLOOR",
    "dequantize_block",
    "has_nan_codes",
    "quantize_activation",
    "quantize_block",
    "round_activation",
    "round_static",
]

ACTIVATION_AMAX_FLOOR = 1e-6

# elements handled at a time, so that temporaries stay in cache and no fresh memory has to be faulted in for them
_BAND = 1 << 18
_memory = threading.local()

# an E4M3 code moved into a float16's bits reads as value * 2**-8; the factor is undone in the scale
_E4M3_AS_HALF = 256.0
_LARGEST_SCALE = 2.0**120  # times the factor it would be infinite: UE8M0 reaches 2**127

# below this many elements three casts cost less than the eight small operators of the exact float32 rounding
_CAST_IS_CHEAPER = 2048


def has_nan_codes(data: torch.Tensor) -> bool:
    """Whether an FP8 tensor of any shape holds a code that means NaN (or, in E5M2, an infinity)."""
    if 0 < data.numel() <= _BAND:
        return _has_nan(data)
    return any(_has_nan(piece) for piece in data.reshape(-1).split(_BAND) if piece.numel())


def _has_nan(data: torch.Tensor) -> bool:
    codes = data.view(torch.uint8)
    if data.dtype == torch.float8_e4m3fn:
        return bool((codes & 0x7F).amax() == 0x7F)
    if data.dtype == torch.float8_e5m2:
        return bool((codes & 0x7F).amax() >= 0x7C)
    assert data.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), data.dtype
    return bool((codes == 0x80).any())


def dequantize_block(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    out: torch.Tensor | None = None,
    has_nan: bool | None = None,
) -> torch.Tensor:
    """The float32 values of a block-scaled FP8 matrix.

    Args:
        data: FP8 codes [n, k].
        scale: multipliers [ceil(n / bm), ceil(k / bn)], any float dtype; upcast to float32 first.
        block: (bm, bn). Ragged last blocks follow it; it is never inferred from the shapes.
        out: float32 [n, k] to write to, made where it is None.
        has_nan: what `has_nan_codes` said, for a caller that has asked; None asks again.

    Returns: `out`, each value the product of code and scale, rounded once.
    """
    bm, bn = block
    n, k = data.shape
    assert scale.shape == (-(-n // bm), -(-k // bn)), (tuple(data.shape), tuple(scale.shape), block)
    if out is None:
        out = torch.empty(n, k, dtype=torch.float32, device=data.device)
    if data.numel() == 0:
        return out
    rows = scale.float()  # [n, ceil(k / bn)]
    if bm != 1:
        rows = rows[torch.arange(n, device=data.device) // bm]
    if data.device.type != "cpu" or data.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        _scale_rows(out.copy_(data), rows, bn)
        return out
    step = max(1, _BAND // k)
    scratch = _scratch(min(n, step), k)
    for start in range(0, n, step):
        part = slice(start, min(n, start + step))
        codes = data[part]
        nan = data.dtype == torch.float8_e4m3fn and (has_nan_codes(codes) if has_nan is None else has_nan)
        _dequantize_band(codes, rows[part], bn, out[part], scratch[: codes.shape[0]], nan)
    return out


def _scratch(m: int, k: int) -> torch.Tensor:
    """int16 [m, k] of any content, the same memory for each call of a thread: fresh memory costs a third of the work.

    Made outside inference mode, so that both modes may write to it.
    """
    kept = getattr(_memory, "bits", None)
    if kept is None or kept.numel() < m * k:
        with torch.inference_mode(False):
            kept = _memory.bits = torch.empty(max(m * k, _BAND), dtype=torch.int16, device="cpu")
    return kept[: m * k].view(m, k)


def _dequantize_band(
    data: torch.Tensor, rows: torch.Tensor, bn: int, out: torch.Tensor, bits: torch.Tensor, has_nan: bool
) -> None:
    """Codes [m, k] times rows [m, ceil(k / bn)] into out, with int16 scratch `bits` [m, k], on a CPU.

    torch casts E4M3 to float32 at 0.15 to 0.25 G elements/s; through a float16's bits it is several times that.
    """
    if data.dtype == torch.float8_e5m2:
        out.copy_(bits.copy_(data.view(torch.int8)).mul_(256).view(torch.float16))
    elif has_nan or float(rows.amax()) >= _LARGEST_SCALE:
        out.copy_(data)  # E4M3's NaN codes have the bits of an ordinary float16
    else:
        # sign extension leaves a copy of the sign in bit 14, where E4M3's exponent ends: clear it
        out.copy_(bits.copy_(data.view(torch.int8)).mul_(128).bitwise_and_(-16385).view(torch.float16))
        rows = rows * _E4M3_AS_HALF
    _scale_rows(out, rows, bn)


def _scale_rows(values: torch.Tensor, rows: torch.Tensor, bn: int) -> None:
    """Multiply values [m, k] in place by rows [m, ceil(k / bn)], each for bn columns."""
    k = values.shape[1]
    whole = k // bn * bn
    if whole:
        values[:, :whole].unflatten(1, (-1, bn)).mul_(rows[:, : k // bn, None])
    if whole < k:
        values[:, whole:].mul_(rows[:, -1:])


def quantize_block(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-scaled FP8 codes of a matrix.

    Args:
        weight: [n, k], any float dtype; worked on in float32. Must be finite.
        block: (bm, bn). Ragged last blocks are zero-padded for the amax and cut off again.

    Returns: codes [n, k] of `dtype`, and float32 scales [ceil(n / bm), ceil(k / bn)]: amax of the block
    divided by the dtype's largest value (448 for E4M3), or 1.0 where that is zero, so that a scale is always
    positive.
    """
    bm, bn = block
    n, k = weight.shape
    top = torch.finfo(dtype).max
    nb, kb = -(-n // bm), -(-k // bn)
    values = weight.float()
    if n % bm or k % bn:
        values = torch.nn.functional.pad(values, (0, kb * bn - k, 0, nb * bm - n))
    tiles = values.reshape(nb, bm, kb, bn)
    scale = _divided(tiles.abs().amax(dim=(1, 3)), top)
    scale.masked_fill_(scale == 0, 1.0)
    # the clamp matters only where the division that made the scale was subnormal
    codes = (tiles / scale[:, None, :, None]).clamp_(-top, top).reshape(nb * bm, kb * bn)
    return codes[:n, :k].to(dtype).contiguous(), scale


def _groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [.., k] as float32 [.., ceil(k / g), g], zero-padded only where k is not a multiple of g."""
    x = x.float()
    k = x.shape[-1]
    if k <= group:
        return x.unsqueeze(-2)
    if k % group:
        x = torch.nn.functional.pad(x, (0, group - k % group))
    return x.reshape(*x.shape[:-1], -1, group)


def _activation_scale(groups: torch.Tensor, top: float = 448.0) -> torch.Tensor:
    return _divided(groups.abs().amax(-1, keepdim=True).clamp_min_(ACTIVATION_AMAX_FLOOR), top)


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """x divided in place by a number, correctly rounded on every device.

    On a GPU torch multiplies by a number's reciprocal instead, which may be off by a bit; by a tensor it divides.
    """
    return x.div_(torch.full_like(x, by) if x.is_cuda else by)


def quantize_activation(
    x: torch.Tensor, group: int = 128, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic FP8 quantisation, per token and group of `group` columns, never over the batch.

    Args:
        x: [.., k], any float dtype, k at least 1.
        dtype: of the codes.
        power_of_two: round scales up to powers of two (UE8M0).

    Returns: codes [.., k], and float32 scales [.., ceil(k / g)] = max(amax, 1e-6) / largest code. A NaN makes its whole
    group NaN.
    """
    groups, top = _groups(x, group), torch.finfo(dtype).max
    scale = _activation_scale(groups, top)
    if power_of_two:
        bits = scale.view(torch.int32)
        exponent = bits.bitwise_right_shift(23).add_(bits.bitwise_and(0x7FFFFF).ne(0))
        scale = torch.where(scale.isfinite(), exponent.bitwise_left_shift(23).view(torch.float32), scale)
    codes = (groups / scale).clamp_(-top, top).flatten(-2)[..., : x.shape[-1]]
    return codes.to(dtype), scale.squeeze(-1)


def round_activation(x: torch.Tensor, group: int = 128) -> torch.Tensor:
    """What `quantize_activation` keeps of x: codes times scale, float32 [.., k].

    A row's result depends on that row alone, bit for bit, however many rows are beside it (only the sign of a
    value rounded to zero may differ between small and large inputs).
    """
    groups = _groups(x, group)
    scale = _activation_scale(groups)
    scaled = groups / scale
    if x.numel() <= _CAST_IS_CHEAPER or x.is_cuda:
        rounded = scaled.to(torch.float8_e4m3fn).float().mul_(scale)
    else:
        # adding 1.5 * 2**(e + 20) leaves a value of exponent e its 3 mantissa bits, rounded to nearest even;
        # below 2**-6, where E4M3 is subnormal, the spacing stays 2**-9
        magic = scaled.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
        magic.clamp_min_(2.0**-6).mul_(1.5 * 2**20)
        rounded = scaled.add_(magic).sub_(magic).mul_(scale)
    rounded = rounded.flatten(-2)
    return rounded if rounded.shape[-1] == x.shape[-1] else rounded[..., : x.shape[-1]]


def round_static(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x [.., k] over one stored scale, cut at E4M3's ±448, rounded to E4M3, times the scale: float32 [.., k]."""
    return (x.float() / scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).float().mul_(scale)
