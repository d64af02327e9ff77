"""Linear layers whose weights stay FP8: with the kernels interpreted they give what torch gives on a CPU."""

from __future__ import annotations

import pytest
import torch

from kernel_tools import relative_error
from mtplab import ConfigError
from mtplab.quant.block import quantize_block
from mtplab.quant.fp8_products import Fp8Gemm, Fp8ScaledGemm, uses_kernels
from mtplab.quant.linear import LinearWeight, PackedLinear
from mtplab.quant.rounding import Rounding

CPU = torch.device("cpu")


def weights(*rows: int, k: int = 200, rounded: bool = True) -> list[LinearWeight]:
    generator = torch.Generator().manual_seed(0)
    made = [quantize_block(torch.randn(n, k, generator=generator) * 10.0**-i) for i, n in enumerate(rows)]
    return [LinearWeight(f"w{i}", value, rounded) for i, value in enumerate(made)]


@pytest.mark.parametrize("rows", [(130,), (256, 128, 70), (70, 130, 4)], ids=str)
def test_kernels_give_what_torch_gives(rows, monkeypatch):
    members = weights(*rows)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    plain = PackedLinear(members, torch.float32, CPU)
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    kernels = PackedLinear(members, torch.float32, CPU)
    assert isinstance(kernels._parts[0].product, Fp8Gemm)
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    for expected, got in zip(plain(x), kernels(x), strict=True):
        assert relative_error(got, expected) < 1e-6
    for expected, got in zip(plain.weights(), kernels.weights(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("rounding", [Rounding(0), Rounding(0, 0.01)], ids=["token", "static"])
@pytest.mark.parametrize("by_row", [True, False], ids=["channel", "tensor"])
def test_kernels_for_scales_by_row_and_by_tensor_give_what_torch_gives(rounding, by_row, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    members = [
        LinearWeight(
            f"w{n}", quantize_block(torch.randn(n, 200, generator=generator), (1 if by_row else n, 200)), True, rounding
        )
        for n in (70, 130)
    ]
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    plain = PackedLinear(members, torch.float32, CPU)
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    kernels = PackedLinear(members, torch.float32, CPU)
    assert isinstance(kernels._parts[0].product, Fp8ScaledGemm)
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)) * 4  # some are cut at 448 stored scales
    for expected, got in zip(plain(x), kernels(x), strict=True):
        assert relative_error(got, expected) < 1e-6
    one = PackedLinear(members[:1], torch.float32, CPU)
    residual = torch.randn(5, 70)
    torch.testing.assert_close(one.add_to(residual, x), residual + one(x)[0])
    for expected, got in zip(plain.weights(), kernels.weights(), strict=True):
        assert torch.equal(got, expected)


def test_members_are_rounded_each_in_its_own_way():
    made = [quantize_block(torch.randn(40, 200), (1, 200)) for _ in range(4)]
    roundings = [Rounding(0, 0.5), Rounding(0), None, Rounding(0, 0.5)]
    members = [
        LinearWeight(f"w{i}", w, how is not None, how or Rounding())
        for i, (w, how) in enumerate(zip(made, roundings, strict=True))
    ]
    together = PackedLinear(members, torch.float32, CPU)
    assert len(together._parts) == 3
    x = torch.randn(3, 200)
    for member, got in zip(members, together(x), strict=True):
        assert torch.equal(got, PackedLinear([member], torch.float32, CPU)(x)[0])


@pytest.mark.usefixtures("interpreted_kernels")
def test_a_residual_is_added(monkeypatch):
    members = weights(130)
    x, residual = torch.randn(3, 200), torch.randn(3, 130)
    linear = PackedLinear(members, torch.float32, CPU)
    torch.testing.assert_close(linear.add_to(residual, x), residual + linear(x)[0])


@pytest.mark.usefixtures("interpreted_kernels")
def test_inputs_that_are_not_rounded_take_no_kernel():
    linear = PackedLinear(weights(130, rounded=False), torch.float32, CPU)
    assert not isinstance(linear._parts[0].product, Fp8Gemm)


def test_a_choice_that_cannot_be_obeyed(monkeypatch):
    monkeypatch.setenv("MTPLAB_KERNELS", "cuda")
    with pytest.raises(ConfigError, match="MTPLAB_KERNELS is 'cuda'"):
        uses_kernels(CPU)
