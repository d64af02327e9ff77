"""Operands for the tests of FP8 matrix products, and the GPUs whose launches they try in the interpreter."""

from __future__ import annotations

import pytest
import torch

from mtplab.kernels import gemm, gemm_grouped, gemm_plan
from mtplab.kernels.targets import TARGETS

# pointers, tensor descriptors, FNUZ
WAYS = ("sm_89", "sm_90", "gfx942")


def on(monkeypatch: pytest.MonkeyPatch, name: str, processors: int = 132) -> torch.dtype:
    """Launch as on that GPU; the type of its codes."""
    for module in (gemm_plan, gemm, gemm_grouped):
        monkeypatch.setattr(module, "target", lambda device: TARGETS[name])
    monkeypatch.setattr(gemm_plan, "processors", lambda device: processors)
    return torch.float8_e4m3fnuz if TARGETS[name].e4m3 == "fp8e4b8" else torch.float8_e4m3fn


def codes(shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> torch.Tensor:
    """Codes of all magnitudes, subnormal and largest ones among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    nan = bits == 0x80 if dtype == torch.float8_e4m3fnuz else bits & 0x7F == 0x7F
    return bits.masked_fill(nan, 0x7E).view(dtype)


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    """Positive, of seven orders of magnitude."""
    return 10 ** (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 7 - 6)


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> torch.Tensor:
    """Codes that are whole numbers up to ±8: with `powers` as scales their products' sums are exact in float32."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float().to(dtype)


def powers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Scales of 0, ½, 1 and 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([0.0, 0.5, 1.0, 2.0])[torch.randint(0, 4, shape, generator=generator)]


def blocks(size: int) -> int:
    return -(-size // 128)
