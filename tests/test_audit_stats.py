"""The numbers the deep audit judges by, against their definitions in double precision."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import stats
from mtplab.checkpoint.audit.stats import Stats, plain_stats, scaled_stats
from tests.checkpoint_builders import E4M3, write_checkpoint

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def defined(values: torch.Tensor) -> dict[str, float]:
    v = values.double().reshape(-1, values.shape[-1] if values.dim() else 1)
    square = v.square().mean()

    def spread(norms: torch.Tensor) -> float:
        return float(norms.std() / norms.mean()) if len(norms) > 1 else 0.0

    return {
        "count": v.numel(), "mean": float(v.mean()), "rms": float(square.sqrt()), "amax": float(v.abs().max()),
        "kurtosis": float(v.pow(4).mean() / square**2), "row_spread": spread(v.norm(dim=1)),
        "column_spread": spread(v.norm(dim=0)), "low": float(v.min()), "high": float(v.max()),
    }  # fmt: skip


def check(found: Stats, values: torch.Tensor) -> None:
    for name, expected in defined(values).items():
        assert getattr(found, name) == pytest.approx(expected, rel=2e-5, abs=2e-6), name


@pytest.fixture(autouse=True, params=[1 << 19, 700], ids=["one-band", "many-bands"])
def band(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_BAND", request.param)
    monkeypatch.setattr("mtplab.checkpoint.values._BAND_BYTES", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (300,), (130, 70), (3, 40, 50), (5, 1)])
def test_of_a_plain_tensor(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.randn(shape) * 0.3 + 0.1).to(dtype)
    folder = write_checkpoint(tmp_path, {"model.x.weight": values})
    check(plain_stats(open_checkpoint(folder).info("model.x.weight")), values)


def test_of_a_tensor_with_values_that_are_none(tmp_path: Path) -> None:
    values = torch.randn(60, 50)
    values[3, 4], values[50, 0], values[9, 9] = math.nan, math.inf, -math.inf
    folder = write_checkpoint(tmp_path, {"model.x.weight": values})
    found = plain_stats(open_checkpoint(folder).info("model.x.weight"))
    assert found.bad == 3
    check(found, values.nan_to_num(0, 0, 0))
    empty = write_checkpoint(tmp_path / "empty", {"model.x.weight": torch.zeros(0, 4)})
    assert plain_stats(open_checkpoint(empty).info("model.x.weight")).count == 0


def fp8(folder: Path, shape: tuple[int, ...], block: tuple[int, int] | None, scale: torch.Tensor, codes: torch.Tensor):
    name, suffix = (NAME, "_scale_inv") if len(shape) == 3 else ("model.x.weight", None)
    tensors = {name: codes, (f"{name}{suffix}" if suffix else "model.x.weight_scale_inv"): scale}
    quantization = {"quant_method": "fp8", "weight_block_size": list(block) if block else None}
    pair = open_checkpoint(write_checkpoint(folder, tensors, quantization)).pair(name)
    assert pair is not None
    return pair


def spread_out(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int] | None) -> torch.Tensor:
    if block is None:
        return scale.expand(shape)
    rows, columns = torch.arange(shape[-2]) // block[0], torch.arange(shape[-1]) // block[1]
    return scale[..., rows, :][..., columns]


CASES = [((130, 70), (32, 32)), ((128, 128), (128, 128)), ((64, 96), None), ((3, 40, 50), (32, 16))]


@pytest.mark.parametrize(("shape", "block"), CASES)
def test_of_a_weight_with_a_scale(tmp_path: Path, shape: tuple[int, ...], block: tuple[int, int] | None) -> None:
    codes = (torch.randn(shape) * 60).to(E4M3)
    grid = (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True))) if block else ()
    scale = torch.rand(grid) * 0.01 + 0.001
    found = scaled_stats(fp8(tmp_path, shape, block, scale, codes))
    check(found, codes.float() * spread_out(scale, shape, block))
    assert (found.bad, found.bad_scales, found.zero_blocks, found.blocks) == (0, 0, 0, scale.numel())
    assert found.uneven_scales == scale.numel() and found.scale == pytest.approx(float(scale.median()))
    inverse = codes.double() / spread_out(scale, shape, block).double()
    assert found.inverse_rms == pytest.approx(float(inverse.square().mean().sqrt()), rel=1e-4)
    assert found.top_code == int((codes.view(torch.uint8) & 0x7F).max())


def test_of_codes_and_scales_that_are_none(tmp_path: Path) -> None:
    """They are counted, and left out of the values; a block of zeros is none that has no scale."""
    shape, block = (96, 64), (32, 32)
    codes = (torch.randn(shape) * 60).to(E4M3)
    codes.view(torch.uint8)[0, :2] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    codes[64:, 32:] = 0
    scale = torch.full((3, 2), 0.25)
    scale[1, 0], scale[1, 1] = math.nan, 0
    found = scaled_stats(fp8(tmp_path, shape, block, scale, codes))
    assert (found.bad, found.bad_scales, found.zero_blocks, found.uneven_scales) == (2, 2, 1, 0)
    usable = torch.where(scale > 0, scale, 0.0)
    check(found, codes.float().nan_to_num(0) * spread_out(usable, shape, block))
    assert found.top_code == int((codes.view(torch.uint8).flatten()[2:] & 0x7F).max())


@pytest.mark.parametrize(("dtype", "byte", "count"), [(torch.float8_e5m2, 0x7C, 1), (torch.float8_e5m2, 0xFE, 1),
                                                      (torch.float8_e4m3fnuz, 0x80, 1),
                                                      (torch.float8_e4m3fnuz, 0x7F, 0)])  # fmt: skip
def test_codes_of_other_formats_that_are_none(tmp_path: Path, dtype: torch.dtype, byte: int, count: int) -> None:
    codes = torch.randn(64, 64).to(dtype)
    codes.view(torch.uint8)[5, 5] = byte
    name = "model.x.weight"
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32],
                    "fmt": "e5m2" if dtype == torch.float8_e5m2 else "e4m3"}  # fmt: skip
    tensors = {name: codes, "model.x.weight_scale_inv": torch.ones(2, 2)}
    pair = open_checkpoint(write_checkpoint(tmp_path, tensors, quantization)).pair(name)
    assert pair is not None
    found = scaled_stats(pair)
    assert found.bad == count
    check(found, codes.float().nan_to_num(0, 0, 0))
