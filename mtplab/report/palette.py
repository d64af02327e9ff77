"""One colour-blind-safe palette for figures, explorer and report.

The colours are those of Okabe and Ito, "Color Universal Design" (2008), and past seven of Tol's "muted" (2021). In
every figure colour says the cache policy, marker and dash the exclusion set; a storage dtype has its own number in the
cell.

This module knows no figure, no row and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["DASHES", "DTYPE_COLOURS", "INK", "MARKERS", "PAPER", "POLICY_COLOURS", "SERIES", "policy_colours"]

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW, BLACK = "#E69F00", "#56B4E9", "#F0E442", "#000000"

#: Order in which series take colours; yellow is left out, for it vanishes on white paper.
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "#6B6B6B", "#332288", "#882255", "#999933")

#: The cache policies that are named alone keep their colour in every figure, whichever of them a study has.
POLICY_COLOURS = {
    "unquantised": BLUE,
    "int8": VERMILLION,
    "int4": GREEN,
    "fp8_e4m3": PURPLE,
    "fp8_e5m2": ORANGE,
    "turboquant": SKY,
}

#: Storage dtypes: dark blue for what keeps 16 bits, orange for FP8, grey for float32.
DTYPE_COLOURS = {"fp8": ORANGE, "bf16": BLUE, "f16": SKY, "f32": "#6B6B6B", "other": "#B8B8B8"}

#: Text colour that can be read on each of `DTYPE_COLOURS` (contrast of at least 4.5 : 1).
DTYPE_INK = {"fp8": BLACK, "bf16": "#FFFFFF", "f16": BLACK, "f32": "#FFFFFF", "other": BLACK}

#: matplotlib (on, off) dashes in points, `None` for a solid line; the explorer uses the same ones in px.
DASHES: tuple[tuple[float, ...] | None, ...] = (
    None,
    (6, 3),
    (2, 2),
    (8, 3, 2, 3),
    (10, 4),
    (4, 2, 1, 2, 1, 2),
)

#: matplotlib markers; the explorer draws the same shapes under the names in `MARKER_NAMES`.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MARKER_NAMES = ("circle", "square", "up", "diamond", "down", "plus", "cross")

INK, PAPER, GRID = "#1F2328", "#FFFFFF", "#D8DEE4"


def policy_colours(policies: Iterable[str]) -> dict[str, str]:
    """A colour for each policy label: the fixed one where there is one, else the next that is free.

    Args:
        policies: labels in the order they should be drawn in; a label may name a pair ("int8 / draft none").

    Returns:
        label -> "#RRGGBB", in the same order. Colours repeat only past the tenth label.
    """
    labels = list(dict.fromkeys(policies))
    taken = {POLICY_COLOURS[label] for label in labels if label in POLICY_COLOURS}
    free = [colour for colour in SERIES if colour not in taken] or list(SERIES)
    colours, used = {}, 0
    for label in labels:
        if label in POLICY_COLOURS:
            colours[label] = POLICY_COLOURS[label]
        else:
            colours[label] = free[used % len(free)]
            used += 1
    return colours
