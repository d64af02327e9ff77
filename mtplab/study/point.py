"""A point of a sweep: its resolved configuration, and the hash that names its file.

This module does not run points and does not keep results. Depth is no part of a point: every depth shares its
file. Labels (a folder's name, `published` for a list of globs) are no part either: two ways to name a checkpoint or
an exclusion resolve to one point. What is: the checkpoint's content, what the plan makes of every module, the settings
that reach the arithmetic or the sampling, and the prompts' token ids. Settings that cannot matter are set to one value,
so that one run has one hash: what sampling would use at temperature 0, exactness where there is none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mtplab.config import SamplingConfig

__all__ = [
    "DRAFT_SETTINGS",
    "EngineFacts",
    "POINT_SCHEMA",
    "QUALITY_SCHEMA",
    "TEXT_SEED",
    "PointConfig",
    "canonical_json",
    "digest_of",
    "excluded_modules",
    "plan_digest",
]

# raise it when the same settings would give other numbers, so that old results are not taken for new ones
POINT_SCHEMA = 1

# likewise for what is measured of targets; the seed is that of the texts which references write
QUALITY_SCHEMA = 1
TEXT_SEED = 0
_ARITHMETIC = {"exact", "device", "dtype"}

# fields that came later, None in all points before
_LATER = ("calibration", "engine")

# of `SpecConfig`, what a run is told beside the depth and the cache policy
DRAFT_SETTINGS = ("draft_sampling", "target_hidden", "draft_hidden")
# what `generate` takes of a point, under the same names there
_RUN = (*SamplingConfig.model_fields, *DRAFT_SETTINGS, "quant_policy", "draft_quant_policy", "exact")

# what leaves the target alone, and what `target_plan` says better
_DRAFT_ONLY = {"method", "plan", "excluded", "draft_excluded", "model_format", "draft_quant_policy", "domains"} | {
    "draft_sampling",
    "draft_hidden",
}


class EngineFacts(BaseModel):
    """The serving engine of a point: None is not known, as all of an attached server but its name. `arguments` are what
    it is started with beyond the settings, of paths the last part; `options` digests these whole, the words that start
    it and the content of a file that it is given. Its version is no part of it: what is planned here may run on another
    machine, and a row says which version gave it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str
    concurrency: int
    tp: int | None = None
    ep: int | None = None
    dp: int | None = None
    arguments: tuple[str, ...] | None = None
    options: str | None = None


class PointConfig(BaseModel):
    """Everything that decides a point's numbers at a given depth, resolved.

    `plan` digests (module, weight, activation) over all modules, `excluded` and `draft_excluded` are the
    linear modules that the plan keeps out of W8A8, by their names on disk. `calibration` holds the ids of the texts
    that calibrated cache policies take their scales from, None where neither policy is. `engine` is None for mtplab's
    own runner. `device` is a kind (`cpu`,
    `cuda`), not an index, `dtype` what is computed in. `prompts` and `domains` run in parallel.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    point_schema: Literal[1] = POINT_SCHEMA
    method: Literal["run", "trace"] = "run"
    checkpoint: str
    plan: str
    excluded: tuple[str, ...]
    draft_excluded: tuple[str, ...]
    model_format: str | None
    activation_rounding: bool
    exact: bool
    device: str
    dtype: str
    quant_policy: str
    draft_quant_policy: str
    temperature: Annotated[float, Field(ge=0.0)]
    top_k: Annotated[int, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    seed: int
    draft_sampling: Literal["greedy", "sampled"]
    target_hidden: Literal["post_norm", "pre_norm"]
    draft_hidden: Literal["post_norm", "pre_norm"]
    max_new_tokens: Annotated[int, Field(ge=1)]
    ignore_eos: bool
    prompts: tuple[tuple[int, ...], ...]
    domains: tuple[str, ...]
    calibration: tuple[tuple[int, ...], ...] | None = None
    engine: EngineFacts | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, given: Any) -> Any:
        """Settings that this run does not look at, as they are when nobody gives them."""
        if not isinstance(given, dict):
            return given
        idle: dict[str, Any] = {}
        if given.get("temperature") == 0:
            idle |= {"top_k": 0, "top_p": 1.0, "seed": 0, "draft_sampling": "greedy"}
        if (given.get("device"), given.get("dtype")) != ("cpu", "float32"):
            idle["exact"] = False  # as `Model.can_be_exact` has it
        if not any(_calibrated(given.get(name)) for name in ("quant_policy", "draft_quant_policy")):
            idle["calibration"] = None
        return {**given, **idle}

    @model_validator(mode="after")
    def _parallel(self) -> PointConfig:
        if len(self.prompts) != len(self.domains) or not self.prompts:
            raise ValueError(f"{len(self.prompts)} prompts and {len(self.domains)} domains")
        return self

    def canonical(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return canonical_json(_without_idle(self.model_dump(mode="json")))

    def hash(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits."""
        return _sha256(self.canonical())

    def run_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `generate` beside the model, the prompts and the depth."""
        texts = {} if self.calibration is None else {"calibration": [list(ids) for ids in self.calibration]}
        return {name: getattr(self, name) for name in _RUN} | texts

    def sampling(self) -> SamplingConfig:
        """How tokens are chosen."""
        return SamplingConfig.of(**{name: getattr(self, name) for name in SamplingConfig.model_fields})

    def target_hash(self, target_plan: str) -> str:
        """SHA-256 of what decides the target's output and what a draft reads of it: points that agree on it differ in
        their drafts only. `target_plan` digests what the plan makes of every module but the draft's."""
        own = set() if _calibrated(self.quant_policy) else {"calibration"}
        deciding = _without_idle(self.model_dump(mode="json", exclude=_DRAFT_ONLY | own)) | {"target_plan": target_plan}
        return digest_of(deciding)

    def texts_hash(self, reference: str) -> str:
        """SHA-256 of what decides the texts that an unquantised checkpoint of this content hash writes from the
        point's prompts. Neither the temperature nor the cache of the point does."""
        deciding = self.model_dump(mode="json", include={*_ARITHMETIC, "prompts", "max_new_tokens"})
        facts = deciding | {"quality_schema": QUALITY_SCHEMA, "seed": TEXT_SEED, "reference": reference}
        return digest_of(facts)

    def quality_hash(self, target_plan: str, texts: str | None) -> str:
        """SHA-256 of what decides the target's quality: the target, its cache, and the reference's texts (their
        hash), or the prompts where there is no reference."""
        include = {*_ARITHMETIC, "checkpoint", "activation_rounding", "quant_policy", "prompts"}
        calibrated = {"calibration"} if _calibrated(self.quant_policy) else set()
        facts = self.model_dump(mode="json", include=include | calibrated)
        facts |= {"quality_schema": QUALITY_SCHEMA, "target_plan": target_plan, "texts": texts}
        return digest_of(facts)

    def settings(self) -> dict[str, Any]:
        """The config without the long lists, for a row's provenance (JSON-ready); of the prompts' ids a SHA-256, by
        which rows of two files are known to be over the same prompts."""
        long = {"prompts", "domains", "excluded", "draft_excluded", "calibration"}
        ids = digest_of(self.prompts)
        found = _without_idle(self.model_dump(mode="json", exclude=long) | {"prompt_digest": ids})
        if self.calibration is not None:
            texts = digest_of(self.calibration)
            found["calibration"] = f"{len(self.calibration)} texts, {texts}"
        return found


def _calibrated(policy: Any) -> bool:
    """Whether a policy's name asks for calibrated scales; what is no name is refused elsewhere."""
    return isinstance(policy, str) and ":calibrated" in policy


def _without_idle(dumped: dict[str, Any]) -> dict[str, Any]:
    """Calibration and engine are left out where there is none, so that points from before there was any keep their
    hash."""
    return {name: value for name, value in dumped.items() if name not in _LATER or value is not None}


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_of(value: Any) -> str:
    """SHA-256 of a value's canonical JSON, 64 hex digits."""
    return _sha256(canonical_json(value))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def plan_digest(modules: Iterable[Any]) -> str:
    """SHA-256 over what the plan makes of every module; the rule that led there does not count."""
    facts = sorted((m.name, m.part, m.weight, m.activation, list(m.shape)) for m in modules)
    return digest_of(facts)


def excluded_modules(modules: Iterable[Any], part: str) -> tuple[str, ...]:
    """Names on disk of the linear modules of `part` that do not run as W8A8, sorted.

    `part` is "draft" or "target"; the shared head counts as the target's.
    """
    mine = {"draft"} if part == "draft" else {"target", "head"}
    return tuple(
        sorted(
            m.name
            for m in modules
            if m.part in mine and m.multiplies and not (m.weight == "fp8" and m.activation == "fp8")
        )
    )
