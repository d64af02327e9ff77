"""From what the user asks for to the units of a sweep: axes checked, names resolved, points hashed.

This module loads no weights and runs nothing: it reads headers, plans and the tokenizer. So a sweep whose
points are all on disk is read back without a model, and without torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mtplab.checkpoint.config_json import stored_dtype, text_config
from mtplab.config import MAX_DEPTH, EngineConfig, SamplingConfig, SpecConfig, exclude_label
from mtplab.errors import CheckpointError, ConfigError, not_text, printable
from mtplab.models.asked import as_served
from mtplab.models.cache_fit import check_cache
from mtplab.models.config import config_of
from mtplab.quant.policy import resolve_policy
from mtplab.study.identity import checkpoint_folder, checkpoint_identity
from mtplab.study.point import DRAFT_SETTINGS, PointConfig, excluded_modules, plan_digest
from mtplab.study.producer import Labels
from mtplab.study.prompts import PromptSet, calibration_ids, load_prompts, tokenizer_encoder
from mtplab.study.target_quality import QualityTask
from mtplab.study.worker import Unit, Variant

__all__ = [
    "SERVED",
    "SERVED_DRAFT",
    "Settings",
    "build_units",
    "check_depths",
    "exclusion_remark",
    "policy_axis",
    "prompt_sets",
    "temperature_axis",
    "weight_format",
]

SERVED = "the engine's own"  # device and dtype of what it serves
#: how an engine drafts is its own affair: these settings are one value for all its points
SERVED_DRAFT = {"draft_sampling": "greedy", "target_hidden": "post_norm", "draft_hidden": "post_norm"}
PRESETS = ("published", "none")


@dataclass(frozen=True)
class Settings:
    """What is the same for every point of a sweep, validated by the configs themselves.

    `engine.exclude` and `spec.exclude` are what an exclusion set of None stands for; depth, policies and
    temperature in them are the axes' business and not read.
    """

    engine: EngineConfig
    spec: SpecConfig
    sampling: SamplingConfig


def check_depths(depths: Any) -> tuple[int, ...]:
    """Sorted, distinct depths, each 0…16. Raises `ConfigError` otherwise."""
    if isinstance(depths, int):
        depths = [depths]
    if not isinstance(depths, Iterable) or isinstance(depths, str):
        raise ConfigError(f"depths are {depths!r}; expected whole numbers, such as range(0, 9)")
    found = list(depths)
    for depth in found:
        if not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= MAX_DEPTH:
            raise ConfigError(f"a depth is {depth!r}; expected a whole number from 0 to {MAX_DEPTH}")
    if not found:
        raise ConfigError("there is no depth to run; give at least one, such as range(0, 9)")
    return tuple(sorted(set(found)))


def prompt_sets(prompts: Any) -> list[PromptSet]:
    """One set, or one per entry of a mapping label -> prompts."""
    if not isinstance(prompts, dict):
        return [load_prompts(prompts)]
    if not prompts:
        raise ConfigError("the mapping of prompt sets is empty; give at least one")
    return [PromptSet(printable(str(label)), load_prompts(value).prompts) for label, value in prompts.items()]


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
    encode: Callable[[str], list[int]] | None = None,
    method: Literal["run", "trace"] = "run",
    quality: bool = False,
    reference: Any = None,
    calibration: Any = None,
    served: bool = False,
) -> list[Unit]:
    """The product of all axes, slowest first: exclusions, prompts, temperature, policy, draft's policy.

    Args:
        checkpoint: open; only its headers and plan are used.
        exclude, draft_exclude: sequences of None, a preset, a glob or a list of globs; `draft_exclude` None
            means "as the target's", point by point.
        quant_policy, draft_quant_policy: sequences of names or numbers; `draft_quant_policy` None likewise.
        encode: text to ids; by default the tokenizer beside the checkpoint.
        calibration: texts for calibrated policies, the bundled prompts if None.
        method: what produces the rows; a model without a draft has nothing to trace and is run.
        quality: whether targets are to be judged beside the drafts.
        reference: the open, unquantised checkpoint that they are compared with; None takes `checkpoint` itself where
            it is unquantised, and else there is none.
        served: the points are a serving engine's: what only mtplab's runner is asked for is set to one value, and what
            only it refuses is let through.

    Raises:
        ConfigError, CheckpointError: as found at the edge, before anything runs.
    """
    identity = checkpoint_identity(checkpoint)
    folder = checkpoint_folder(checkpoint)
    if encode is None and any(p.ids is None for s in sets for p in s.prompts):
        encode = tokenizer_encoder(folder)
    encoded = [(s, s.encoded(encode)) for s in sets]
    policies = policy_axis("quant_policy", quant_policy)
    draft_policies = None
    if draft_quant_policy is not None:
        draft_policies = policy_axis("draft_quant_policy", draft_quant_policy)
    if not served:
        check_caches(checkpoint, policies, draft_policies, drafts=any(depths))
    asked = [*policies, *(draft_policies or [])]
    texts = calibration_ids(asked, lambda text: (encode or tokenizer_encoder(folder))(text), calibration)
    temperatures = temperature_axis(temperature)
    engine, sampling = settings.engine, settings.sampling
    spec = as_served(settings.spec, checkpoint.config) if not served else settings.spec.model_copy(update=SERVED_DRAFT)
    judge = _judge(checkpoint, identity, engine, reference) if quality else None
    device = SERVED if served else engine.device.split(":")[0]
    units = []
    for target_set, draft_set in _exclusions(exclude, draft_exclude):
        if target_set is None:  # as the model was loaded, or would be
            target_set = engine.exclude
            if draft_set is None and spec.exclude != engine.exclude:
                draft_set = spec.exclude
        variant, plan = _variant(checkpoint, identity, engine, target_set, draft_set)
        target_plan = plan_digest(module for module in plan.modules if module.part != "draft")
        quantised = variant.model_format is not None or checkpoint.quantization is not None
        label = exclude_label(target_set, quantised)
        if draft_set is not None and draft_set != target_set:
            label += f" (draft: {exclude_label(draft_set, quantised)})"
        remark = None if served else exclusion_remark(checkpoint, plan, target_set, draft_set)
        converts = checkpoint.quantization is None and any(module.weight == "fp8" for module in plan.modules)
        rounds = any(module.activation == "fp8" for module in plan.modules)
        for (prompts, ids), degree, policy in itertools.product(encoded, temperatures, policies):
            for draft_policy in draft_policies or [_following(policy)]:
                config = PointConfig(
                    method=method if any(module.part == "draft" for module in plan.modules) else "run",
                    checkpoint=identity,
                    plan=plan_digest(plan.modules),
                    excluded=excluded_modules(plan.modules, "target"),
                    draft_excluded=excluded_modules(plan.modules, "draft"),
                    # an FP8 checkpoint is FP8 already, a BF16 one stays as stored where all is excluded, and where
                    # nothing is rounded nothing can be left unrounded
                    model_format=variant.model_format if converts else None,
                    activation_rounding=engine.activation_rounding and rounds,
                    exact=engine.exact and not served,
                    device=device,
                    dtype=SERVED if served else _computed_in(engine, checkpoint, device),
                    quant_policy=policy,
                    draft_quant_policy=draft_policy,
                    **(sampling.model_dump() | {"temperature": degree}),
                    **spec.model_dump(include=set(DRAFT_SETTINGS)),
                    prompts=ids,
                    domains=tuple(prompt.domain for prompt in prompts.prompts),
                    calibration=texts,
                )
                labels = Labels(
                    checkpoint=printable(folder.resolve().name),
                    exclude_label=label,
                    exclude=_as_globs(target_set),
                    draft_exclude=_as_globs(draft_set),
                    prompt_set=prompts.label,
                    remark=remark,
                )
                task = None if judge is None else judge(config, target_plan)
                units.append(Unit(config, variant, labels, depths, config.target_hash(target_plan), task))
    return units


def _computed_in(engine: EngineConfig, checkpoint: Any, device: str) -> str:
    return engine.dtype or ("float32" if device == "cpu" else str(stored_dtype(checkpoint.config)))


def _judge(
    checkpoint: Any, identity: str, engine: EngineConfig, reference: Any
) -> Callable[[PointConfig, str], QualityTask]:
    """What a point's target is compared with, and on which text. Raises ConfigError for a reference that is none."""
    if reference is None and checkpoint.quantization is not None:
        note = "no unquantised reference: give the BF16 checkpoint (--reference PATH, reference= in Python)"
        return lambda config, plan: QualityTask(config.quality_hash(plan, None), note=note)
    if reference is not None:
        _check_reference(reference, checkpoint)
        identity = checkpoint_identity(reference)
    plain = engine.model_copy(update={"exclude": None, "model_format": None})
    variant, _ = _variant(reference or checkpoint, identity, plain, None, None)

    def task(config: PointConfig, plan: str) -> QualityTask:
        texts = config.texts_hash(identity)
        return QualityTask(config.quality_hash(plan, texts), texts, variant, identity)

    return task


def _check_reference(reference: Any, checkpoint: Any) -> None:
    path = reference.path
    if reference.quantization is not None:
        raise ConfigError(
            f"the reference {path} is quantised; expected the checkpoint in BF16, F16 or F32 that the other was made "
            "of. Dequantised values hide what quantisation cost"
        )
    theirs, mine = text_config(reference.config), text_config(checkpoint.config)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if theirs.get(key) != mine.get(key):
            raise ConfigError(
                f"the reference {path} has {key} {theirs.get(key)!r:.40}, the checkpoint {mine.get(key)!r:.40}; "
                "expected the same model, unquantised"
            )


def weight_format(checkpoint: Any, model_format: str | None, exclude: Any, draft_exclude: Any = None) -> str | None:
    """The `model_format` to load with: `fp8` for a BF16 checkpoint from which something is to be kept out of FP8.

    Excluding says what the rest is; without it, an exclusion set of a BF16 file would quietly do nothing.
    """
    asked = exclude is not None or draft_exclude is not None
    return "fp8" if model_format is None and asked and checkpoint.quantization is None else model_format


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
    for glob in globs:
        fault = not_text(glob)
        if fault is not None:
            raise ConfigError(f"{name} has {glob!r}, which {fault}")
    return globs or "none"


def _variant(
    checkpoint: Any, identity: str, engine: EngineConfig, exclude: Any, draft_exclude: Any
) -> tuple[Variant, Any]:
    """The weights to load for a pair of exclusion sets, and their plan."""
    model_format = weight_format(checkpoint, engine.model_format, exclude, draft_exclude)
    variant = Variant(
        key="",
        path=str(checkpoint.path),
        device=engine.device,
        dtype=engine.dtype,
        exclude=exclude,
        draft_exclude=draft_exclude,
        model_format=model_format,
        activation_rounding=engine.activation_rounding,
        exact=engine.exact,
    )
    weights = ("exclude", "draft_exclude", "model_format")
    plan = checkpoint.plan(**{k: v for k, v in variant.arguments().items() if k in weights})
    # the checkpoint too: a worker may keep a model from another sweep, of other weights under the same plan
    arithmetic = f"{engine.device} {engine.dtype} {engine.activation_rounding} {engine.exact}"
    return replace(variant, key=f"{identity} {plan_digest(plan.modules)} {arithmetic}"), plan


def exclusion_remark(checkpoint: Any, plan: Any, *exclusions: Any) -> str | None:
    """What an exclusion set cannot do on a checkpoint that is FP8 already."""
    asked = any(exclusion not in (None, "published") for exclusion in exclusions)
    if not asked or checkpoint.quantization is None:
        return None
    kept = sum(m.multiplies and m.weight == "fp8" and m.activation == "none" for m in plan.modules)
    if not kept:
        return None
    return (
        f"the checkpoint is stored in FP8: {kept} excluded linear modules keep their FP8 weights and only lose "
        "activation rounding; start from the BF16 checkpoint to see what FP8 costs them"
    )


def temperature_axis(value: Any) -> list[float]:
    """Distinct temperatures. Raises ConfigError for what is none."""
    return _distinct(_temperature(each) for each in axis("temperature", value))


def policy_axis(name: str, value: Any) -> list[str]:
    """Distinct policies by name. Raises ConfigError for what is none."""
    return _distinct(resolve_policy(item).name for item in axis(name, value))


def _following(policy: str) -> str:
    """What a draft has that is given no policy of its own."""
    return resolve_policy(policy).everywhere.name


def check_caches(checkpoint: Any, policies: list[str], draft_policies: list[str] | None, drafts: bool) -> None:
    """Refuse policies that no run of this model could have, before anything runs. Raises ConfigError."""
    try:
        config = config_of(checkpoint)
    except CheckpointError:
        return  # what is no model of ours says so when it is loaded
    for policy in policies:
        check_cache(checkpoint, config, resolve_policy(policy))
    if drafts and config.mtp_layers:
        for policy in draft_policies or map(_following, policies):
            check_cache(checkpoint, config, resolve_policy(policy), "draft")


def _temperature(value: Any) -> float:
    if isinstance(value, str | bool):
        raise ConfigError(f"temperature is {value!r}; expected a number, 0 (greedy) or above")
    return SamplingConfig.of(temperature=value).temperature + 0.0  # -0.0 is 0.0


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _as_globs(exclude: Any) -> tuple[str, ...] | None:
    return (exclude,) if isinstance(exclude, str) else exclude
