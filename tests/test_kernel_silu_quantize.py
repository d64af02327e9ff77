"""silu(gate) · up and its quantisation in one kernel, in the interpreter against float64 and the two steps in torch."""

from __future__ import annotations

import pytest
import torch

from kernel_tools import interpreted, poisoned
from mtplab.kernels.silu_quantize import silu_quantize, silu_quantize_reference

pytestmark = interpreted


def values(m: int, k: int) -> torch.Tensor:
    """[m, 2 · k], of many magnitudes, with a zero row and a zero group."""
    h = torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(m * 1000 + k))
    h *= 10 ** torch.linspace(-4, 2, m)[:, None]
    h[m // 2] = 0
    h[0, k : k + 128] = 0
    return h


def same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The two exponential functions may differ in a last bit: a scale by some, a code next to a tie by one step."""
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0)
    code, wanted = got[0].float(), expected[0].float()
    assert ((code - wanted).abs() <= wanted.abs() / 8 + 2**-9).all()
    assert int((code != wanted).sum()) <= code.numel() // 1000


@pytest.mark.parametrize("m", [1, 7, 63, 100])
@pytest.mark.parametrize("k", [1, 128, 200, 513])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["float", "ue8m0"])
def test_the_two_steps_in_one(m, k, power_of_two):
    h = values(m, k)
    with poisoned():
        got = silu_quantize(h, power_of_two=power_of_two)
    assert got[0].shape == (m, k) and got[1].shape == (m, -(-k // 128)) and got[1].stride() == (1, m)
    same(got, silu_quantize_reference(h, torch.float8_e4m3fn, power_of_two))
    if power_of_two:
        assert (got[1].log2() % 1 == 0).all()


def test_near_float64():
    h = values(40, 300)
    codes, scale = silu_quantize(h)
    gate, up = h.double().chunk(2, 1)
    expected = gate / (1 + (-gate).exp()) * up
    error = (codes.double() * scale.double().repeat_interleave(128, 1)[:, :300] - expected).abs()
    # half a step of the code, or half the smallest step where codes are subnormal
    assert (error <= expected.abs() / 16 * 1.000001 + scale.double().repeat_interleave(128, 1)[:, :300] * 2**-10).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype, source):
    h = values(9, 300).to(source)
    with poisoned():
        got = silu_quantize(h, dtype)
    assert got[0].dtype == dtype
    same(got, silu_quantize_reference(h, dtype))


def test_a_row_does_not_depend_on_the_others():
    h = values(70, 200)
    codes, scale = silu_quantize(h)
    spoilt = h.clone()
    spoilt[torch.arange(70) != 33] = float("nan")
    alone = silu_quantize(spoilt)
    assert torch.equal(alone[1][33], scale[33]) and torch.equal(alone[0][33].float(), codes[33].float())
    again = silu_quantize(h)
    assert torch.equal(again[1], scale) and torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))


def test_nan_and_infinity_stay_visible_in_their_group_alone():
    h = torch.ones(3, 512)
    h[0, 130], h[1, 256 + 5], h[2, 7] = float("nan"), float("inf"), -200.0
    codes, scale = silu_quantize(h)
    back = codes.float() * scale.repeat_interleave(128, 1)
    one = torch.nn.functional.silu(torch.ones(128))
    assert back[0, 128:].isnan().all() and not back[1, 5].isfinite() and back[2, 7] == 0
    for group in (back[0, :128], back[1, 128:], back[2, 128:]):
        torch.testing.assert_close(group, one)


def test_strides_no_rows_and_the_reference(monkeypatch):
    wide = values(20, 300)
    h = wide[:, 17:417]
    same(silu_quantize(h), silu_quantize_reference(h, torch.float8_e4m3fn))
    by_column = h.t().contiguous().t()
    same(silu_quantize(by_column), silu_quantize_reference(h, torch.float8_e4m3fn))
    codes, scale = silu_quantize(torch.empty(0, 512))
    assert codes.shape == (0, 256) and scale.shape == (0, 2)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    for power in (False, True):
        got, expected = silu_quantize(h, power_of_two=power), silu_quantize_reference(h, torch.float8_e4m3fn, power)
        assert torch.equal(got[1], expected[1]) and bool((got[1].log2() % 1 == 0).all()) == power
    got, expected = silu_quantize(h), silu_quantize_reference(h, torch.float8_e4m3fn)
    assert torch.equal(got[1], expected[1]) and got[1].stride() == (1, 20)
    assert torch.equal(got[0].float(), expected[0].float())


@pytest.mark.parametrize(
    ("h", "how", "message"),
    [
        (torch.ones(4), {}, r"h has shape \[4\]; expected \[any, any\]"),
        (torch.ones(4, 3), {}, "h has 3 columns"),
        (torch.ones(4, 0), {}, "h has 0 columns"),
        (torch.ones(4, 4, dtype=torch.float64), {}, "h is torch.float64"),
        (torch.ones(4, 4), {"dtype": torch.float8_e5m2}, "dtype is torch.float8_e5m2"),
    ],
)
def test_wrong_arguments_are_named(h, how, message):
    with pytest.raises(ValueError, match=message):
        silu_quantize(h, **how)
