"""The layouts FP8 checkpoints are written in: one file each, holding a `LAYOUT` description.

A new file in this folder is a new layout; nothing else needs to name it.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from mtplab.checkpoint.convert.layouts.base import GRANULARITIES, SCALES, Layout, Recipe, grid_of
from mtplab.errors import ConfigError

__all__ = ["GRANULARITIES", "SCALES", "Layout", "Recipe", "grid_of", "layouts", "recipe_of"]

_FORMATS = tuple(f"fp8-{granularity}" for granularity in GRANULARITIES)
_MAX_BLOCK = 1 << 16


@cache
def layouts() -> dict[str, Layout]:
    """Every layout by its name."""
    modules = sorted(item.name for item in pkgutil.iter_modules(__path__))
    found = (getattr(importlib.import_module(f"{__name__}.{name}"), "LAYOUT", None) for name in modules)
    return {item.name: item for item in found if item is not None}


def recipe_of(format: str, layout: str, scales: str = "float", block: tuple[int, int] | None = None) -> Recipe:
    """The recipe that the names stand for: a format `fp8-block`, `fp8-channel` or `fp8-tensor`, a layout, its scales.

    Raises ConfigError for an unknown name, and for a combination that the layout has no place for.
    """
    if format not in _FORMATS:
        raise ConfigError(f"format={format!r}: expected one of {', '.join(_FORMATS)}.")
    if layout not in layouts():
        raise ConfigError(f"layout={layout!r}: expected one of {', '.join(layouts())}.")
    if scales not in SCALES:
        raise ConfigError(f"scales={scales!r}: expected one of {', '.join(SCALES)}.")
    granularity = format.removeprefix("fp8-")
    if block is None:
        block = (128, 128)
    elif granularity != "block":
        raise ConfigError(f"block={block!r} with format {format!r}: expected it with 'fp8-block' only. Leave it out.")
    if len(block) != 2 or not all(type(size) is int and 0 < size <= _MAX_BLOCK for size in block):
        raise ConfigError(f"block={block!r}: expected two whole numbers from 1 to {_MAX_BLOCK}, like (128, 128).")
    recipe = Recipe(granularity, layout, scales, (block[0], block[1]))
    why = layouts()[layout].refuses(recipe)
    if why is not None:
        raise ConfigError(f"format {format!r} in layout {layout!r}: {layout} {why}.")
    return recipe
