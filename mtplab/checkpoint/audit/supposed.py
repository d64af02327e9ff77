"""The audit of a checkpoint that is not written yet: this one, quantised again under another exclusion list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mtplab.checkpoint.audit.audit import Audit
from mtplab.checkpoint.audit.engines import engine_findings, views_of
from mtplab.checkpoint.audit.finding import ordered
from mtplab.checkpoint.audit.heads import find_head
from mtplab.checkpoint.lenses import look, recommended_exclusions
from mtplab.checkpoint.plan import ModulePlan, Plan

if TYPE_CHECKING:
    from mtplab.checkpoint.checkpoint import Checkpoint

__all__ = ["rewritten"]


def rewritten(ckpt: Checkpoint, exclude: str | Sequence[str] | None = None) -> Audit:
    """What an audit would say of `mtplab quantize`'s output for this source and these exclusions: block FP8.

    Of a BF16 checkpoint the linear weights that are not excluded become FP8; of an FP8 one those that are excluded
    become BF16, and the rest stays. Sizes, engines and their findings; what only files can show is not known.
    Raises as `Checkpoint.plan` does.
    """
    if ckpt.quantization is None:
        modules = tuple(map(_quantised, ckpt.plan(exclude, model_format="fp8").modules))
    else:
        rounded = {module.name for module in ckpt.plan().modules if module.activation == "fp8"}
        modules = tuple(
            _dequantised(module) if module.name in rounded and module.activation == "none" else module
            for module in ckpt.plan(exclude).modules
        )
    views = views_of(modules)
    content = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": recommended_exclusions(views, "fp8"),
    }
    looks = look(views, "fp8", content, ckpt.config)
    plan = Plan(modules)
    return Audit(
        path=ckpt.path,
        method="fp8, as it would be written",
        plan=plan,
        head=find_head(modules, ckpt.config),
        findings=ordered(engine_findings(looks)),
        looks=looks,
        deep=False,
        files=len(ckpt.files.shards),
        tensors=len(ckpt.tensors),
    )


def _quantised(module: ModulePlan) -> ModulePlan:
    if module.weight != "fp8" or module.scale is not None:
        return module
    return replace(module, stored="F8_E4M3", nbytes=module.loaded_nbytes)


def _dequantised(module: ModulePlan) -> ModulePlan:
    nbytes = 2 * math.prod(module.shape)
    return replace(module, stored="BF16", weight="bf16", nbytes=nbytes, scale=None, block=None)
