"""What the launchers of FP8 matrix products share: checks of operands, alignment, and how a launch is cut.

Knows no kernel. The choice of tiles is in `gemm_tiles.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mtplab.kernels.gemm_tiles import BLOCK, Tile, choose, splits
from mtplab.kernels.launch import check, processors, step, target

__all__ = ["CODES", "OUTPUTS", "Plan", "aligned", "check_operands", "check_target", "operand", "plan"]

CODES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz}


class Plan(NamedTuple):
    """One launch: its tile, the programs that share one tile's k, the blocks of k each of them sums, and the grid."""

    tile: Tile
    parts: int
    blocks: int
    grid: tuple[int, int]


def check_operands(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> tuple[int, int]:
    """Rows and columns of x [m, k], after a look at its codes' type and w's [.., n, k]. Raises ValueError."""
    check("x", x, (None, None), CODES)
    m, k = x.shape
    if k == 0:
        raise ValueError("x has no columns; expected at least one")
    check("w", w, (*(None,) * (w.dim() - 1), k), (x.dtype,))
    if out_dtype not in OUTPUTS:
        raise ValueError(f"out_dtype is {out_dtype}; expected {' or '.join(map(str, OUTPUTS))}")
    return m, k


def check_target(x: torch.Tensor) -> None:
    """Refuse codes of a type that the GPU's matrix unit does not take. Raises ValueError."""
    wanted = target(x.device)
    if x.dtype != _E4M3[wanted.e4m3]:
        raise ValueError(f"x is {x.dtype}; {wanted.name} multiplies {_E4M3[wanted.e4m3]} (fnuz.py converts)")


def aligned(n: int, *operands: torch.Tensor | None) -> bool:
    """Whether n, the operands' columns and row strides are multiples of 16, their addresses of 16 bytes.

    Rows that overlap do not count as aligned: descriptors do not take them.
    """
    given = [x for x in operands if x is not None]
    whole = all(x.data_ptr() % 16 == x.shape[-1] % 16 == step(x) % 16 == 0 for x in given)
    return n % 16 == 0 and whole and all(step(x) >= x.shape[-1] for x in given)


def plan(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None = None) -> Plan:
    """For x [m, k] · w [n, k]ᵀ (+ residual [m, n]), on x's device."""
    (m, k), n = x.shape, w.shape[0]
    units = processors(x.device)
    tile = choose(m, n, aligned(n, x, w, residual), target(x.device), units)
    parts, blocks = splits(m, n, k, tile, units), -(-k // BLOCK)
    return Plan(tile, parts, -(-blocks // parts), (-(-m // tile.rows) * -(-n // tile.columns), parts))


def operand(x: torch.Tensor, rows: int, tile: Tile) -> Any:
    """What a kernel gets to read x [m, k] through, `rows` rows at a time: itself, or a descriptor."""
    if not tile.descriptors:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), [step(x), 1], [rows, BLOCK])
