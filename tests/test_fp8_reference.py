"""The torch reference of block FP8, against its definition done slowly, over odd shapes and every code."""

import pytest
import torch

from mtplab.errors import CheckpointError
from mtplab.kernels import fp8_reference as fp8
from mtplab.quant.block import BLOCK, ScaledTensor, quantize_block
from tests.checkpoint_builders import E4M3, dequantised

FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SHAPES = [(128, 128), (256, 384), (1, 1), (5, 7), (130, 160), (127, 129), (300, 40), (1, 512)]


def spread(*shape: int) -> torch.Tensor:
    """Values over many binades, as activations and weights have them."""
    return torch.randn(*shape) * torch.exp2(torch.randint(-12, 8, shape).float())


def quantised_slowly(
    weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block after block, as the docstring says it."""
    (n, k), (bm, bn) = weight.shape, block
    codes = torch.zeros(n, k).to(dtype)
    scale = torch.zeros(-(-n // bm), -(-k // bn))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows, columns = slice(i * bm, (i + 1) * bm), slice(j * bn, (j + 1) * bn)
            tile = weight[rows, columns].float()
            amax = tile.abs().max()
            scale[i, j] = amax / torch.finfo(dtype).max if amax > 0 else 1.0
            codes[rows, columns] = (tile / scale[i, j]).to(dtype)
    return codes, scale


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_bits, b_bits = (x.reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a_bits, b_bits)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_every_code_dequantises_to_its_own_value(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(2, 128)
    scale = torch.tensor([[0.0123456789], [3.1e-30]])
    expected = codes.float() * scale
    found = fp8.dequantize_block(codes, scale, (1, 128))
    assert torch.equal(found.isnan(), expected.isnan())
    assert same_bits(found.nan_to_num(), expected.nan_to_num())
    finite = codes.float().isfinite()
    plain = torch.where(finite, codes.view(torch.uint8), torch.zeros(2, 128, dtype=torch.uint8)).view(dtype)
    assert same_bits(fp8.dequantize_block(plain, scale, (1, 128)), plain.float() * scale)
    assert fp8.has_nan_codes(codes) and not fp8.has_nan_codes(plain)
    assert not fp8.has_nan_codes(plain[:0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128), (300, 7), (3, 1)], ids=str)
def test_dequantising_follows_the_block_size(shape: tuple[int, int], block: tuple[int, int]) -> None:
    codes = (torch.randn(shape) * 100).to(E4M3)
    scale = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) + 1e-3
    found = fp8.dequantize_block(codes, scale, block)
    assert found.shape == shape and found.dtype == torch.float32
    assert torch.equal(found, dequantised(codes, scale, block))
    assert torch.equal(fp8.dequantize_block(codes, scale.bfloat16(), block),
                       dequantised(codes, scale.bfloat16().float(), block))  # fmt: skip


def test_a_view_dequantises_as_its_copy_does() -> None:
    codes = (torch.randn(256, 300) * 100).to(E4M3)[:, 20:180]
    scale = torch.rand(2, 2)
    assert torch.equal(fp8.dequantize_block(codes, scale), fp8.dequantize_block(codes.contiguous(), scale))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128)], ids=str)
def test_quantising_equals_block_after_block(shape: tuple[int, int], block: tuple[int, int]) -> None:
    weight = spread(*shape)
    for dtype in FP8_DTYPES[:3]:
        codes, scale = fp8.quantize_block(weight, block, dtype)
        slow_codes, slow_scale = quantised_slowly(weight, block, dtype)
        assert same_bits(scale, slow_scale) and codes.shape == shape
        assert same_bits(codes, slow_codes)
        assert codes.is_contiguous() and not fp8.has_nan_codes(codes)


def test_the_largest_value_of_a_block_is_kept() -> None:
    weight = spread(200, 200).bfloat16()
    codes, scale = fp8.quantize_block(weight)
    assert codes.float().abs().max() == 448
    found = fp8.dequantize_block(codes, scale)
    assert (found.max() - weight.float().max()).abs() <= 1e-6 * weight.float().max()
    assert (found - weight.float()).norm() < 0.04 * weight.float().norm()


def test_zero_and_tiny_blocks_have_a_positive_scale() -> None:
    weight = torch.zeros(256, 128)
    weight[128:] = 1e-44  # divided by 448 it is no float32 any more
    codes, scale = fp8.quantize_block(weight)
    assert scale.tolist() == [[1.0], [1.0]]
    assert torch.equal(codes.float(), torch.zeros(256, 128))
    weight[128:] = torch.linspace(0, 3e-42, 128)  # the scale is subnormal and coarse
    codes, scale = fp8.quantize_block(weight)
    assert bool((scale > 0).all()) and not fp8.has_nan_codes(codes)


@pytest.mark.slow  # importing transformers is what takes the time
def test_quantising_agrees_with_transformers() -> None:
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    weight = spread(256, 384)
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("x.weight", weight)
    codes, scale = fp8.quantize_block(weight)
    # it multiplies by 448 / amax and stores that number's reciprocal: both may differ in the last bit
    torch.testing.assert_close(scale, theirs["x.weight_scale_inv"], rtol=3e-7, atol=0)
    differ = codes.view(torch.uint8) != theirs["x.weight"].view(torch.uint8)
    assert differ.float().mean() < 1e-3
    back = Fp8Dequantize(SimpleNamespace(quantization_config=config, pre_quantized=True))
    values = back._dequantize_one(codes, scale, torch.float32)
    assert torch.equal(values.reshape(256, 384), fp8.dequantize_block(codes, scale))


# activations

ACTIVATIONS = [(1, 128), (3, 256), (2, 3, 384), (4, 64), (5, 1), (7, 200), (33, 512), (2, 129)]


@pytest.mark.parametrize("shape", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations_are_quantised_per_token_and_group(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = spread(*shape).clamp(-6e4, 6e4).to(dtype)
    codes, scale = fp8.quantize_activation(x)
    groups = -(-shape[-1] // 128)
    assert codes.shape == shape and codes.dtype == E4M3
    assert scale.shape == (*shape[:-1], groups) and scale.dtype == torch.float32
    for row, row_codes, row_scale in zip(x.float().view(-1, shape[-1]), codes.view(-1, shape[-1]),
                                         scale.view(-1, groups), strict=True):  # fmt: skip
        for g in range(groups):
            part = slice(g * 128, (g + 1) * 128)
            expected = row[part].abs().max().clamp_min(1e-6) / 448
            assert same_bits(row_scale[g], expected)
            assert same_bits(row_codes[part], (row[part] / expected).to(E4M3))


@pytest.mark.parametrize("shape", [*ACTIVATIONS, (300, 512), (64, 200)], ids=str)
@pytest.mark.parametrize("group", [128, 64])
def test_rounding_is_quantising_and_dequantising(shape: tuple[int, ...], group: int) -> None:
    x = spread(*shape)
    codes, scale = fp8.quantize_activation(x, group)
    expected = codes.float() * scale.repeat_interleave(group, -1)[..., : shape[-1]]
    before = x.clone()
    assert torch.equal(fp8.round_activation(x, group), expected)
    assert torch.equal(x, before)


def test_rounding_is_exact_at_every_boundary() -> None:
    """Codes, the midpoints between them (ties to even) and their neighbours, through both code paths."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    codes = codes[codes.isfinite()].sort().values
    middle = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middle, middle.nextafter(torch.tensor(1e9)), middle.nextafter(torch.tensor(-1e9))])
    rows = values[values.abs() < 448].repeat(8)
    x = torch.cat([torch.full((rows.numel(), 1), 448.0), rows[:, None]], 1)  # the first column makes the scale 1
    expected = x.to(E4M3).float()
    assert x.numel() > 4096
    assert torch.equal(fp8.round_activation(x), expected)
    for part in (slice(0, 500), slice(500, 1000), slice(1000, 1500)):
        assert torch.equal(fp8.round_activation(x[part]), expected[part])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = spread(128, 512)
    whole = fp8.round_activation(x)
    for m in (1, 2, 3, 8, 127):
        assert torch.equal(fp8.round_activation(x[:m]), whole[:m])
    for i in (0, 5, 127):
        assert torch.equal(fp8.round_activation(x[i]), whole[i])


def test_zeros_stay_zero_and_nan_stays_nan() -> None:
    assert torch.equal(fp8.round_activation(torch.zeros(2, 256)), torch.zeros(2, 256))
    assert torch.equal(fp8.round_activation(torch.zeros(40, 256)), torch.zeros(40, 256))
    assert fp8.quantize_activation(torch.zeros(1, 256))[1].tolist()[0] == pytest.approx([1e-6 / 448] * 2)
    for rows in (1, 40):
        x = torch.ones(rows, 256)
        x[0, 3] = float("nan")
        found = fp8.round_activation(x)
        assert bool(found[0, :128].isnan().all()) and bool(found[0, 128:].isfinite().all())


# the pair


def test_a_scaled_tensor_carries_its_block() -> None:
    weight = spread(130, 200).bfloat16()
    scaled = quantize_block(weight)
    assert isinstance(scaled, ScaledTensor) and scaled.block == BLOCK == (128, 128)
    assert scaled.shape == (130, 200) and scaled.nbytes == 130 * 200 + 4 * 4
    assert torch.equal(scaled.dequantize(), dequantised(scaled.data, scaled.scale, BLOCK))
    assert torch.equal(scaled.dequantize(torch.bfloat16), scaled.dequantize().bfloat16())
    moved = scaled.to("cpu")
    assert torch.equal(moved.data.view(torch.uint8), scaled.data.view(torch.uint8)) and moved.block == BLOCK


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.randn(130, 200)
    weight[129, 3] = value
    with pytest.raises(CheckpointError, match=r"^x: 1 of 26000 values are NaN or infinite.*\[129, 3\]"):
        quantize_block(weight, name="x")
    with pytest.raises(CheckpointError, match=r"^x has shape \[3\], expected 2 dimensions"):
        quantize_block(torch.ones(3), name="x")
