"""Where an FP8 cache's scales come from: the checkpoint, or the largest K and V over calibration texts.

A calibrated scale is amax over the format's largest number (448 for E4M3), per layer or per KV head, of what texts put
into an unquantised cache. They are read as a run reads its prompts, so the draft's scales are those of what it reads of
this target. They are given, never the run's own prompts unasked. Knows nothing of how rows are encoded.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from mtplab.config import SamplingConfig, SpecConfig
from mtplab.decode.runner import Run
from mtplab.decode.threads import on_device
from mtplab.errors import ConfigError
from mtplab.models import Model
from mtplab.models.cache import KVCache
from mtplab.models.cache_fit import check_policy
from mtplab.models.kv_scales import checkpoint_scales
from mtplab.quant.policy import QuantPolicy, resolve_policy

__all__ = ["bound"]

Stages = tuple[str | None, str | None]  # what the draft reads of the target and of itself, as `SpecConfig` has them

_BATCH = 16
_TOP = {"fp8_e4m3": torch.finfo(torch.float8_e4m3fn).max, "fp8_e5m2": torch.finfo(torch.float8_e5m2).max}
# by model, for as long as there is one: what texts gave
_SEEN: weakref.WeakKeyDictionary[Model, dict] = weakref.WeakKeyDictionary()


def bound(
    model: Model,
    policy: QuantPolicy,
    part: str = "target",
    calibration: Sequence[Sequence[int]] | None = None,
    hidden: Stages = (None, None),
) -> QuantPolicy:
    """The policy with the scales it needs for this model's "target" or "draft"; the policy itself where it needs none.

    `calibration`: texts as token ids; `hidden`: what the draft reads of the target and of itself while they are read.
    Raises ConfigError for a policy that does not fit the model, for texts that are not there or too long, and for a
    checkpoint that lacks scales.
    """
    check_policy(model.config, policy, part)
    if not any(side.scales for side in policy.sides):
        return policy
    # a row that is key and value at once has one scale, K's
    sides = [
        _of_side(model, policy, part, which, calibration, hidden) for which in range(1 if model.config.one_row else 2)
    ]
    layers = {layer for side in sides for layer in side}
    return policy.with_scales({layer: (sides[0].get(layer), sides[-1].get(layer)) for layer in layers})


def _of_side(model, policy: QuantPolicy, part: str, which: int, texts, hidden: Stages) -> dict[int, Tensor]:
    side = policy.sides[which]
    if side.scales is None:
        return {}
    if side.scales == "checkpoint":
        return checkpoint_scales(model, policy, part, which)
    if not texts:
        raise ConfigError(
            f"quant_policy {policy.name} is calibrated on texts, and none are given; give calibration= (strings, or "
            "lists of token ids), such as prompts that are not those of the run"
        )
    found = {}
    for layer, most in _largest(model, part, texts, hidden).items():
        amax = most[which] if side.scales == "calibrated-head" else most[which].amax(keepdim=True)
        # a head that is always zero, or so small that its scale is, loses nothing at scale 1
        scale = amax / torch.full_like(amax, _TOP[side.storage.name])
        found[layer] = scale.where(scale > 0, torch.ones_like(amax))
    return found


def _largest(model: Model, part: str, texts: Sequence[Sequence[int]], hidden: Stages) -> dict[int, Tensor]:
    """The largest |K| and |V| of each head by layer, [sides, h_kv] float32."""
    key = (tuple(map(tuple, texts)), hidden)
    seen = _SEEN.setdefault(model, {})
    if key not in seen:
        seen.clear()  # the last ones are what is asked for again
        seen[key] = _measured(model, key[0], hidden)
    return seen[key][part]


@torch.inference_mode()
def _measured(model: Model, texts: Sequence[Sequence[int]], hidden: Stages) -> dict[str, dict[int, Tensor]]:
    room = model.config.max_position - 1
    long = next((i for i, text in enumerate(texts) if len(text) > room), None)
    if long is not None:
        raise ConfigError(f"calibration text {long} has {len(texts[long])} tokens; expected at most {room}. Cut it")
    plain = resolve_policy("none")
    # to the last layer of a head that has one per depth, whose last slots are read with a token that is none of theirs
    spec = SpecConfig(
        depth=0 if model.draft is None else model.config.mtp_layers, target_hidden=hidden[0], draft_hidden=hidden[1]
    )
    once = SamplingConfig(max_new_tokens=1)
    found: dict[str, dict[int, Tensor]] = {"target": {}, "draft": {}}
    with on_device(model.device):
        for first in range(0, len(texts), _BATCH):
            batch = [list(text) for text in texts[first : first + _BATCH]]
            run = Run(model, batch, spec, once, plain, plain, model.can_be_exact)
            run.prefill()
            caches = {"target": dict(enumerate(run.state.target)), "draft": dict(enumerate(run.state.draft))}
            for part, layers in caches.items():
                for layer, cache in layers.items():
                    if isinstance(cache, KVCache):
                        # slots that hold nothing are zero
                        most = cache.codes.abs().amax(dim=(1, 3, 4)).float()
                        before = found[part].get(layer)
                        found[part][layer] = most if before is None else torch.maximum(before, most)
    for part in found.values():
        for layer, most in part.items():
            if not most.isfinite().all():
                raise ConfigError(f"calibration found {most.tolist()} in layer {layer}; expected finite numbers")
    return found
