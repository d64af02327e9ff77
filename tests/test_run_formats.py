"""Every scheme that is planned also runs: the bundled model quantised here by plain formulas, against its values.

The other side of each comparison is the model with the dequantised values in float32, whose inputs are rounded by the
formulas in this file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtplab import load_model
from mtplab.checkpoint import open_checkpoint
from mtplab.decode import generate
from mtplab.errors import CheckpointError
from mtplab.models.parameters import Parameters
from mtplab.quant.linear import LinearWeight
from tests.checkpoint_builders import E4M3, tensor_file
from tests.test_models import run_passes

E8M0 = torch.float8_e8m0fnu
PROMPTS = [[5, 70, 300, 9, 12, 40], [800, 3, 3, 41]]


def is_linear(name: str, tensor: Tensor) -> bool:
    return name.endswith("proj.weight") or ".in_proj_qkv" in name or ".in_proj_z" in name or name == "mtp.fc.weight"


def quantised(weight: Tensor, block: tuple[int, int], power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Codes, and the scales of the blocks as a grid; ragged last blocks are padded with zeros."""
    (n, k), (bm, bn) = weight.shape, block
    pad = torch.nn.functional.pad(weight, (0, -k % bn, 0, -n % bm))
    grid = pad.abs().unfold(0, bm, bm).unfold(1, bn, bn).amax((-2, -1)) / 448
    if power_of_two:
        grid = 2.0 ** torch.ceil(torch.log2(grid))
    return (weight / spread(grid, block, weight)).to(E4M3), grid


def spread(grid: Tensor, block: tuple[int, int], like: Tensor) -> Tensor:
    return grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: like.shape[0], : like.shape[1]]


def by_token(group: int) -> Callable[[Tensor], Tensor]:
    def rounded(x: Tensor) -> Tensor:
        pieces = []
        for piece in x.split(group or x.shape[-1], dim=-1):
            scale = piece.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 448
            pieces.append((piece / scale).to(E4M3).float() * scale)
        return torch.cat(pieces, -1)

    return rounded


def by_scale(scale: float) -> Callable[[Tensor], Tensor]:
    def rounded(x: Tensor) -> Tensor:
        return (x / scale).clip(-448, 448).to(E4M3).float() * scale

    return rounded


def as_it_is(x: Tensor) -> Tensor:
    return x


def ct(strategy: str, inputs: str | None, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 8, "type": "float", "dynamic": inputs != "tensor", "strategy": inputs}
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights},
             "input_activations": given if inputs else None}  # fmt: skip
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WHOLE = (1 << 20, 1 << 20)
ROW = (1, 1 << 20)
# config, block, the scale's suffix and what is made of its grid, how inputs are rounded, the stored input scale
CASES: dict[str, tuple] = {
    "HF block": (BLOCK, (128, 128), "weight_scale_inv", None, by_token(128), None),
    "HF block, UE8M0": (BLOCK, (128, 128), "weight_scale_inv", lambda s: s.to(E8M0), by_token(128), None),
    "HF block, powers of two in F32": (BLOCK, (128, 128), "weight_scale_inv", None, by_token(128), None),
    "HF tensor": ({**BLOCK, "weight_block_size": None}, WHOLE, "weight_scale_inv", lambda s: s.view(()), by_token(0),
                  None),
    "AutoFP8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, WHOLE, "weight_scale",
                       lambda s: s.view(1), by_scale(0.02), ("input_scale", 0.02)),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, ROW, "weight_scale", None, by_token(0), None),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, WHOLE, "weight_scale", lambda s: s.view(()),
                 by_scale(0.03), ("input_scale", 0.03)),
    "ModelOpt per channel": ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, ROW,
                             "weight_scale", lambda s: s.view(-1), by_token(0), None),
    "ModelOpt blocks, weights only": ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, (128, 128),
                                      "weight_scale", lambda s: s[:, None, :, None], as_it_is, None),
    "MXFP8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, (1, 32), "weight_scale",
              lambda s: s.to(E8M0).view(torch.uint8), by_token(32), None),
    "compressed-tensors channel": (ct("channel", "token"), ROW, "weight_scale", lambda s: s.bfloat16(), by_token(0),
                                   None),
    "compressed-tensors tensor": (ct("tensor", "tensor"), WHOLE, "weight_scale", lambda s: s.view(1), by_scale(0.05),
                                  ("input_scale", 0.05)),
    "compressed-tensors block": (ct("block", "group", block_structure=[128, 128]), (128, 128), "weight_scale", None,
                                 by_token(128), None),
    "compressed-tensors naive": (ct("tensor", None), WHOLE, "weight_scale", lambda s: s.view(1), as_it_is, None),
}  # fmt: skip


def write(folder: Path, bundled: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(bundled / name, folder / name)
    config = json.loads((bundled / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    tensor_file(folder / "model.safetensors", tensors)
    return folder


def tokens(model: Any) -> list[list[int]]:
    return [list(result) for result in generate(model, PROMPTS, max_new_tokens=24).tokens]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_values(
    tmp_path: Path, bundled: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization, block, suffix, stored_as, rounded, inputs = CASES[case]
    plain = open_checkpoint(bundled)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name in plain.tensors:
        tensor = plain.read(name)
        stored[name] = values[name] = tensor
        if not is_linear(name, tensor):
            continue
        fitted = tuple(min(size, dim) for size, dim in zip(block, tensor.shape, strict=True))
        codes, grid = quantised(tensor.float(), fitted, "UE8M0" in case or "powers" in case or case == "MXFP8")
        scale = grid if stored_as is None else stored_as(grid)
        as_read = grid.bfloat16().float() if scale.dtype == torch.bfloat16 else grid
        stored[name], values[name] = codes, codes.float() * spread(as_read, fitted, tensor)
        module = name.removesuffix(".weight")
        stored[f"{module}.{suffix}"] = scale
        if inputs is not None:
            stored[f"{module}.{inputs[0]}"] = torch.tensor(inputs[1])
    model = load_model(write(tmp_path / "fp8", bundled, stored, quantization))
    fp8 = {module.name for module in model.plan.modules if module.weight == "fp8"}
    assert fp8 == {name.removesuffix(".weight") for name in values if is_linear(name, values[name])}

    own = Parameters._weight

    def with_own_rounding(self: Parameters, module: str, shape: tuple[int, int]) -> LinearWeight:
        made = own(self, module, shape)
        return LinearWeight(module, made.value, module in fp8, rounded)  # type: ignore[arg-type]

    monkeypatch.setattr(Parameters, "_weight", with_own_rounding)
    expected = load_model(write(tmp_path / "values", bundled, values, None))
    ids = torch.arange(3, 1000, 13).tolist()
    assert torch.equal(run_passes(model, ids, [64, 8, 1, 4], True), run_passes(expected, ids, [64, 8, 1, 4], True))
    assert tokens(model) == tokens(expected)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_an_input_scale_that_is_none_is_named(tmp_path: Path, bundled: Path, value: Any) -> None:
    plain = open_checkpoint(bundled)
    stored = {name: plain.read(name) for name in plain.tensors}
    name = "model.layers.0.mlp.up_proj"
    codes, grid = quantised(stored[f"{name}.weight"].float(), tuple(stored[f"{name}.weight"].shape))
    stored |= {f"{name}.weight": codes, f"{name}.weight_scale": grid, f"{name}.input_scale": torch.tensor(value)}
    folder = write(tmp_path / "x", bundled, stored, {"quant_method": "fp8", "activation_scheme": "static"})
    with pytest.raises(CheckpointError, match=r"up_proj\.input_scale, which scales activations, holds"):
        load_model(folder)
    assert load_model(folder, activation_rounding=False).plan.by_name[name].activation == "fp8"
