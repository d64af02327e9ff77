"""Sizes that several kernels and their launchers agree on. Imports neither torch nor triton."""

from __future__ import annotations

__all__ = ["HEADS", "HEAD_STEP", "LARGEST_HEAD", "TAPS", "half_block"]

# elements of a head's row; two halves of at most 128 are what the KV cache's kernels hold, and the delta rule's hold
# as many rows of a state
LARGEST_HEAD = 256
HEAD_STEP = 16  # of which heads are multiples, so that rows are read in vectors
HEADS = range(HEAD_STEP, LARGEST_HEAD + 1, HEAD_STEP)

TAPS = (2, 3, 4)  # of the short convolution


def half_block(d: int) -> int:
    """Elements a kernel holds for half of a head's d: d/2 up to a power of two, at least 32."""
    return max(32, 1 << (d // 2 - 1).bit_length())
