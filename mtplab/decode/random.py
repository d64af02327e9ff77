"""The random numbers of a run. They live beside the acceptance kernel, which makes the same ones on a GPU.

Knows nothing of tokens.
"""

from __future__ import annotations

from mtplab.kernels.philox import Purpose, philox, uniform

__all__ = ["Purpose", "philox", "uniform"]
