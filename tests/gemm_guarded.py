"""Run as a script: FP8 products of operands behind whose last byte memory cannot be read. A kernel that does read there
ends the process; `test_kernel_gemm_guarded.py` looks.

Unlike a GPU's memory, from which most reads beyond an operand give some number.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys

os.environ |= {"TRITON_INTERPRET": "1", "MTPLAB_KERNELS": "triton"}

import torch
from pytest import MonkeyPatch

from gemm_cases import blocks, on, powers, whole
from mtplab.kernels.gemm import gemm_block, gemm_scaled
from mtplab.kernels.gemm_grouped import Routing, gemm_grouped, route
from mtplab.kernels.silu_quantize import silu_quantize

_maps = []


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy of x that ends where its memory does."""
    page = mmap.PAGESIZE
    size = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    _maps.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=x.nbytes, offset=size - x.nbytes)
    return copy.view(x.dtype).view(x.shape).copy_(x)


def products(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    x, x_scale = guarded(whole((m, k), dtype)), guarded(powers(m, blocks(k)))
    w, w_scale = guarded(whole((n, k), dtype)), guarded(powers(blocks(n), blocks(k)))
    residual = guarded(torch.zeros(m, n))
    gemm_block(x, x_scale, w, w_scale, torch.float32, residual)
    gemm_scaled(x, guarded(torch.ones(m, 1)), w, guarded(torch.ones(n, 1)))
    gemm_scaled(x, guarded(torch.ones(())), w, guarded(torch.ones(1)))
    experts = guarded(whole((3, n, k), dtype)), guarded(powers(3, blocks(n), blocks(k)))
    for chosen in (torch.full((m, 1), 2), torch.arange(m)[:, None] % 3):
        sorted_rows = route(chosen, 3)
        routing = Routing(sorted_rows.token, sorted_rows.slot, guarded(sorted_rows.offsets))
        gemm_grouped(x, x_scale, *experts, routing)
    silu_quantize(guarded(torch.ones(m, 2 * k)), dtype)


def main() -> None:
    if sys.argv[1:] == ["beyond"]:
        # what the parent expects of a read beyond an operand
        x = guarded(torch.ones(4))
        ctypes.string_at(x.data_ptr(), x.nbytes + 1)
    shapes = ((1, 16, 16), (5, 144, 272), (5, 16, 2064), (40, 144, 272), (70, 144, 272), (5, 65, 200))
    for way, (m, n, k) in itertools.product(("sm_89", "sm_90"), shapes):
        products(on(MonkeyPatch(), way, processors=1 if m == 70 else 132), m, n, k)


if __name__ == "__main__":
    main()
