"""What a caller asks of a load, as validated configs, what those ask of a plan, and what a family gives unasked.

Imports no torch: what a load will cost is worked out from the same arguments without it, and sweeps are planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mtplab.checkpoint import Checkpoint
from mtplab.config import EngineConfig, SpecConfig
from mtplab.errors import CheckpointError, ConfigError
from mtplab.models.families import family_of
from mtplab.quant.policy import QuantPolicy, resolve_policy

__all__ = ["as_served", "check_exclusions", "load_settings", "plan_arguments"]


def load_settings(
    device: Any = "cpu",
    dtype: Any = None,
    exclude: str | list[str] | None = None,
    draft_exclude: str | list[str] | None = None,
    quant_policy: str | int | QuantPolicy = "none",
    draft_quant_policy: str | int | QuantPolicy | None = None,
    model_format: str | None = None,
    activation_rounding: bool = True,
    exact: bool = True,
    layers: str | Iterable[int] | None = None,
) -> tuple[EngineConfig, SpecConfig]:
    """Configs of target and draft from the arguments of `load_model`. Raises ConfigError."""
    engine = EngineConfig.of(
        device=str(device),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        exclude=exclude,
        model_format=model_format,
        quant_policy=resolve_policy(quant_policy).name,
        activation_rounding=activation_rounding,
        exact=exact,
        layers=layers,
    )
    spec = SpecConfig.from_target(
        engine,
        exclude=draft_exclude,
        quant_policy=None if draft_quant_policy is None else resolve_policy(draft_quant_policy).name,
    )
    return engine, spec


def check_exclusions(checkpoint: Checkpoint, engine: EngineConfig, spec: SpecConfig) -> None:
    """An exclusion list with nothing to exclude from would quietly do nothing. Raises ConfigError."""
    asked = next((e for e in (engine.exclude, spec.exclude) if e not in (None, "published")), None)
    if asked is not None and checkpoint.quantization is None and not (engine.model_format or spec.model_format):
        raise ConfigError(
            f"exclude is {asked!r}, but {checkpoint.path} is not quantised and nothing would be kept from FP8; add "
            "model_format='fp8', or leave exclude out"
        )


def plan_arguments(engine: EngineConfig, spec: SpecConfig) -> dict:
    """The plan's arguments: one weight format, and exclusions that keep the other part out of it where they differ."""
    exclude, draft_exclude = engine.exclude, spec.exclude
    if engine.model_format and not spec.model_format:
        draft_exclude = ("*",)  # all of the head's modules, whatever they are called
    elif spec.model_format and not engine.model_format:
        # an exclusion list not given to the draft would fall back on the target's
        exclude, draft_exclude = ("*",), draft_exclude or "published"
    return {
        "exclude": exclude,
        "draft_exclude": draft_exclude,
        "model_format": engine.model_format or spec.model_format,
    }


def as_served(spec: SpecConfig, config: dict[str, Any]) -> SpecConfig:
    """`spec` with the hidden states that the family of this config.json is served with, where it names none. Of a
    family that is not run here, those of most: after the norms."""
    try:
        family = family_of(config)[0]
        stages = {"target_hidden": family.target_hidden, "draft_hidden": family.draft_hidden}
    except CheckpointError:
        stages = dict.fromkeys(("target_hidden", "draft_hidden"), "post_norm")
    return spec.model_copy(update={name: getattr(spec, name) or stage for name, stage in stages.items()})
