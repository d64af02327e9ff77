"""Settings of a run, validated when made and never changed after.

Knows nothing of torch, files or names on disk: a setting that can be wrong only in the light of a checkpoint (an
exclusion that matches nothing) is checked where the checkpoint is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mtplab.errors import ConfigError

MAX_DEPTH = 16
DTYPES = ("bfloat16", "float16", "float32")  # that a run computes in

Exclude = str | tuple[str, ...] | None
HiddenStage = Literal["post_norm", "pre_norm"]


def number_list(text: str, most: int = 1000) -> tuple[int, ...]:
    """`0-8`, `1,3,5` or `0,2-4` as whole numbers up to `most`. Raises ConfigError naming the part that is none."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise ConfigError(f"{part.strip()!r:.60} is not a number or a range of them; expected e.g. 0-8 or 1,3,5")
        low, high = (int(number) if len(number) < 10 else most + 1 for number in (first, last if dash else first))
        if high < low:
            raise ConfigError(f"{part.strip()!r:.60} runs backwards")
        if high > most:
            raise ConfigError(f"{part.strip()!r:.60} is more than {most}")
        found += range(low, high + 1)
    return tuple(found)


class FrozenConfig(BaseModel):
    """Base of the settings: unknown names, NaN and infinity are refused, and nothing is changed after."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Like the constructor, but a fault is a ConfigError naming the setting, its value and what was expected."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(cls.faults(error)) from None

    @classmethod
    def faults(cls, error: ValidationError) -> str:
        """What is wrong with settings, each by its name."""
        return "; ".join(
            f"{'.'.join(map(str, e['loc'])) or cls.__name__} is {_short(e['input'])}: {_sentence(e['msg'])}"
            for e in error.errors(include_url=False)
        )


def exclude_label(exclude: str | Iterable[str] | None, quantised: bool = False) -> str:
    """An exclusion set's short name: a preset's name or the globs; for None `published` where weights are FP8, else
    `as stored`."""
    if exclude is None:
        return "published" if quantised else "as stored"
    return exclude if isinstance(exclude, str) else ", ".join(exclude) or "none"


def _sentence(message: str) -> str:
    return message.removeprefix("Value error, ")[:1].lower() + message.removeprefix("Value error, ")[1:]


def _short(value: Any) -> str:
    text = re.sub(r"://[^/@\s]*@", "://…@", repr(value))  # who signs in with what is nobody's business
    return text if len(text) <= 60 else text[:57] + "..."


class EngineConfig(FrozenConfig):
    """How the target is loaded."""

    device: str = "cpu"
    dtype: str | None = None
    exclude: Exclude = None
    model_format: Literal["fp8"] | None = None
    quant_policy: str = "none"
    activation_rounding: bool = True
    exact: bool = True
    layers: tuple[int, ...] | None = None  # of the target, as names on disk count them; None for all

    @field_validator("layers", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = number_list(value, 10_000)
        if value is None:
            return None
        found = tuple(value) if isinstance(value, Iterable) else ()
        if not found or any(type(each) is not int or each < 0 for each in found):
            raise ValueError("expected numbers of layers, such as '0-3' or range(4)")
        return tuple(sorted(set(found)))

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"cpu(:0)?|cuda(:[0-9]{1,3})?", value):
            raise ValueError("expected 'cpu', 'cuda' or 'cuda:N'")
        return value

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str | None) -> str | None:
        if value not in (None, *DTYPES):
            raise ValueError(f"expected one of {', '.join(DTYPES)}")
        return value

    @field_validator("exclude", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, (list, set, frozenset)) else value


class SpecConfig(FrozenConfig):
    """How the draft is loaded and used. What is not given follows the target (`from_target`); a `quant_policy` of None
    is the target's of each run, a hidden stage of None the one that the family is served with (`models/asked.py`)."""

    exclude: Exclude = None
    model_format: Literal["fp8"] | None = None
    quant_policy: str | None = None
    depth: int = Field(default=3, ge=0, le=MAX_DEPTH, strict=True)
    draft_sampling: Literal["greedy", "sampled"] = "greedy"
    target_hidden: HiddenStage | None = None
    draft_hidden: HiddenStage | None = None

    _as_tuple = field_validator("exclude", mode="before")(EngineConfig._as_tuple.__func__)

    @classmethod
    def from_target(cls, engine: EngineConfig, **overrides: Any) -> SpecConfig:
        """The draft's settings: the target's weight format and exclusions, unless overridden.

        An override of None means "as the target".
        """
        inherited = {key: getattr(engine, key) for key in ("exclude", "model_format")}
        return cls.of(**inherited | {key: value for key, value in overrides.items() if value is not None})


class SamplingConfig(FrozenConfig):
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = Field(default=0.0, ge=0.0)
    top_k: int = Field(default=0, ge=0, strict=True)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**63, strict=True)
    max_new_tokens: int = Field(default=128, ge=1, strict=True)
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0
