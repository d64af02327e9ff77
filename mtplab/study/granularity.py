"""What FP8 does to a matrix, by how many values share a scale.

E4M3 has 3 bits of mantissa whatever the scale, so a scale only decides which values fall out of range: those below
amax · 2^-6 / 448 lose bits, those below amax · 2^-10 / 448 become zero. Knows no module and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtplab.errors import ConfigError

__all__ = ["DAMAGE", "GRANULARITIES", "MatrixError", "matrix_errors", "rounded", "with_outliers"]

TOP = 448.0
OCTAVES = 60  # by which outliers may be blown up
DAMAGE = 0.1  # four times what a column in range loses
#: name → (rows, columns) of the block that shares a scale, None for all of them
GRANULARITIES: dict[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "channel": (1, None),
    "128×128": (128, 128),
    "1×128": (1, 128),
}


@dataclass(frozen=True)
class MatrixError:
    """One matrix in E4M3 under one granularity.

    relative: ‖w − ŵ‖ / ‖w‖ (Frobenius). worst_row: the largest such ratio of a row; worst_column: of a column.
    damaged_columns: share of columns whose ratio is over DAMAGE. flushed: share of values not zero that became zero.
    product: ‖x(w − ŵ)ᵀ‖ / ‖xwᵀ‖ for the given x, None without one. scale_bytes: float32 scales, as a share of the
    codes' bytes.
    """

    granularity: str
    relative: float
    worst_row: float
    worst_column: float
    damaged_columns: float
    flushed: float
    product: float | None
    scale_bytes: float


def rounded(weight: Tensor, granularity: str) -> Tensor:
    """float32 [n, k] → what E4M3 codes with one float32 scale a block give back, scale = amax / 448.

    Raises ConfigError for an unknown granularity.
    """
    n, k = weight.shape
    bm, bn = _block(granularity, n, k)
    padded = torch.nn.functional.pad(weight.float(), (0, -k % bn, 0, -n % bm))
    tiles = padded.reshape(padded.shape[0] // bm, bm, padded.shape[1] // bn, bn)
    scale = tiles.abs().amax(dim=(1, 3), keepdim=True) / TOP
    scale = scale.masked_fill(scale == 0, 1.0)
    codes = (tiles / scale).clamp(-TOP, TOP).to(torch.float8_e4m3fn)
    return (codes.float() * scale).reshape(padded.shape)[:n, :k]


def matrix_errors(weight: Tensor, x: Tensor | None = None) -> list[MatrixError]:
    """Every granularity of weight [n, k]; `x` [m, k] are inputs to multiply, such as a layer's own."""
    weight = weight.float()
    n, k = weight.shape
    found = []
    for name in GRANULARITIES:
        back = rounded(weight, name)
        lost = weight - back
        bm, bn = _block(name, n, k)
        found.append(
            MatrixError(
                name,
                _ratio(lost, weight),
                float(_ratios(lost, weight, dim=1).max()),
                float(_ratios(lost, weight, dim=0).max()),
                float((_ratios(lost, weight, dim=0) > DAMAGE).float().mean()),
                float(((back == 0) & (weight != 0)).sum() / max(1, int((weight != 0).sum()))),
                None if x is None else _ratio(x.float() @ lost.t(), x.float() @ weight.t()),
                4 * -(-n // bm) * -(-k // bn) / (n * k),
            )
        )
    return found


def with_outliers(weight: Tensor, columns: int, octaves: float, seed: int = 0) -> Tensor:
    """The weight with `columns` of its input channels, drawn at random, multiplied by 2^`octaves`: [n, k] float32.

    Raises ConfigError for more columns than there are, and for octaves beyond ±60, which float32 may not hold.
    """
    k = weight.shape[1]
    if not isinstance(columns, int) or isinstance(columns, bool) or not 0 <= columns <= k:
        raise ConfigError(
            f"outlier columns are {columns!r:.60}; expected a whole number from 0 to {k}, the weight's input channels"
        )
    if not isinstance(octaves, int | float) or isinstance(octaves, bool) or not abs(octaves) <= OCTAVES:
        raise ConfigError(f"outlier octaves are {octaves!r:.60}; expected a number from -{OCTAVES} to {OCTAVES}")
    chosen = torch.randperm(k, generator=torch.Generator().manual_seed(seed))[:columns]
    out = weight.float().clone()
    out[:, chosen] *= 2.0**octaves
    return out


def _block(granularity: str, n: int, k: int) -> tuple[int, int]:
    if not isinstance(granularity, str) or granularity not in GRANULARITIES:
        raise ConfigError(f"granularity is {granularity!r:.60}; expected one of {', '.join(GRANULARITIES)}")
    bm, bn = GRANULARITIES[granularity]
    return bm or n, bn or k


def _ratio(part: Tensor, whole: Tensor) -> float:
    size = float(whole.double().norm())
    return float(part.double().norm()) / size if size else 0.0


def _ratios(part: Tensor, whole: Tensor, dim: int) -> Tensor:
    sizes = whole.norm(dim=dim)
    return part.norm(dim=dim) / sizes.masked_fill(sizes == 0, 1.0)
