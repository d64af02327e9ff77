"""What the kernel tests share: Triton's interpreter, outputs that start as NaN, a relative error.

`tests/conftest.py` sets TRITON_INTERPRET before anything imports triton.
"""

from __future__ import annotations

import mmap
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


def vast(*shape: int, dtype: torch.dtype, stride: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements lie gibibytes apart: address space only, but for the pages that are written.

    As much lies before it, where an offset that wraps to a negative number goes astray without harm.
    """
    count = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    reserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, 2 * count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserved)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride, count)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """‖got − expected‖ / ‖expected‖ (Frobenius), in float64."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
