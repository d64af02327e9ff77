"""What a sweep will do, worked out before any of it is done: its units, where rows are kept, what loads or serves.

Reads headers, plans and the tokenizer, and asks attached servers what they are; loads no weights and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplab.config import EngineConfig, SamplingConfig, SpecConfig
from mtplab.engines import Attach, ServerSlot, engine_settings
from mtplab.errors import ConfigError
from mtplab.study.arguments import judges, method_of, opened
from mtplab.study.grid import Settings, build_units, check_depths, prompt_sets
from mtplab.study.identity import checkpoint_folder
from mtplab.study.point import plan_digest
from mtplab.study.served import Served, check_served, serve_units, units_without_checkpoint
from mtplab.study.store import results_folder
from mtplab.study.worker import ModelSlot, Unit

__all__ = ["Planned", "plan_sweep"]

@dataclass(frozen=True)
class Planned:
    """A sweep's units, the folder of its rows, the slot that its models or servers are held in where it runs here, and
    what is to be said beside its rows."""

    units: list[Unit]
    results: Path
    slot: ModelSlot | ServerSlot
    notes: list[str]


def plan_sweep(asked: Any, starts: bool = True) -> Planned:
    """From the arguments of `sweep`, as attributes; `starts`: whether it will be run, and here.

    Raises ConfigError, CheckpointError; with attached servers also MtplabError, where one does not answer.
    """
    depths = check_depths(asked.depths)
    if asked.engine is not None:
        return _on_engine(asked, depths, starts)
    method = method_of(asked.method, asked.generate, depths)
    quality = judges(asked.quality, asked.reference, asked.load_model or asked.generate)
    checkpoint, model = opened(asked.model_or_path)
    units = _units(asked, checkpoint, model, depths, method=method, quality=quality)
    slot = ModelSlot()
    if model is not None:
        own = plan_digest(model.plan.modules)
        key = next((u.variant.key for u in units if u.config.plan == own), None)
        slot = ModelSlot(key, model if key else None)
    return Planned(units, _results(asked, checkpoint_folder(checkpoint).resolve().name), slot, [])


def _on_engine(asked: Any, depths: tuple[int, ...], starts: bool) -> Planned:
    settings = engine_settings(asked.engine)
    check_served(asked)
    if asked.model_or_path is None:
        served = _without_checkpoint(asked, settings, depths)
        results = _results(asked, served.units[0].labels.checkpoint)
        return Planned(served.units, results, ServerSlot(), served.notes)
    checkpoint, model = opened(asked.model_or_path)
    units = _units(asked, checkpoint, model, depths, served=True)
    results = results_folder(_results(asked, checkpoint_folder(checkpoint).resolve().name))
    served = serve_units(units, settings, depths, checkpoint, results, starts)
    return Planned(served.units, results, ServerSlot(), served.notes)


def _without_checkpoint(asked: Any, settings: Any, depths: tuple[int, ...]) -> Served:
    if not isinstance(settings, Attach):
        raise ConfigError(f"engine {settings.engine} is to be started, and there is no checkpoint to give it")
    return units_without_checkpoint(
        settings,
        depths,
        _prompts(asked),
        {"exclude": asked.exclude, "draft_exclude": asked.draft_exclude, "model_format": asked.model_format},
        asked.quant_policy,
        asked.draft_quant_policy,
        asked.temperature,
        _sampling(asked),
    )


def _units(asked: Any, checkpoint: Any, model: Any, depths: tuple[int, ...], **more: Any) -> list[Unit]:
    if model is not None:
        engine, spec = model.engine, model.spec
        if spec.model_format != engine.model_format:
            raise ConfigError(
                f"the loaded model's draft has model_format {spec.model_format}, its target {engine.model_format}; "
                "give the checkpoint's folder, and draft_exclude to keep the draft out of FP8"
            )
    else:
        engine = EngineConfig.of(
            device=str(asked.device),
            dtype=None if asked.dtype is None else str(asked.dtype).removeprefix("torch."),
            model_format=asked.model_format,
            activation_rounding=asked.activation_rounding,
            exact=asked.exact,
        )
        spec = SpecConfig.from_target(engine)
    draft = SpecConfig.from_target(
        engine,
        exclude=spec.exclude,
        draft_sampling=asked.draft_sampling,
        target_hidden=asked.target_hidden,
        draft_hidden=asked.draft_hidden,
    )
    return build_units(
        checkpoint,
        Settings(engine, draft, _sampling(asked)),
        depths,
        _prompts(asked),
        asked.exclude,
        asked.draft_exclude,
        asked.quant_policy,
        asked.draft_quant_policy,
        asked.temperature,
        encode=getattr(model, "encode", None),
        reference=None if asked.reference is None else opened(asked.reference, "reference")[0],
        calibration=asked.calibration,
        **more,
    )


def _prompts(asked: Any) -> list[Any]:
    return [chosen.narrowed(asked.domains, asked.limit) for chosen in prompt_sets(asked.prompts)]


def _sampling(asked: Any) -> SamplingConfig:
    return SamplingConfig.of(
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
        max_new_tokens=asked.max_new_tokens,
        ignore_eos=asked.ignore_eos,
    )


def _results(asked: Any, name: str) -> Path:
    return Path("results") / name if asked.results is None else asked.results
