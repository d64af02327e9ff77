"""How sure a ratio of sums over prompts is: a bootstrap that draws prompts anew, the same ones every time.

Rounds of one prompt resemble each other, so it is prompts that are drawn, with all their rounds. The interval is the
percentile interval, widened for a small sample as Student's t widens one (Hesterberg, What Teachers Should Know About
the Bootstrap, 2014, "expanded percentile"). It need not lie evenly about the value. What has only a ±, the rows of a
sweep, takes the jackknife of `interval.py`; LOG.md has how often each holds the truth.

Knows sums and prompts, not what they count.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from mtplab.study.interval import student

__all__ = ["DRAWS", "change_interval", "ratio_interval"]

Sums = tuple[np.ndarray, np.ndarray]

DRAWS, SEED = 2000, 0


def ratio_interval(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, float] | None:
    """The 95 % interval (low, high) of Σ sums / Σ sizes, each [n], one entry a prompt.

    The same arguments give the same interval. A prompt of size 0 counts as not there; None with fewer than two others.
    """
    sums, sizes = np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    there = sizes > 0
    n = int(there.sum())
    if n < 2:
        return None
    drawn = _times(n)
    ratios = (drawn @ sums[there]) / (drawn @ sizes[there])
    return _ends(ratios, n)


def change_interval(one: Sums, other: Sums, paired: bool = False) -> tuple[float, float] | None:
    """The 95 % interval (low, high) of the difference of two ratios, each given as (sums [n], sizes [n]).

    Paired: both are of the same prompts, which are drawn together; else each is drawn by itself. None where it cannot
    be told: fewer than two prompts.
    """
    each = [tuple(np.asarray(part, dtype=np.float64) for part in pair) for pair in (one, other)]
    there = [sizes > 0 for _, sizes in each]
    if paired:
        there = [there[0] | there[1]] * 2
    counts = [int(mask.sum()) for mask in there]
    if min(counts) < 2 or not all(sizes.any() for _, sizes in each):
        return None
    drawn = [_times(n, 0 if paired else stream) for stream, n in enumerate(counts)]
    with np.errstate(invalid="ignore"):
        ratios = [
            (times @ sums[mask]) / (times @ sizes[mask])
            for times, (sums, sizes), mask in zip(drawn, each, there, strict=True)
        ]
    # a draw of prompts that have nothing of one of the two compares nothing
    changes = ratios[0] - ratios[1]
    changes = changes[np.isfinite(changes)]
    return _ends(changes, min(counts)) if len(changes) else None


def _ends(drawn: np.ndarray, n: int) -> tuple[float, float]:
    # the share of the normal distribution beyond t of n − 1 degrees, and the bootstrap's missing n / (n − 1)
    outside = 0.5 * math.erfc(math.sqrt(n / (n - 1)) * student(n - 1) / math.sqrt(2))
    low, high = np.quantile(drawn, [outside, 1 - outside])
    return float(low), float(high)


@lru_cache(maxsize=64)
def _times(n: int, stream: int = 0) -> np.ndarray:
    """[draws, n]: how often each of n prompts is drawn, of n draws with replacement."""
    times = np.random.default_rng((SEED, stream)).multinomial(n, np.full(n, 1 / n), DRAWS).astype(np.float64)
    times.flags.writeable = False
    return times
