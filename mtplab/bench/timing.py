"""Timing on a machine that others use too: interleaved rounds, medians, ratios within one run.

Knows nothing of what is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of each round of one contestant, and the units of work (tokens, bytes) that a round does."""

    name: str
    units: float
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds of a round."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Units a second, by the median round."""
        return self.units / self.median

    @property
    def best_rate(self) -> float:
        """Units a second, by the quickest round: what the machine does when nobody disturbs it."""
        return self.units / min(self.seconds)


def interleave(contestants: dict[str, tuple[float, Callable[[], object]]], rounds: int) -> dict[str, Timing]:
    """Time contestants in turn, `rounds` times over: name → (units, what to call). Each is called once before."""
    for _, call in contestants.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, (_, call) in contestants.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(name, contestants[name][0], tuple(took)) for name, took in seconds.items()}
