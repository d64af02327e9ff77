"""What the kernel tests share: Triton's interpreter, outputs that start as NaN, a relative error.

`tests/conftest.py` sets TRITON_INTERPRET before anything imports triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

# kernels on CPU tensors, interpreted
interpreted = [pytest.mark.usefixtures("interpreted_kernels")]


@contextmanager
def poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN, or bytes of 0x7F: what a kernel forgets to write shows."""
    empty = torch.empty

    def make(*arguments, **settings):
        out = empty(*arguments, **settings)
        if out.is_floating_point() and out.dtype.itemsize > 1:
            return out.fill_(float("nan"))
        out.view(torch.uint8).fill_(0x7F) if out.numel() and out.dim() else None
        return out

    with mock.patch.object(torch, "empty", make):
        yield


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """‖got − expected‖ / ‖expected‖ (Frobenius), in float64."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
