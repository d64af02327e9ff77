"""What may be asked of traced acceptance, of quality by position and of timings, checked before any work is done.

Knows nothing of traces: whether a depth, a temperature or a domain is there is for whoever holds it to say.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable
from typing import Any

from mtplab.config import MAX_DEPTH
from mtplab.errors import ConfigError

__all__ = ["confidence_of", "edges_of", "listed", "pair_of", "position_of", "traced_depth", "whole_numbers"]


def edges_of(edges: Any) -> list[int]:
    """Edges of ranges of positions, as whole numbers. Raises ConfigError for what is none."""
    found = [_whole(edge) for edge in edges] if _several(edges) else []
    if len(found) < 2 or None in found or any(b <= a for a, b in itertools.pairwise(found)):
        raise ConfigError(
            f"edges is {edges!r:.60}; expected at least two whole positions, each beyond the one before, such as "
            "[0, 64, 128]"
        )
    return found


def traced_depth(value: Any) -> int:
    """The deepest that is to be traced. Raises ConfigError for what cannot be."""
    found = _whole(value)
    if found is None or not 1 <= found <= MAX_DEPTH:
        raise ConfigError(
            f"max_depth is {value!r:.60}; expected 1 to {MAX_DEPTH}: depth 0 drafts nothing that could be traced"
        )
    return found


def position_of(name: str, value: Any) -> int:
    """A position in the context. Raises ConfigError for what is none."""
    found = _whole(value)
    if found is None or found < 0:
        raise ConfigError(f"{name} is {value!r:.60}; expected a position in the context, a whole number from 0 on")
    return found


def confidence_of(value: Any) -> float:
    """A gate's confidence. Raises ConfigError for what is no probability."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"confidence is {value!r:.60}; expected a probability, 0 to 1")
    return float(value)


def pair_of(name: str, value: Any, expected: str) -> tuple[int, int]:
    """Two whole numbers, the second not below the first. Raises ConfigError otherwise."""
    found = [_whole(each) for each in value] if _several(value) else []
    if len(found) != 2 or None in found or found[0] > found[1]:
        raise ConfigError(f"{name} is {value!r:.60}; expected {expected}")
    return found[0], found[1]


def whole_numbers(name: str, value: Any, least: int) -> list[int]:
    """Whole numbers, none below `least`, in their order; [] of nothing. Raises ConfigError for what is none."""
    found = [_whole(each) for each in value] if _several(value) else [None]
    if None in found or min(found, default=least) < least:
        raise ConfigError(f"{name} is {value!r:.60}; expected whole numbers from {least} on")
    return found


def listed(name: str, value: Any, kinds: Any, expected: str) -> list[Any]:
    """Several things of some kinds, at least one. Raises ConfigError otherwise."""
    found = list(value) if _several(value) else []
    if not found or any(isinstance(each, bool) or not isinstance(each, kinds) for each in found):
        shown = "of nothing" if not found and _several(value) else f"{value!r:.60}"
        raise ConfigError(f"{name} is {shown}; expected {expected}")
    return found


def _several(value: Any) -> bool:
    # a text is a sequence of texts, and never what was meant
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | dict)


def _whole(value: Any) -> int | None:
    """3, 3.0 and their like in numpy as 3; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or abs(value) > 1 << 53 or value != value:
        return None
    return int(value) if value == int(value) else None
