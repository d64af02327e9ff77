"""The scales of an FP8 cache that a checkpoint brings with it, layer by layer.

A scale is what codes are multiplied by: K is divided by it before it is rounded and multiplied when it is read, as in
vLLM and lmdeploy. Knows nothing of passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtplab.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mtplab.models.model import Model

__all__ = ["attention_layers", "checkpoint_scales"]

# of K and V: compressed-tensors and ModelOpt, Quark and old compressed-tensors, AutoFP8's one for both
_ENDINGS = (
    (".k_scale", ".k_proj.output_scale", ".kv_scale"),
    (".v_scale", ".v_proj.output_scale", ".kv_scale"),
)


def attention_layers(model: Model, part: str) -> dict[int, str]:
    """Number → name on disk of the layers that have a KV cache, of the "target" or the "draft"."""
    if part != "target":
        return {i: f"mtp.layers.{i}.self_attn" for i in range(model.config.mtp_layers)}
    root = next(r for r in ("model.", "model.language_model.") if f"{r}embed_tokens.weight" in model.checkpoint.tensors)
    kinds = enumerate(model.config.layer_types)
    return {i: f"{root}layers.{i}.self_attn" for i, kind in kinds if kind == "full_attention"}


def checkpoint_scales(model: Model, part: str, which: int, policy: str) -> dict[int, Tensor]:
    """The file's scale of K (`which` 0) or V (1) by layer, float32 [1], or [h_kv] where each head has its own.

    Raises ConfigError naming the layers without one, CheckpointError for one that is none.
    """
    stored, layers = model.checkpoint.kv_scales(), attention_layers(model, part)
    found: dict[int, Tensor] = {}
    for layer, name in layers.items():
        mine = [each for each in stored if each.startswith(f"{name}.") and each.endswith(_ENDINGS[which])]
        if len(mine) > 1:
            raise CheckpointError(f"{model.checkpoint.path}: {' and '.join(mine)} both scale one cache; expected one")
        if mine:
            found[layer] = _scale(model, mine[0])
    missing = [name for layer, name in layers.items() if layer not in found]
    if missing:
        head = " (the draft head; give it a draft_quant_policy of its own)" if part != "target" else ""
        raise ConfigError(
            f"quant_policy {policy} wants the checkpoint's own scales, but {model.checkpoint.path} has no "
            f"{'kv'[which]}_scale for {len(missing)} of {len(layers)} attention layers: {', '.join(missing[:4])}"
            f"{', …' if len(missing) > 4 else ''}{head}; use fp8_e4m3:calibrated, or fp8_e4m3 for scale 1"
        )
    return found


def _scale(model: Model, name: str) -> Tensor:
    values = model.checkpoint.read(name).to(torch.float32).flatten()
    heads = model.config.num_kv_heads
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
