"""A model whose linear layers can be differentiated through, and which say what their rounding to FP8 is worth.

The layers, norms and caches are the model's own code, run on copies of its few plain tensors: tensors made in inference
mode cannot be kept for a backward pass. Only the packed linear layers, which are no autograd operators, are
exchanged, each for one that keeps e = (the layer in FP8)(x) − (the layer)(x) at the same x, rounding of x included, and
adds ⟨gradient of the output, e⟩ to a recorder in every backward pass. Knows nothing of what is differentiated.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtplab.errors import ConfigError
from mtplab.models.build import Target
from mtplab.models.head import DraftModule, Head
from mtplab.models.layers import DecoderLayer
from mtplab.models.model import Model
from mtplab.models.norm import RMSNorm
from mtplab.models.spec import MixtureSpec, MlaSpec
from mtplab.models.variant import exchanged
from mtplab.quant.experts import Experts
from mtplab.quant.linear import PackedLinear

__all__ = ["Recorder", "probed"]


class Recorder:
    """Inner products ⟨∂objective/∂output, e⟩ by module and text, of the backward pass since the last `take`.

    `owner` [m] int64 says which text each row belongs to; it is set before a forward pass, and again before layers
    that work on fewer rows. `share` 0 runs the model as it is; another one adds that much of each e to the output it
    belongs to, the e of the last pass with 0.
    """

    def __init__(self) -> None:
        self.owner: Tensor | None = None
        self.share = 0.0
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, owner: Tensor, grad: Tensor, error: Tensor) -> None:
        """grad, error [m, n] of a module's output, and whose its rows are."""
        texts = int(owner[-1]) + 1
        rows = torch.bmm(grad.float().unsqueeze(1), error.float().unsqueeze(2)).flatten().double()
        into = self._found.setdefault(name, torch.zeros(texts, dtype=torch.float64, device=grad.device))
        into.index_add_(0, owner, rows)

    def take(self) -> dict[str, Tensor]:
        """Module → [texts] float64; forgotten here."""
        found, self._found = self._found, {}
        return found


class _Probe(PackedLinear):
    """A packed linear layer and the same in FP8: the first one's outputs, differentiable."""

    def __init__(self, plain: PackedLinear, quantised: PackedLinear, recorder: Recorder):
        self.names = plain.names
        self._plain, self._recorder = plain, recorder
        self._quantised = None if quantised is plain else quantised
        self._errors: list[Tensor] | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [m, k] → one tensor [m, n_i] per member."""
        # behind an embedding nothing asks for a gradient yet
        return _Product.apply(x if x.requires_grad else x.detach().requires_grad_(), self)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [m, n] + the only member's product."""
        (out,) = self(x)
        return residual + out

    @property
    def owner(self) -> Tensor:
        """Whose the rows of the pass are."""
        assert self._recorder.owner is not None, "owner is set before a pass"
        return self._recorder.owner

    def outputs(self, x: Tensor) -> tuple[list[Tensor], list[Tensor] | None]:
        """The members' outputs, and e of each; None where FP8 treats the layer no differently."""
        with torch.inference_mode():
            found = self._plain(x)
            if self._quantised is not None and not self._recorder.share:
                self._errors = [b - a for a, b in zip(found, self._quantised(x), strict=True)]
            elif self._errors is not None:
                found = tuple(a.add(e, alpha=self._recorder.share) for a, e in zip(found, self._errors, strict=True))
        # autograd takes no tensor of inference mode, and an output that is changed in place must be no view
        return [out.clone() for out in found], self._errors

    def gradient(self, grads: tuple[Tensor, ...], errors: list[Tensor] | None, owner: Tensor) -> Tensor:
        """Of the input, from those of the outputs; what they say of e is recorded."""
        with torch.inference_mode():
            for name, grad, error in zip(self.names, grads, errors or (), strict=False):
                self._recorder.add(name, owner, grad, error)
            parts = [grad @ weight for grad, weight in zip(grads, self._plain.weights(), strict=True)]
            total = sum(parts[1:], parts[0])
        return total.clone()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: _Probe) -> tuple[Tensor, ...]:
        ctx.probe, ctx.owner = probe, probe.owner
        found, ctx.errors = probe.outputs(x)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.probe.gradient(grads, ctx.errors, ctx.owner), None


def probed(model: Model, quantised: Model) -> tuple[Target, Head | None, Recorder]:
    """`model`'s target and head, differentiable, and what records each module's ⟨gradient, e⟩.

    Args:
        quantised: the same model with modules in FP8 (`with_exclusions`); those that both treat alike record nothing.

    Passes must be those that read a prompt, with exact=False and a cache that is not quantised: the others work in
    place. A module read twice in one backward pass (a head's, at two depths) adds up.
    """
    if any(isinstance(layer.mixer, MlaSpec) for layer in (*model.config.layers, *model.config.draft_layers)):
        raise ConfigError(
            "latent attention has no estimate from gradients here, for kv_b_proj multiplies no row: measure its "
            "modules, without --estimate or with_estimate"
        )
    recorder = Recorder()
    pairs = dict(zip(map(id, _linears(model)), _linears(quantised), strict=True))

    def swap(packed: PackedLinear) -> PackedLinear:
        return _Probe(packed, pairs[id(packed)], recorder)

    target, draft = exchanged(model, swap, _no_experts)
    target = replace(target, layers=[_plain_layer(layer) for layer in target.layers], norm=_plain(target.norm))
    if draft is not None:
        draft = replace(draft, modules=[_plain_module(module) for module in draft.modules])
    return target, draft, recorder


def _no_experts(experts: Experts, spec: MixtureSpec) -> Experts:
    # their rows are not the pass's rows, and whose each is would have to follow them
    raise ConfigError(
        "a mixture of experts has no estimate from gradients here: measure its modules, without --estimate or "
        "with_estimate"
    )


def _linears(model: Model) -> list[PackedLinear]:
    return [*model.target.linears(), *(model.draft.linears() if model.draft is not None else ())]


def _plain_module(module: DraftModule) -> DraftModule:
    norms = {name: _plain(getattr(module, name)) for name in ("norm_embedding", "norm_hidden", "norm")}
    return replace(module, layer=_plain_layer(module.layer), **norms)


def _plain_layer(layer: DecoderLayer) -> DecoderLayer:
    return replace(
        layer, input_norm=_plain(layer.input_norm), mixer=_plain(layer.mixer), post_norm=_plain(layer.post_norm)
    )


def _plain(part: Any) -> Any:
    """A copy whose tensors, and those of its norms, autograd may keep."""
    made = copy.copy(part)
    for name, value in vars(part).items():
        if isinstance(value, Tensor):
            setattr(made, name, value.clone())
        elif isinstance(value, RMSNorm):
            setattr(made, name, _plain(value))
    return made
