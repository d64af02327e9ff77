"""From what the user asks for to the units of a sweep: axes checked, names resolved, points hashed.

This module loads no weights and runs nothing: it reads headers, plans and the tokenizer. So a sweep whose
points are all on disk is read back without a model, and without torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.errors import ConfigError
from mtplab.quant.policy import resolve_policy
from mtplab.study.identity import checkpoint_folder, checkpoint_identity
from mtplab.study.point import PointConfig, excluded_modules, plan_digest
from mtplab.study.producer import Labels
from mtplab.study.prompts import PromptSet, load_prompts, tokenizer_encoder
from mtplab.study.worker import Unit, Variant

__all__ = ["MAX_DEPTH", "Settings", "build_units", "check_depths", "exclude_label", "prompt_sets"]

MAX_DEPTH = 16
AS_STORED = "as stored"
PRESETS = ("published", "none")


@dataclass(frozen=True)
class Settings:
    """What is the same for every point of a sweep; checked by `check`."""

    device: str
    dtype: Any
    model_format: str | None
    activation_rounding: bool
    exact: bool
    top_k: int
    top_p: float
    seed: int
    max_new_tokens: int
    draft_sampling: str
    hidden: str

    def check(self) -> None:
        """Raises `ConfigError` naming the setting, what it is and what it may be."""
        _whole("top_k", self.top_k, 0, None)
        _whole("seed", self.seed, None, None)
        _whole("max_new_tokens", self.max_new_tokens, 1, None)
        if not isinstance(self.top_p, int | float) or isinstance(self.top_p, bool) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p!r}; expected a number above 0 and at most 1")
        for name, value, known in (
            ("draft_sampling", self.draft_sampling, ("greedy", "sampled")),
            ("hidden", self.hidden, ("post_norm", "pre_norm")),
            ("model_format", self.model_format, (None, "fp8")),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(map(str, known))}")


def check_depths(depths: Any) -> tuple[int, ...]:
    """Sorted, distinct depths, each 0…16. Raises `ConfigError` otherwise."""
    if isinstance(depths, int):
        depths = [depths]
    if not isinstance(depths, Iterable) or isinstance(depths, str):
        raise ConfigError(f"depths are {depths!r}; expected whole numbers, such as range(0, 9)")
    found = list(depths)
    for depth in found:
        _whole("a depth", depth, 0, MAX_DEPTH)
    if not found:
        raise ConfigError("there is no depth to run; give at least one, such as range(0, 9)")
    return tuple(sorted(set(found)))


def prompt_sets(prompts: Any) -> list[PromptSet]:
    """One set, or one per entry of a mapping label -> prompts."""
    if not isinstance(prompts, dict):
        return [load_prompts(prompts)]
    if not prompts:
        raise ConfigError("the mapping of prompt sets is empty; give at least one")
    return [PromptSet(str(label), load_prompts(value).prompts) for label, value in prompts.items()]


def exclude_label(exclude: Any) -> str:
    """`as stored`, a preset's name, or the globs."""
    if exclude is None:
        return AS_STORED
    return exclude if isinstance(exclude, str) else ", ".join(exclude) or "none"


def build_units(
    checkpoint: Any,
    settings: Settings,
    depths: tuple[int, ...],
    sets: Sequence[PromptSet],
    exclude: Any,
    draft_exclude: Any,
    quant_policy: Any,
    draft_quant_policy: Any,
    temperature: Any,
    loaded: Any = None,
    encode: Callable[[str], list[int]] | None = None,
) -> list[Unit]:
    """The product of all axes, slowest first: exclusions, prompts, temperature, policy, draft's policy.

    Args:
        checkpoint: open; only its headers and plan are used.
        exclude, draft_exclude: sequences of None, a preset, a glob or a list of globs; `draft_exclude` None
            means "as the target's", point by point.
        quant_policy, draft_quant_policy: sequences of names or numbers; `draft_quant_policy` None likewise.
        loaded: a loaded model whose plan stands for `exclude=None`.
        encode: text to ids; by default the tokenizer beside the checkpoint.

    Raises:
        ConfigError, CheckpointError: as found at the edge, before anything runs.
    """
    settings.check()
    identity = checkpoint_identity(checkpoint)
    folder = checkpoint_folder(checkpoint)
    if encode is None and any(p.ids is None for s in sets for p in s.prompts):
        encode = tokenizer_encoder(folder)
    encoded = [(s, s.encoded(encode)) for s in sets]
    policies = _policies("quant_policy", quant_policy)
    draft_policies = None
    if draft_quant_policy is not None:
        draft_policies = _policies("draft_quant_policy", draft_quant_policy)
    temperatures = [_temperature(t) for t in axis("temperature", temperature)]
    units = []
    for target_set, draft_set in _exclusions(exclude, draft_exclude):
        variant, plan = _variant(checkpoint, settings, target_set, draft_set, loaded)
        label = exclude_label(target_set)
        if draft_set is not None and draft_set != target_set:
            label += f" (draft: {exclude_label(draft_set)})"
        for (prompts, ids), degree, policy in itertools.product(encoded, temperatures, policies):
            for draft_policy in draft_policies or [policy]:
                config = PointConfig(
                    checkpoint=identity,
                    plan=plan_digest(plan.modules),
                    excluded=excluded_modules(plan.modules, "target"),
                    draft_excluded=excluded_modules(plan.modules, "draft"),
                    model_format=variant.model_format,
                    activation_rounding=settings.activation_rounding,
                    exact=settings.exact,
                    device=str(settings.device).split(":")[0],
                    dtype=str(settings.dtype or "default").removeprefix("torch."),
                    quant_policy=policy,
                    draft_quant_policy=draft_policy,
                    temperature=degree,
                    top_k=settings.top_k,
                    top_p=float(settings.top_p),
                    seed=settings.seed,
                    draft_sampling=settings.draft_sampling,
                    hidden=settings.hidden,
                    max_new_tokens=settings.max_new_tokens,
                    prompts=ids,
                    domains=tuple(prompt.domain for prompt in prompts.prompts),
                )
                labels = Labels(
                    checkpoint=folder.resolve().name,
                    exclude_label=label,
                    exclude=_as_globs(target_set),
                    draft_exclude=_as_globs(draft_set),
                    prompt_set=prompts.label,
                )
                units.append(Unit(config, variant, labels, depths))
    return units


def axis(name: str, value: Any) -> list[Any]:
    """A list from one value or several. Raises `ConfigError` for an empty one."""
    single = value is None or isinstance(value, str | int | float) or not isinstance(value, Iterable)
    values = [value] if single else list(value)
    if not values:
        raise ConfigError(f"{name} is empty; give at least one value")
    return values


def _exclusions(exclude: Any, draft_exclude: Any) -> list[tuple[Any, Any]]:
    targets = _distinct(_exclusion("exclude", item) for item in axis("exclude", exclude))
    if draft_exclude is None:
        return [(target, None) for target in targets]
    drafts = _distinct(_exclusion("draft_exclude", item) for item in axis("draft_exclude", draft_exclude))
    return list(itertools.product(targets, drafts))


def _exclusion(name: str, item: Any) -> str | tuple[str, ...] | None:
    if item is None or item in PRESETS:
        return item
    globs = (item,) if isinstance(item, str) else tuple(item) if isinstance(item, Iterable) else ()
    if not all(isinstance(glob, str) and glob.strip() for glob in globs) or (not globs and item != []):
        raise ConfigError(
            f"{name} has {item!r}; expected None, one of {', '.join(PRESETS)}, a glob such as 'mtp.*', or a "
            "list of globs"
        )
    return globs or "none"


def _variant(checkpoint: Any, settings: Settings, exclude: Any, draft_exclude: Any, loaded: Any):
    """The weights to load for a pair of exclusion sets, and their plan."""
    model_format = settings.model_format
    as_stored = exclude is None and draft_exclude is None
    if model_format is None and checkpoint.quantization is None and not as_stored:
        # excluding something from FP8 says what the rest is: a BF16 file is quantised as it is loaded
        model_format = "fp8"
    own = loaded is not None and as_stored
    if own:
        plan = loaded.plan
    else:
        plan = checkpoint.plan(
            exclude=list(exclude) if isinstance(exclude, tuple) else exclude,
            draft_exclude=list(draft_exclude) if isinstance(draft_exclude, tuple) else draft_exclude,
            model_format=model_format,
        )
    variant = Variant(
        key=f"{plan_digest(plan.modules)} {settings.device} {settings.dtype} "
        f"{settings.activation_rounding} {settings.exact}",
        path=str(checkpoint.path),
        device=str(settings.device),
        dtype=settings.dtype,
        exclude=exclude,
        draft_exclude=draft_exclude,
        model_format=model_format,
        activation_rounding=settings.activation_rounding,
        exact=settings.exact,
    )
    return variant, plan


def _policies(name: str, value: Any) -> list[str]:
    return _distinct(resolve_policy(item).name for item in axis(name, value))


def _temperature(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"temperature is {value!r}; expected a number, 0 (greedy) or above")
    return float(value) + 0.0  # -0.0 is 0.0


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _as_globs(exclude: Any) -> tuple[str, ...] | None:
    return (exclude,) if isinstance(exclude, str) else exclude


def _whole(name: str, value: Any, least: int | None, most: int | None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    if good and (least is None or value >= least) and (most is None or value <= most):
        return
    bounds = ""
    if least is not None:
        bounds = f" from {least} to {most}" if most is not None else f", {least} or above"
    raise ConfigError(f"{name} is {value!r}; expected a whole number{bounds}")
