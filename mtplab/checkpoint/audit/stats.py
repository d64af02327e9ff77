"""What the values of one weight look like: a few numbers from one reading. Knows no names and judges nothing.

A band of rows at a time, small enough to stay in cache, so that memory does not grow with the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.pairing import Pair
from mtplab.checkpoint.values import TORCH_DTYPES, plain_bands, read_rows, unchecked_scale
from mtplab.kernels.fp8_reference import dequantize_block

__all__ = ["Stats", "plain_stats", "scaled_stats"]

_BAND = 1 << 19  # values worked on at a time: 2 MiB of float32
# bytes, sign left out, that are no number; the FNUZ formats have one such byte, 0x80, and none without the sign
_FIRST_BAD = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C}  # infinities with them


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
    low: float = 0.0  # smallest value
    high: float = 0.0  # largest
    bad_scales: int = 0  # scales that are not finite and positive
    scale: float = math.nan  # median scale
    uneven_scales: int = 0  # scales that are no power of two
    top_code: int = 0  # largest magnitude of a code, as its byte without the sign
    inverse_rms: float = math.nan  # rms of code / scale: what the values would be were the scale its reciprocal
    blocks: int = 0
    zero_blocks: int = 0  # blocks of zeros alone


def plain_stats(info: TensorInfo) -> Stats:
    """Of a tensor stored in float, any shape: rows are all axes before the last taken together."""
    sums = _Sums(math.prod(info.shape[:-1]))
    for _, _, band in plain_bands(info):
        sums.add(band)
    return Stats(*sums.moments())


def scaled_stats(pair: Pair) -> Stats:
    """Of an FP8 weight and its scale; scales and codes that make no values are counted and left out."""
    stored = unchecked_scale(pair)  # one value a block: [gn, gk] or [e, gn, gk]
    usable = stored.isfinite() & (stored > 0)
    scale = torch.where(usable, stored, torch.zeros(())).reshape(-1, stored.shape[-1])  # their blocks count as zeros
    *_, height, k = pair.codes.shape
    experts, bm, bk = (1, *pair.block)[-3:]
    sums = _Sums(math.prod(pair.codes.shape[:-1]))
    squares = torch.zeros(scale.shape, dtype=torch.float64)  # of the values, by block
    bad = top = 0
    room = torch.empty(0, k)
    for start, codes in _code_bands(pair.codes):
        magnitudes = codes & 0x7F
        peak = int(magnitudes.max())
        codes, lost = _without_bad(codes, pair.dtype, peak)
        bad += lost
        top = max(top, int((codes & 0x7F).max()) if lost else peak)
        rows = torch.arange(start, start + len(codes))
        grid_row = rows // height // experts * -(-height // bm) + rows % height // bm
        room = room if len(room) >= len(codes) else torch.empty(len(codes), k)
        values = room[: len(codes)]
        dequantize_block(codes.view(TORCH_DTYPES[pair.dtype]), scale[grid_row], (1, bk), values, has_nan=False)
        squares.index_add_(0, grid_row, sums.add(values, bk).double())
    dark = (squares == 0) & (scale > 0)
    # a value is code * scale, so code / scale is the value over the scale's square
    inverse_square = float((squares / scale.double() ** 4).nan_to_num(0.0).sum()) / max(1, sums.count)
    median = float(stored[usable].median()) if bool(usable.any()) else math.nan
    # a power of two has nothing but its leading bit: half, as frexp gives it
    uneven = int((torch.frexp(stored[usable])[0] != 0.5).sum())
    count, _, *moments = sums.moments()
    return Stats(
        count, bad, *moments, int((~usable).sum()), median, uneven, top,
        math.sqrt(inverse_square) if bool(usable.any()) else math.nan,
        dark.numel() if sums.count else 0, int(dark.sum()) if sums.count else 0,
    )  # fmt: skip


def _code_bands(info: TensorInfo) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, uint8 [rows, k]) one band after the other; rows are all axes before the last taken together."""
    *lead, k = info.shape
    total = math.prod(lead) if k else 0
    flat, step = info._replace(shape=(total, k)), max(1, _BAND // max(1, k))
    for start in range(0, total, step):
        yield start, read_rows(flat, start, min(total, start + step)).view(torch.uint8)


def _without_bad(codes: torch.Tensor, dtype: str, peak: int) -> tuple[torch.Tensor, int]:
    """The codes with those that are no number set to zero, and how many they were; `peak` is the largest magnitude."""
    first = _FIRST_BAD.get(dtype)
    if first is not None and peak < first:
        return codes, 0
    bad = (codes & 0x7F) >= first if first is not None else codes == 0x80
    lost = int(bad.sum())
    return (codes.masked_fill(bad, 0), lost) if lost else (codes, 0)


class _Sums:
    """Sums over the bands of a matrix of `rows` rows.

    Memory of a band's size is used again: given back and asked for anew some hundred times, it is never reused by the
    C library's allocator, and the process grows to the size of all bands together (measured: 1.2 GB for 1.4 GB read).
    """

    def __init__(self, rows: int) -> None:
        self.count = self.bad = 0
        self._total = self._fourth = 0.0
        self._low, self._high = math.inf, -math.inf
        self._rows, self._seen = torch.empty(rows), 0  # sums of squares
        self._square = torch.empty(0)
        self._columns: torch.Tensor | None = None

    def add(self, band: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Take a band, float32 [rows, k], in; gives the sums of squares of every `group` columns [rows, ceil(k/group)].

        `group` 0: of all of them.
        """
        if not band.numel():
            return torch.zeros(band.shape[0], 1)
        low, high = map(float, band.aminmax())
        if not math.isfinite(low + high):  # a NaN makes both NaN
            finite = band.isfinite()
            self.bad += int((~finite).sum())
            band = torch.where(finite, band, torch.zeros(()))
            low, high = map(float, band.aminmax())
        if self._square.numel() < band.numel():
            self._square = torch.empty(band.numel())
        square = torch.mul(band, band, out=self._square[: band.numel()].view(band.shape))
        k = band.shape[1]
        group = min(group or k, k)
        whole = k - k % group
        grouped = square[:, :whole].reshape(len(band), -1, group).sum(-1)
        if whole < k:
            grouped = torch.cat([grouped, square[:, whole:].sum(1, keepdim=True)], 1)
        self.count += band.numel()
        self._total += float(band.sum())
        self._fourth += float(torch.dot(square.view(-1), square.view(-1)))
        self._low, self._high = min(self._low, low), max(self._high, high)
        torch.sum(grouped, 1, out=self._rows[self._seen : self._seen + len(band)])
        self._seen += len(band)
        columns = square.sum(0).double()
        self._columns = columns if self._columns is None else self._columns + columns
        return grouped

    def moments(self) -> tuple[int, int, float, float, float, float, float, float, float, float]:
        """The first ten fields of `Stats`."""
        if not self.count:
            return (0, 0, *[0.0] * 8)  # type: ignore[return-value]
        rows = self._rows
        square = float(rows.sum(dtype=torch.float64)) / self.count
        kurtosis = self._fourth / self.count / square**2 if 1e-15 < square < math.inf else 0.0
        return (
            self.count, self.bad, self._total / self.count, math.sqrt(square), max(-self._low, self._high), kurtosis,
            _spread(rows.double()), _spread(self._columns), self._low, self._high,
        )  # fmt: skip


def _spread(squares: torch.Tensor | None) -> float:
    if squares is None or squares.numel() < 2:
        return 0.0
    norms = squares.sqrt()
    return float(norms.std() / norms.mean()) if float(norms.mean()) else 0.0
