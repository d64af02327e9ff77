"""Triton's interpreter, corrected: casts, dots and what it may not do. When Triton's own passes, ours can go."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernel_tools import interpreted
from mtplab.kernels.launch import interpreted as corrected

pytestmark = interpreted
FORMATS = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}


@pytest.fixture(autouse=True, scope="module")
def correct_interpreter():
    assert corrected()


@triton.jit
def cast(p_x, p_y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_y + o, tl.load(p_x + o).to(p_y.dtype.element_ty))


@triton.jit
def multiply(p_a, p_b, p_c, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(p_c + o, tl.dot(tl.load(p_a + o), tl.load(p_b + o)))


@triton.jit
def extremes(p_x, p_y, N: tl.constexpr):
    b_x = tl.load(p_x + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(p_y + tl.arange(0, N), tl.max(b_x, axis=1))
    tl.store(p_y + N + tl.arange(0, N), tl.min(b_x, axis=1))


@triton.jit
def add(p_x, p_y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_y + o, tl.load(p_x + o) + tl.load(p_x + o))


def all_fp16() -> torch.Tensor:
    """Every FP16 value, as float32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()


def as_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_casts_to_fp8_round_to_nearest_even_and_saturate(dtype):
    x = all_fp16()
    got = torch.empty(x.shape, dtype=dtype)
    cast[(1,)](x, got, len(x))
    expected = x.clamp(-FORMATS[dtype], FORMATS[dtype]).to(dtype)
    number = ~x.isnan()
    assert torch.equal(as_bits(got)[number], as_bits(expected)[number])
    assert got.float()[~number].isnan().all()


@pytest.mark.parametrize("dtype", [*FORMATS, torch.bfloat16, torch.float16])
def test_casts_to_float32_are_exact(dtype):
    width = 8 * dtype.itemsize
    whole = torch.int8 if width == 8 else torch.int16
    x = torch.arange(-(2 ** (width - 1)), 2 ** (width - 1), dtype=torch.int32).to(whole).view(dtype)
    got = torch.empty(x.shape)
    cast[(1,)](x, got, len(x))
    torch.testing.assert_close(got, x.float(), rtol=0, atol=0, equal_nan=True)


def test_casts_to_bf16_round_to_nearest_even():
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-30, 30, 1 << 16)
    got = torch.empty(x.shape, dtype=torch.bfloat16)
    cast[(1,)](x, got, len(x))
    assert torch.equal(as_bits(got), as_bits(x.bfloat16()))


def test_casts_to_fp16_overflow_without_a_warning():
    """Warnings are errors here; a GPU gives none."""
    x = torch.tensor([1e6, -65520.0, 65519.0, 2.0**-25])
    got = torch.empty(4, dtype=torch.float16)
    cast[(1,)](x, got, 4)
    assert got.tolist() == [float("inf"), -float("inf"), 65504.0, 0.0]


@pytest.mark.parametrize("dtype", [*FORMATS, torch.bfloat16, torch.float16, torch.float32])
def test_dots_sum_exact_products_in_float32(dtype):
    a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    got = torch.empty(64, 64)
    multiply[(1,)](a, b, got, 64)
    expected = a.double() @ b.double()
    assert float((got.double() - expected).norm() / expected.norm()) < 5e-7


def test_extremes_pass_over_nan_without_a_warning():
    nan = float("nan")
    x = torch.tensor([[nan, 1, 2, nan], [nan, nan, nan, nan], [-3, 5, 4, 0], [nan, -1, -1, -2]])
    got = torch.empty(2, 4)
    extremes[(1,)](x, got, 4)
    expected = torch.tensor([[2, nan, 5, -1], [1, nan, -3, -2]])
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_arithmetic_on_bit_patterns_is_refused(dtype):
    x = torch.ones(16).to(dtype)
    with pytest.raises(Exception, match="compute in float32"):
        add[(1,)](x, torch.empty_like(x), 16)
