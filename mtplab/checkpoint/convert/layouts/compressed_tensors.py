"""compressed-tensors, format `float-quantized`: `X.weight_scale` [1], [n, 1] or [ceil(n/bm), ceil(k/bn)].

Activations are quantised as they come: per token beside channel and tensor scales (the FP8_DYNAMIC preset's), in groups
of the block's columns beside block scales (FP8_BLOCK's). Scales are F32; compressed-tensors' own are of the model's
dtype, which its reader takes its result's dtype from. Source: compressed_tensors.quantization.quant_scheme and files
that llm-compressor writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtplab.checkpoint.convert.layouts.base import Layout, Recipe, grid_of


def _scale_shape(granularity: str, shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, ...]:
    return (1,) if granularity == "tensor" else grid_of(shape, block)


def _config(recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights: dict[str, Any] = {**fp8, "strategy": recipe.granularity, "dynamic": False}
    inputs: dict[str, Any] = {**fp8, "strategy": "token", "dynamic": True}
    if recipe.granularity == "block":
        weights["block_structure"] = list(recipe.block)
        inputs |= {"strategy": "group", "group_size": recipe.block[1]}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": "float-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


LAYOUT = Layout("compressed-tensors", "compressed-tensors", ".weight_scale", _scale_shape, lambda recipe: None, _config)
