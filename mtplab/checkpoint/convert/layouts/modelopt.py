"""NVIDIA ModelOpt: `quant_algo` in config.json and in hf_quant_config.json, and `X.weight_scale` F32.

FP8_PB_WO: [ceil(n/128), 1, ceil(k/128), 1], weights only. FP8_PER_CHANNEL_PER_TOKEN: [n]. FP8, one scale a tensor, has
static activations: its readers create `input_scale` beside each weight and use it whether or not the file brought one
(vLLM's ModelOptFp8LinearMethod fills it with float32's lowest value and then takes the maximum). That scale comes from
running calibration data, which is not done here, so this combination is refused. Source: modelopt.torch.export and the
files it writes; vLLM, model_executor/layers/quantization/modelopt.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtplab.checkpoint.convert.layouts.base import Layout, Recipe, grid_of

_ALGO = {"block": "FP8_PB_WO", "channel": "FP8_PER_CHANNEL_PER_TOKEN"}
# readers recognise the file by this name
_PRODUCER = {"name": "modelopt", "version": "written by mtplab"}


def _scale_shape(granularity: str, shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, ...]:
    rows, columns = grid_of(shape, block)
    return (rows, 1, columns, 1) if granularity == "block" else (rows,)


def _refuses(recipe: Recipe) -> str | None:
    if recipe.granularity == "tensor":
        return (
            "has FP8 per tensor with static activations only: each weight needs an input_scale, which comes from "
            "running calibration data and is not made here. Take --format fp8-channel, or --layout compressed-tensors"
        )
    if recipe.granularity == "block" and recipe.block != (128, 128):
        return f"has blocks of 128x128 only (FP8_PB_WO), not {recipe.block[0]}x{recipe.block[1]}. Leave --block out"
    return None


def _config(recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": _ALGO[recipe.granularity],
        "ignore": list(kept),
        "producer": _PRODUCER,
    }


def _separate(recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
    said = {"quant_algo": _ALGO[recipe.granularity], "kv_cache_quant_algo": None, "exclude_modules": list(kept)}
    return {"producer": _PRODUCER, "quantization": said}


LAYOUT = Layout("modelopt", "modelopt", ".weight_scale", _scale_shape, _refuses, _config, _separate)
