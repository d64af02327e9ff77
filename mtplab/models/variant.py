"""The same model with other modules kept out of FP8, without loading it again.

What the two plans treat alike is shared, tensors and all; only the packed linear layers that hold a module treated
otherwise are built anew from the checkpoint. Knows nothing of why a module is to be treated otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mtplab.config import EngineConfig, SpecConfig
from mtplab.models.asked import plan_arguments
from mtplab.models.build import Target
from mtplab.models.head import Head
from mtplab.models.model import Model
from mtplab.models.parameters import Parameters
from mtplab.models.part import Swap, SwapExperts
from mtplab.models.spec import MixtureSpec
from mtplab.quant.experts import Experts
from mtplab.quant.linear import PackedLinear

__all__ = ["exchanged", "with_exclusions"]


def with_exclusions(model: Model, exclude: Any, draft_exclude: Any = None, model_format: str | None = None) -> Model:
    """`model` as `load_model` would give it with these exclusions; arguments as there, `draft_exclude` None is
    `exclude`, `model_format` None the model's own.

    The two share every weight that both plans treat alike, and neither may be changed. Raises ConfigError for a pattern
    that covers no module, CheckpointError for a tensor that cannot be quantised.
    """
    chosen = model.engine.model_format if model_format is None else model_format
    engine = EngineConfig.of(**model.engine.model_dump() | {"exclude": exclude, "model_format": chosen})
    own = exclude if draft_exclude is None else draft_exclude
    spec = SpecConfig.of(**model.spec.model_dump() | {"exclude": own, "model_format": chosen})
    plan = model.checkpoint.plan(**plan_arguments(engine, spec))
    swap = _Swap(model, Parameters(model.checkpoint, plan, model.dtype, model.device, engine.activation_rounding))
    with torch.inference_mode():
        target, draft = exchanged(model, swap, swap.experts)
    return replace(model, plan=plan, target=target, draft=draft, engine=engine, spec=spec)


def exchanged(
    model: Model,
    swap: Swap,
    experts: SwapExperts = lambda experts, spec: experts,
) -> tuple[Target, Head | None]:
    """The target and the head with other packed linear layers (and other experts), everything else shared."""
    made: dict[int, PackedLinear] = {}

    def once(packed: PackedLinear) -> PackedLinear:
        # modules of a head may share a layer, and have the target's vocabulary head
        if id(packed) not in made:
            made[id(packed)] = swap(packed)
        return made[id(packed)]

    layers = [each.exchanged(once, experts) for each in model.target.layers]
    target = replace(model.target, layers=layers, head=once(model.target.head))
    if model.draft is None:
        return target, None
    modules = [each.exchanged(once, experts) for each in model.draft.modules]
    return target, replace(model.draft, modules=modules, vocabulary=target.head)


class _Swap:
    """A packed layer as the new plan has it: the same object where that changes none of its members."""

    def __init__(self, model: Model, parameters: Parameters) -> None:
        self._before, self._after, self._parameters = model.plan.by_name, parameters.plan.by_name, parameters
        self._hidden = model.config.hidden_size

    def __call__(self, packed: PackedLinear) -> PackedLinear:
        # a head tied to the embedding is no module of its own
        named = all(name in self._after for name in packed.names)
        if not named or all(_treatment(self._before[n]) == _treatment(self._after[n]) for n in packed.names):
            return packed
        shapes = [self._after[name].shape for name in packed.names]
        members = [(name, shape[0]) for name, shape in zip(packed.names, shapes, strict=True)]
        return self._parameters.linear(members, shapes[0][1])

    def experts(self, experts: Experts, spec: MixtureSpec) -> Experts:
        """A layer's experts as the new plan has them: all of them anew where one changes."""
        if all(_treatment(self._before[name]) == _treatment(self._after[name]) for name in experts.names):
            return experts
        return self._parameters.experts(spec.names.layer_of(experts.names[0]), spec, self._hidden)


def _treatment(module: Any) -> tuple[Any, ...]:
    return module.weight, module.activation, module.scale, module.block, module.activation_group, module.input_scale
