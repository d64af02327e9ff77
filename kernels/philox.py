"""Counter-based random numbers: the same seed, prompt, position and purpose give the same number, whatever else runs.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), the generator that Triton's
`tl.rand` uses too, so that the acceptance kernel draws the same numbers. Knows nothing of tokens.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = ["Purpose", "philox", "uniform"]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


class Purpose(IntEnum):
    """What a number is for: each has a stream of its own at every position."""

    SAMPLE = 0  # the target's own token: bonus, recovered or plain
    ACCEPT = 1
    DRAFT = 2


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-10: counter [..., 4] uint32 under a 64-bit seed → [..., 4] uint32."""
    x0, x1, x2, x3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = x0 * _M0, x2 * _M1
        x0, x1, x2, x3 = (p1 >> _SHIFT) ^ x1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ x3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)


def uniform(seed: int, prompts: np.ndarray, positions: np.ndarray, purpose: Purpose) -> np.ndarray:
    """Numbers in [0, 1) with 53 bits, float64 [b, t].

    prompts [b]: index of each prompt in the call; positions [b, t]: position of the token in its sequence.
    """
    counter = np.zeros((*positions.shape, 4), dtype=np.uint32)
    counter[..., 0] = positions
    counter[..., 1] = prompts[:, None]
    counter[..., 2] = int(purpose)
    bits = philox(counter, seed).astype(np.uint64)
    return ((bits[..., 0] >> np.uint64(5)) * np.uint64(1 << 26) + (bits[..., 1] >> np.uint64(6))) / float(1 << 53)
