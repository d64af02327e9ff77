"""What a layout says of the files it stands for, and the recipe a checkpoint is written by.

Knows no layout: each is a file beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["GRANULARITIES", "SCALES", "Layout", "Recipe", "grid_of"]

GRANULARITIES = ("block", "channel", "tensor")
SCALES = ("float", "ue8m0")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How weights become E4M3: which values share a scale, which scales there are, and the layout they lie in."""

    granularity: str  # one of GRANULARITIES
    layout: str
    scales: str = "float"  # "ue8m0": powers of two, rounded up
    block: tuple[int, int] = (128, 128)  # rows and columns that share a scale; of "block" only

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(bm, bn) of a weight [n, k]: a channel is a block of (1, k), a tensor one of (n, k)."""
        n, k = shape
        return {"block": self.block, "channel": (1, max(1, k)), "tensor": (max(1, n), max(1, k))}[self.granularity]


@dataclass(frozen=True)
class Layout:
    """One way of laying FP8 weights out in a checkpoint: everything the writer needs to know of it.

    A weight `X.weight` F8_E4M3 [n, k] has its F32 multipliers in `X` + `scale_suffix`.
    """

    name: str  # as `--layout` spells it
    method: str  # quant_method
    scale_suffix: str
    # (granularity, (n, k), (bm, bn)) → shape of the scale tensor
    scale_shape: Callable[[str, tuple[int, int], tuple[int, int]], tuple[int, ...]]
    # why a recipe cannot be written in this layout, as the rest of a sentence, or None
    refuses: Callable[[Recipe], str | None]
    # (recipe, full names of what is kept out of FP8) → config.json's quantization_config
    config: Callable[[Recipe, Sequence[str]], dict[str, Any]]
    # the same for hf_quant_config.json, of layouts that have one
    separate: Callable[[Recipe, Sequence[str]], dict[str, Any]] | None = None


def grid_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """(ceil(n / bm), ceil(k / bn)): how many scales a weight [n, k] has along either axis."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
