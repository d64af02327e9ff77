"""Models with a fault that loads without a word: what a workbench must make visible."""

from __future__ import annotations

import dataclasses

import torch

from mtplab.models import Model
from mtplab.models.norm import RMSNorm
from mtplab.quant.block import ScaledTensor, quantize_block
from mtplab.quant.linear import LinearWeight, PackedLinear


def with_draft(model: Model, **changes) -> Model:
    """The model with these fields of its head's module replaced."""
    (module,) = model.draft.modules
    return dataclasses.replace(
        model, draft=dataclasses.replace(model.draft, modules=[dataclasses.replace(module, **changes)])
    )


def _fc(model: Model, change) -> Model:
    with torch.inference_mode():
        fc = model.draft.modules[0].fc
        weight = LinearWeight("mtp.fc", change(fc.weights()[0]), fc.rounded[0])
        return with_draft(model, fc=PackedLinear([weight], model.dtype, model.device))


def swapped_fc(model: Model) -> Model:
    """mtp.fc reads [hidden, embedding] instead of [embedding, hidden]."""
    return _fc(model, lambda w: torch.cat(w.chunk(2, dim=1)[::-1], dim=1))


def fc_as_fp8_without_a_scale(model: Model) -> Model:
    """mtp.fc is stored as FP8 and its scale is never applied."""

    def raw(w: torch.Tensor) -> torch.Tensor:
        scaled = quantize_block(w)
        return ScaledTensor(scaled.data, torch.ones_like(scaled.scale)).dequantize()

    return _fc(model, raw)


def norms_without_one(model: Model) -> Model:
    """The head's RMSNorms multiply by w instead of 1+w."""

    def without(module, *names: str):
        norms = {name: getattr(module, name) for name in names}
        return {name: RMSNorm(norm.weight - 1, norm.eps) for name, norm in norms.items()}

    (module,) = model.draft.modules
    layer = dataclasses.replace(module.layer, **without(module.layer, "input_norm", "post_norm"))
    return with_draft(model, layer=layer, **without(module, "norm_embedding", "norm_hidden", "norm"))


FAULTS = {
    "mtp.fc halves swapped": swapped_fc,
    "norms without 1+": norms_without_one,
    "mtp.fc FP8 without a scale": fc_as_fp8_without_a_scale,
}
