"""The scales of an FP8 cache that a checkpoint brings with it, layer by layer.

A scale is what codes are multiplied by: K is divided by it before it is rounded and multiplied when it is read, as in
vLLM and lmdeploy. Which tensor is whose, `cache_fit.py` says. Knows nothing of passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtplab.errors import CheckpointError
from mtplab.models.cache_fit import scale_names

if TYPE_CHECKING:
    from mtplab.models.model import Model
    from mtplab.quant.policy import QuantPolicy

__all__ = ["checkpoint_scales"]


def checkpoint_scales(model: Model, policy: QuantPolicy, part: str, which: int) -> dict[int, Tensor]:
    """The file's scale of K (`which` 0) or V (1) by layer that the policy quantises, float32 [1], or [h_kv] where each
    head has its own.

    Raises ConfigError naming the layers without one, CheckpointError for one that is none.
    """
    names = scale_names(model.checkpoint, model.config, policy, part, which)
    c = model.config
    rows = c.attention if part == "target" else {i: each.rows for i, each in enumerate(c.draft_layers)}
    return {layer: _scale(model, name, rows[layer].heads) for layer, name in names.items()}


def _scale(model: Model, name: str, heads: int) -> Tensor:
    values = model.checkpoint.read(name).to(torch.float32).flatten()
    if values.numel() not in (1, heads):
        raise CheckpointError(
            f"{model.checkpoint.path}: {name} has {values.numel()} numbers; expected one, or one for each of {heads} "
            "KV heads"
        )
    if not (values.isfinite() & (values > 0)).all():
        raise CheckpointError(
            f"{model.checkpoint.path}: {name} is {values.tolist()}; expected positive numbers. Use "
            "fp8_e4m3:calibrated, or fp8_e4m3 for scale 1"
        )
    return values
