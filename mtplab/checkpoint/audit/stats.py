"""What the values of one weight look like: a few numbers from one reading. Knows no names and judges nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.pairing import Pair
from mtplab.checkpoint.values import TORCH_DTYPES, ScaledWeight, read_tensor, unchecked_scale

__all__ = ["Stats", "plain_stats", "scaled_stats"]

_BAND = 1 << 22  # values worked on at a time
_NAN_BYTES = {
    "F8_E4M3": (0x7F, 0xFF),
    "F8_E5M2": (*range(0x7C, 0x80), *range(0xFC, 0x100)),  # infinities with them
    "F8_E4M3FNUZ": (0x80,),
    "F8_E5M2FNUZ": (0x80,),
}


@dataclass(frozen=True)
class Stats:
    """Of a weight's values: moments, and how alike rows and columns are; of its codes and scales: the ends."""

    count: int
    bad: int  # NaN or infinite values, or codes that are
    mean: float
    rms: float
    amax: float
    kurtosis: float  # fourth moment over the squared second: 3 for a normal distribution; 0 where all are zero
    row_spread: float  # standard deviation of the rows' norms over their mean
    column_spread: float
    bad_scales: int = 0  # scales that are not finite and positive
    scale: float = math.nan  # median scale
    top_code: int = 0  # largest magnitude of a code, as its byte without the sign
    inverse_rms: float = math.nan  # rms of code / scale: what the values would be were the scale its reciprocal


def plain_stats(info: TensorInfo) -> Stats:
    """Of a tensor stored in float, any shape; [n, k] rows and columns are over the last two axes."""
    values = read_tensor(info)
    return _moments([values.reshape(-1, values.shape[-1] if values.dim() else 1)])


def scaled_stats(pair: Pair) -> Stats:
    """Of an FP8 weight and its scale; scales and codes that make no values are counted and left out."""
    codes = read_tensor(pair.codes).view(TORCH_DTYPES[pair.dtype])
    scale = unchecked_scale(pair)
    usable = scale.isfinite() & (scale > 0)
    histogram = torch.bincount(codes.view(torch.uint8).flatten().int(), minlength=256)
    nan = _NAN_BYTES[pair.dtype]
    bad = int(histogram[list(nan)].sum())
    ends = histogram[:128] + histogram[128:]
    ends[sorted({byte & 0x7F for byte in nan if byte != 0x80})] = 0
    top = int(ends.nonzero().max()) if bool(ends.any()) else 0
    weight = ScaledWeight(codes, torch.where(usable, scale, torch.ones(())), pair.block)
    found = _moments([weight.dequantize().reshape(-1, codes.shape[-1])])
    square = codes.float().nan_to_num_(0.0, 0.0, 0.0).square_().mean().sqrt() if codes.numel() else torch.zeros(())
    median = float(scale[usable].median()) if bool(usable.any()) else math.nan
    return Stats(
        found.count, bad, found.mean, found.rms, found.amax, found.kurtosis, found.row_spread, found.column_spread,
        int((~usable).sum()), median, top, float(square) / median if median else math.nan,
    )  # fmt: skip


def _moments(parts: list[torch.Tensor]) -> Stats:
    count = bad = 0
    total = second = fourth = 0.0
    amax = 0.0
    rows: list[torch.Tensor] = []
    columns: torch.Tensor | None = None
    for matrix in parts:
        step = max(1, _BAND // max(1, matrix.shape[1]))
        for start in range(0, matrix.shape[0], step):
            band = matrix[start : start + step].float()
            finite = band.isfinite()
            if not bool(finite.all()):
                bad += int((~finite).sum())
                band = torch.where(finite, band, torch.zeros(()))
            square = band.square()
            count += band.numel()
            total += float(band.sum(dtype=torch.float64))
            by_row = square.sum(1, dtype=torch.float64)
            second += float(by_row.sum())
            fourth += float(square.square().sum(dtype=torch.float64))
            amax = max(amax, float(band.abs().max())) if band.numel() else amax
            rows.append(by_row)
            part = square.sum(0, dtype=torch.float64)
            columns = part if columns is None else columns + part
    if not count:
        return Stats(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    mean_square = second / count
    kurtosis = fourth / count / mean_square**2 if mean_square > 1e-30 else 0.0
    return Stats(
        count, bad, total / count, math.sqrt(mean_square), amax, kurtosis, _spread(torch.cat(rows)), _spread(columns)
    )


def _spread(squares: torch.Tensor | None) -> float:
    if squares is None or squares.numel() < 2:
        return 0.0
    norms = squares.sqrt()
    return float(norms.std() / norms.mean()) if float(norms.mean()) else 0.0
