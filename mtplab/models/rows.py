"""Rounding up: how many rows, chunks or key blocks a pass works on.

Knows nothing of what the rows hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

# numbers that AVX-512 works on at a time: two vectors, as torch's loops take them
_VECTORS = 32
# exact arithmetic pads the rows of a matrix to a multiple of this: up to it, products and vectorised functions may
# give other bits for other numbers of rows (LOG.md)
EXACT_ROWS = 8


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def row_count(n: int, exact: bool) -> int:
    """Rows of a matrix that holds n of them."""
    return round_up(n, EXACT_ROWS) if exact else n


def by_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x [.., n], worked in whole vectors.

    What is left over of a few narrow rows is worked otherwise, and has other bits where there are other rows beside it:
    a gate of one number a row is (`tests/test_exact.py`)."""
    rest = -x.numel() % _VECTORS
    if not rest:
        return function(x.contiguous())
    return function(F.pad(x.flatten(), (0, rest)))[: x.numel()].view(x.shape)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [.., r, n] with zero rows added up to `rows`."""
    return x if x.shape[-2] == rows else F.pad(x, (0, 0, 0, rows - x.shape[-2]))
