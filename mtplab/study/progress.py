"""How far a sweep is, and an honest time to go.

This module runs nothing and draws nothing. It predicts from rows measured in this very sweep: a depth costs
what that depth took so far, or the nearest depth that was measured; loading costs what loading took. Before
anything has been measured there is no estimate, rather than a guess.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

__all__ = ["Estimator", "SweepProgress"]


@dataclass(frozen=True)
class SweepProgress:
    """A moment of a sweep. Rows count points × depths; `fraction` is how far the current row is, 0…1.

    `seconds` have passed; `remaining` seconds are left, or None while there is nothing to tell it from.
    """

    done: int
    total: int
    computed: int
    reused: int
    failed: int
    current: str
    fraction: float
    seconds: float
    remaining: float | None

    def __str__(self) -> str:
        left = "estimating" if self.remaining is None else f"{duration(self.remaining)} to go"
        return f"{self.done}/{self.total} rows, {left}" + (f" · {self.current}" if self.current else "")


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@dataclass
class Estimator:
    """Learns what rows and loads cost; `workers` run side by side."""

    workers: int = 1
    now: Callable[[], float] = time.monotonic
    _rows: dict[int, list[float]] = field(default_factory=dict)
    _loads: list[float] = field(default_factory=list)

    def row_took(self, depth: int, seconds: float) -> None:
        self._rows.setdefault(depth, []).append(seconds)

    def load_took(self, seconds: float) -> None:
        self._loads.append(seconds)

    def row_cost(self, depth: int) -> float | None:
        """Seconds expected for one row at `depth`; None before any was measured."""
        if not self._rows:
            return None
        nearest = min(self._rows, key=lambda known: (abs(known - depth), known))
        return sum(self._rows[nearest]) / len(self._rows[nearest])

    def remaining(self, depths: Iterable[int], loads: int = 0, spent: float = 0.0) -> float | None:
        """Seconds to go for rows at `depths` (the current one among them, `spent` seconds in) and `loads`."""
        costs = [self.row_cost(depth) for depth in depths]
        if any(cost is None for cost in costs):
            return None
        load = sum(self._loads) / len(self._loads) if self._loads else 0.0
        first = max(0.0, costs[0] - spent) if costs else 0.0
        return (first + sum(costs[1:]) + load * loads) / max(1, self.workers)
