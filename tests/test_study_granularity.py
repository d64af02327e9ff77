"""FP8 error by granularity, and the roofline: against quantisers written elsewhere, and against hand-made numbers."""

from __future__ import annotations

import pytest
import torch

from mtplab import ConfigError
from mtplab.kernels.fp8_reference import dequantize_block, quantize_activation, quantize_block
from mtplab.report import roofline
from mtplab.study.gpus import GPUS, SHAPES, GemmShape, gpu, shape_of
from mtplab.study.granularity import GRANULARITIES, matrix_errors, rounded, with_outliers
from mtplab.study.roofline import roof, turning_point

W = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * 0.02


def test_blocks_are_those_of_the_quantiser():
    codes, scale = quantize_block(W)
    torch.testing.assert_close(rounded(W, "128×128"), dequantize_block(codes, scale), rtol=0, atol=0)


@pytest.mark.parametrize("granularity, group", [("1×128", 128), ("channel", 300)])
def test_groups_are_those_of_the_activation_quantiser(granularity, group):
    codes, scale = quantize_activation(W, group)
    expected = codes.float() * scale.repeat_interleave(group, 1)[:, :300]
    torch.testing.assert_close(rounded(W, granularity), expected, rtol=0, atol=0)


def test_a_tensor_has_one_scale():
    scale = W.abs().max() / 448
    expected = (W / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(rounded(W, "tensor"), expected, rtol=0, atol=0)


def test_finer_is_no_worse_where_channels_differ():
    weight = W * 2.0 ** torch.linspace(-24, 0, 300)
    errors = {e.granularity: e for e in matrix_errors(weight)}
    assert errors["tensor"].worst_column == errors["channel"].worst_column == 1 > 0.1 > errors["1×128"].worst_column
    assert errors["tensor"].damaged_columns > 0.2 > errors["128×128"].damaged_columns == 0
    assert errors["tensor"].flushed > 0.1 > 0.001 > errors["128×128"].flushed >= errors["1×128"].flushed
    assert errors["tensor"].scale_bytes == 4 / W.numel() and errors["1×128"].scale_bytes == 200 * 3 * 4 / W.numel()


def test_outliers_in_inputs_hide_behind_a_block_of_their_own():
    spoilt = with_outliers(W, 3, 12)
    assert int(((spoilt / W - 2**12).abs() < 1).all(0).sum()) == 3
    x = torch.ones(4, 300)
    found = {e.granularity: e.product for e in matrix_errors(spoilt, x)}
    assert set(found) == set(GRANULARITIES) and all(0 < error < 0.1 for error in found.values())


@pytest.mark.parametrize(
    "columns, octaves, says",
    [
        (301, 1, "outlier columns are 301; expected a whole number from 0 to 300"),
        ("1", 1, "outlier columns are '1'"),
        (1.5, 1, "outlier columns are 1.5"),
        (1, 2000, "outlier octaves are 2000; expected a number from -60 to 60"),
        (1, -61, "outlier octaves are -61"),
        (1, "18", "outlier octaves are '18'"),
        (1, float("nan"), "outlier octaves are nan"),
        (1, None, "outlier octaves are None"),
    ],
)
def test_outliers_that_cannot_be_are_refused(columns, octaves, says):
    with pytest.raises(ConfigError, match=says):
        with_outliers(W, columns, octaves)


def test_the_largest_outliers_stay_finite():
    for octaves in (-60, 60, 0.5):
        assert bool(with_outliers(W, 300, octaves).isfinite().all())
    assert torch.equal(with_outliers(W, 300, 60), W * 2.0**60)


@pytest.mark.parametrize("rows", ["16", 0, 2.5, True, 1 << 31, None])
def test_rows_that_cannot_be_are_refused(rows):
    with pytest.raises(ConfigError, match="rows m is .*; expected a whole number from 1 to"):
        roof(SHAPES[0], rows, gpu("H200 SXM"), "fp8")
    if rows is not None:  # a figure without a mark
        with pytest.raises(ConfigError, match="rows m is"):
            roofline(SHAPES[0], gpu("H200 SXM"), rows)


@pytest.mark.parametrize("name", [["H200 SXM"], 3, "H300"])
def test_names_outside_the_catalogue_are_refused(name):
    for lookup in (gpu, shape_of):
        with pytest.raises(ConfigError, match="is not in the catalogue"):
            lookup(name)
    with pytest.raises(ConfigError, match="granularity is"):
        rounded(W, name)


def test_nothing_is_lost_of_nothing():
    assert all(e.relative == e.flushed == e.worst_row == 0 for e in matrix_errors(torch.zeros(3, 5)))
    with pytest.raises(ConfigError, match="granularity is 'row'"):
        rounded(W, "row")


def test_the_roof_of_a_product():
    """By hand: 4096³ in BF16 on an H200 is 137.4 GFLOP in 139 µs at 989 TFLOP/s; one row reads 33.6 MB in 7 µs."""
    square = GemmShape("none", "square", 4096, 4096)
    many, one = roof(square, 4096, gpu("H200 SXM"), "bf16"), roof(square, 1, gpu("H200 SXM"), "bf16")
    assert many.bound == "compute" and many.seconds == pytest.approx(139e-6, rel=0.01)
    assert one.bound == "memory" and one.seconds == pytest.approx(7.0e-6, rel=0.01)
    assert many.tflops == pytest.approx(989)


def test_the_turning_point_is_where_the_bound_changes():
    for shape in SHAPES:
        for card in GPUS.values():
            at = turning_point(shape, card, "fp8")
            if at is not None:
                assert roof(shape, at, card, "fp8").bound == "compute"
                assert at == 1 or roof(shape, at - 1, card, "fp8").bound == "memory"
    narrow = GemmShape("none", "narrow", 64, 64)
    assert turning_point(narrow, gpu("H200 SXM"), "bf16") is None


def test_the_catalogue():
    assert all(card.fp8 >= card.bf16 > 0 and card.link > 0 and card.source for card in GPUS.values())
    with pytest.raises(ConfigError, match="GPU 'H300' is not in the catalogue; it has H100 SXM"):
        gpu("H300")
