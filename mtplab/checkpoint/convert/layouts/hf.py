"""HF `fp8`: `X.weight_scale_inv`, which is the multiplier whatever it is called; blocks, or one scale a tensor.

Blocks are what DeepSeek and Qwen publish: F32 [ceil(n/bm), ceil(k/bn)]. With `scale_fmt` "ue8m0" the values are powers
of two and stay F32, as in DeepSeek's V3.1 (V4 and transformers store the exponent byte; every reader of the byte reads
F32 too). One scale a tensor, [1, 1] under `weight_block_size: null`, is transformers' dialect: engines look for
`weight_scale` there. Source: transformers' FineGrainedFP8Config and the files it writes; DeepSeek-V3's README_WEIGHTS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtplab.checkpoint.convert.layouts.base import Layout, Recipe, grid_of


def _scale_shape(granularity: str, shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, ...]:
    return (1, 1) if granularity == "tensor" else grid_of(shape, block)


def _refuses(recipe: Recipe) -> str | None:
    if recipe.granularity == "channel":
        return "has no scale per channel, only per block or per tensor. Take --layout compressed-tensors or modelopt"
    return None


def _config(recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(recipe.block) if recipe.granularity == "block" else None,
        "modules_to_not_convert": list(kept),
    }
    if recipe.scales == "ue8m0":
        said["scale_fmt"] = "ue8m0"
    return said


LAYOUT = Layout("hf", "fp8", ".weight_scale_inv", _scale_shape, _refuses, _config)
