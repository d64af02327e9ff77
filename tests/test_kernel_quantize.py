"""Activation quantisation: the kernel in the interpreter against its torch reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernel_tools import interpreted, poisoned
from mtplab.kernels.fp8_reference import quantize_activation
from mtplab.kernels.quantize import quantize

pytestmark = interpreted


def values(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of many magnitudes, with a zero row, a zero group, subnormals and ties."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m * 1000 + k))
    x *= 10 ** torch.linspace(-6, 6, m)[:, None]
    x[m // 2] = 0
    x[0, :128] = 0
    x[-1, -1] = 1e-40
    x[m // 3, 0] = 448
    return x.to(dtype)


@pytest.mark.parametrize("m", [1, 7, 63, 100])
@pytest.mark.parametrize("k", [1, 128, 200, 513])
@pytest.mark.parametrize("group", [128, None], ids=["group", "token"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["float", "ue8m0"])
def test_bits(m, k, group, power_of_two):
    x = values(m, k)
    expected = quantize_activation(x, group or k, power_of_two=power_of_two)
    with poisoned():
        got = quantize(x, group, power_of_two=power_of_two)
    assert torch.equal(got[1], expected[1]) and torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype, source):
    x = values(9, 300).clamp(-60000, 60000).to(source)
    expected = quantize_activation(x, 128, dtype)
    with poisoned():
        got = quantize(x, 128, dtype)
    assert torch.equal(got[1], expected[1]) and torch.equal(got[0].float(), expected[0].float())


def test_nan_and_infinity_stay_visible_in_their_group_alone():
    x = torch.ones(3, 256)
    x[1, 130], x[2, 5] = float("nan"), float("inf")
    codes, scale = quantize(x)
    back = codes.float() * scale.repeat_interleave(128, 1)
    assert back[1, 128:].isnan().all() and not back[2, 5].isfinite()
    for others in (back[0], back[1, :128], back[2, 128:]):
        torch.testing.assert_close(others, torch.ones_like(others))


def test_a_long_token_is_read_in_pieces():
    x = values(3, 5000)
    expected = quantize_activation(x, 5000)
    with poisoned():
        got = quantize(x, None)
    assert torch.equal(got[1], expected[1]) and torch.equal(got[0].float(), expected[0].float())


def test_strided_rows_and_scales_by_group():
    wide = values(40, 400)
    x = wide[:, 17:317]
    expected = quantize_activation(x)
    with poisoned():
        codes, scale = quantize(x, scale_by_group=True)
    assert scale.stride() == (1, 40)
    assert torch.equal(scale, expected[1]) and torch.equal(codes.float(), expected[0].float())


def test_no_rows():
    codes, scale = quantize(torch.empty(0, 256))
    assert codes.shape == (0, 256) and scale.shape == (0, 2)


@pytest.mark.parametrize(
    "x, how, message",
    [
        (torch.ones(3), {}, r"x has shape \[3\]; expected \[any, any\]"),
        (torch.ones(3, 4, dtype=torch.int32), {}, "x is torch.int32; expected torch.bfloat16 or"),
        (torch.ones(3, 0), {}, "x has no columns"),
        (torch.ones(3, 4), {"group": 64}, "group is 64; expected 128"),
        (torch.ones(3, 4), {"dtype": torch.int8}, "dtype is torch.int8"),
    ],
)
def test_wrong_arguments_are_named(x, how, message):
    with pytest.raises(ValueError, match=message):
        quantize(x, **how)
