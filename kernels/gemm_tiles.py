"""How a matrix product is cut into programs: tiles for each GPU, and which of them a shape gets.

The kernels' lists of variants and their launchers both read this table, so that what is compiled ahead of time and what
runs cannot differ. Knows shapes and targets only; imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtplab.kernels.targets import Target

__all__ = ["BLOCK", "DECODE_ROWS", "FEW_ROWS", "Tile", "choose", "choose_grouped", "splits", "tiles"]

BLOCK = 128  # columns of x, and rows and columns of w, that share a scale; also what a program reads of k at a time

DECODE_ROWS = 16  # rows up to which the operands are swapped
FEW_ROWS = 64  # rows up to which one tile holds them all, so that only k is left to be divided among programs


@dataclass(frozen=True)
class Tile:
    """What one program computes, rows of x times rows of w, and how.

    swap: the matrix unit gets w as its first operand. Its 64-row instructions on sm_90 and sm_100 take FP8; for 16 rows
    of x as the first operand the compiler falls back to FP16 ones. unit: sizes and strides are passed in units of so
    many elements, from which the compiler knows their alignment. descriptors: x and w are read through tensor
    descriptors.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    swap: bool = False
    unit: int = 16
    descriptors: bool = False

    @property
    def label(self) -> str:
        how = "desc" if self.descriptors else "ptr" if self.unit == 16 else "unaligned"
        return f"{self.rows}×{self.columns} {how}"


# Warps and stages for at most DECODE_ROWS rows, for few and for many. Two accumulators are kept (one for a block of k,
# one for the sum), so a tile of 128 × 128 needs 8 warps to stay in registers. Stages are what fits into shared memory.
_SIZES = ((16, 64), (64, 128), (128, 128))
_WARPS_AND_STAGES = {
    "sm_89": ((4, 4), (4, 3), (8, 3)),
    "sm_90": ((4, 6), (4, 4), (8, 4)),
    "sm_100": ((4, 6), (4, 4), (8, 4)),
    "sm_120": ((4, 4), (4, 3), (8, 3)),
    "gfx942": ((4, 3), (4, 2), (8, 2)),
    "gfx950": ((4, 3), (4, 2), (8, 2)),
}
# Rows, sizes or addresses that are not multiples of 16 are read byte by byte, into registers, of which a larger tile
# would have too few.
_UNALIGNED = Tile(64, 32, 8, 1, unit=1)


def tiles(target: Target) -> tuple[Tile, ...]:
    """All tiles of the target: for at most DECODE_ROWS rows, for few, for many, and for what is not aligned."""
    aligned = (
        Tile(*size, *rest, swap=size[0] == DECODE_ROWS, descriptors=target.descriptors)
        for size, rest in zip(_SIZES, _WARPS_AND_STAGES[target.name], strict=True)
    )
    return (*aligned, _UNALIGNED)


def choose(m: int, n: int, aligned: bool, target: Target, processors: int) -> Tile:
    """The tile for m rows and n columns on a GPU of so many multiprocessors.

    aligned: n, k and the operands' strides are multiples of 16 elements, their addresses of 16 bytes.
    """
    decode, few, many, unaligned = tiles(target)
    if not aligned:
        return unaligned
    if m <= DECODE_ROWS:
        return decode
    # the large tile reads each operand less often, where enough of them are left to occupy the GPU
    return many if m > FEW_ROWS and _count(m, n, many) >= processors else few


def choose_grouped(t: int, experts: int, aligned: bool, target: Target) -> Tile:
    """The tile for t rows sorted by expert, as if each expert had equally many: what each has the GPU alone knows."""
    decode, few, many, unaligned = tiles(target)
    if not aligned:
        return unaligned
    each = t / experts
    return decode if each <= DECODE_ROWS else few if each <= 2 * FEW_ROWS else many


def splits(m: int, n: int, k: int, tile: Tile, processors: int) -> int:
    """Programs among which the k of one tile is divided, so that a product of few rows occupies the GPU too.

    Depends on m only through `m <= FEW_ROWS`: the sum of one row is the same whatever is beside it.
    """
    if m > FEW_ROWS:
        return 1
    blocks = -(-k // BLOCK)
    wanted = 2 * processors // _count(1, n, tile)
    # each partial sum is written and read once more, which so many blocks of w outweigh
    most = max(1, min(wanted, blocks // (4 if tile.swap else 8), 16))
    return -(-blocks // -(-blocks // most))


def _count(m: int, n: int, tile: Tile) -> int:
    return -(-m // tile.rows) * -(-n // tile.columns)
