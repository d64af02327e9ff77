"""What a draft depth costs in time, from the seconds that rows took, and which of those seconds not to believe.

A round at depth k takes `cost` times as long as one at depth 0 and gives `length` tokens: speculation pays where
`length > cost`, and `length / cost` is the speed against plain decoding. Both come from the rows of one study.

A machine that was busy with something else shows in its rows' seconds and in nothing else. Seconds per round follow the
depth, so rows are held against a robust line through all of them (Theil and Sen: the median of all slopes, of
log seconds over log (depth + 1)), and where one lies more than `ODD` times off, it is named and counted nowhere. Past
about a quarter of the rows disturbed, no line can tell which they are.

Reads rows, or dicts with the same fields; measures nothing and knows nothing of sentences or pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtplab.study.fields import fact_of, field_of

__all__ = ["BATCH", "ODD", "Cost", "batch_of", "by_batch", "costs", "odd_timings", "round_seconds"]

ODD = 3.0  # times slower or faster than the trend: no cache or exclusion set does that
BATCH = 64  # prompts that `generate` decodes at once, which a sweep leaves as it is


@dataclass(frozen=True)
class Cost:
    """A round at `depth` takes `ratio` times as long as one at depth 0: the median over `settings` settings."""

    depth: int
    ratio: float
    settings: int


def batch_of(row: Any) -> int:
    """Prompts of a row that were decoded at once."""
    return min(BATCH, field_of(row, "n_prompts") or 0)


def by_batch(rows: Iterable[Any]) -> list[list[Any]]:
    """Rows with the same number of prompts at once together, in the order in which they come: what a round costs hangs
    on that."""
    found: dict[int, list[Any]] = {}
    for row in rows:
        found.setdefault(batch_of(row), []).append(row)
    return list(found.values())


def round_seconds(row: Any) -> float | None:
    """Decoding seconds per round of one prompt, shared with the prompts beside it; None without any."""
    seconds, rounds = field_of(row, "seconds"), field_of(row, "rounds")
    return seconds / rounds if seconds and rounds else None


def odd_timings(rows: Iterable[Any]) -> list[float | None]:
    """For each row: how many times slower (or, below 1, faster) than the trend, if more than `ODD` times; else None.

    Rows are compared with those of the same prompts, temperature and device.
    """
    rows = list(rows)
    found: list[float | None] = [None] * len(rows)
    groups: dict[Any, list[int]] = {}
    for at, row in enumerate(rows):
        if round_seconds(row) is not None:
            groups.setdefault(_alike(row), []).append(at)
    for group in groups.values():
        depths = np.log1p([field_of(rows[at], "depth") for at in group])
        seconds = np.log([round_seconds(rows[at]) for at in group])
        for at, off in zip(group, seconds - _line(depths, seconds), strict=True):
            if abs(off) > math.log(ODD):
                found[at] = math.exp(off)
    return found


def costs(rows: Iterable[Any], odd: Sequence[float | None] | None = None) -> dict[int, Cost]:
    """depth -> what a round costs against depth 0, rows with odd timings left out; empty without depth 0.

    Args:
        rows: of one temperature and one set of prompts; settings (exclusions, caches) may differ.
        odd: as `odd_timings` gives it for these rows; worked out here when None.
    """
    rows = list(rows)
    odd = odd_timings(rows) if odd is None else odd
    lines: dict[Any, dict[int, float]] = {}
    for row, off in zip(rows, odd, strict=True):
        seconds = round_seconds(row)
        if off is None and seconds is not None:
            lines.setdefault((*_alike(row), _setting(row)), {})[field_of(row, "depth")] = seconds
    ratios: dict[int, list[float]] = {}
    for line in lines.values():
        for depth, seconds in line.items():
            if 0 in line:
                ratios.setdefault(depth, []).append(seconds / line[0])
    return {
        depth: Cost(depth, float(np.median(found)), len(found)) for depth, found in sorted(ratios.items()) if found
    }


def _line(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[n]: a straight line through (x, y) that a quarter of the points cannot move; flat where x does not differ."""
    dx, dy = np.subtract.outer(x, x), np.subtract.outer(y, y)
    apart = dx > 0
    slope = float(np.median(dy[apart] / dx[apart])) if apart.any() else 0.0
    return slope * x + float(np.median(y - slope * x))


def _alike(row: Any) -> tuple[Any, ...]:
    """What two rows share whose seconds can be compared."""
    names = ("checkpoint", "engine", "method", "prompt_set", "n_prompts", "max_new_tokens", "temperature")
    return *(field_of(row, name) for name in names), fact_of(row, "device")


def _setting(row: Any) -> tuple[Any, ...]:
    names = ("exclude_label", "quant_policy", "draft_quant_policy", "model_format", "seed", "top_k", "top_p")
    return tuple(str(field_of(row, name)) for name in names)
