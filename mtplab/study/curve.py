"""Tokens a round gives by draft depth, from whatever acceptance somebody has: shares, lengths, a trace, a sweep's rows.

Depths that nobody gave are refused, never extrapolated. Knows no time and no model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtplab.errors import ConfigError
from mtplab.study.fields import has_length

if TYPE_CHECKING:
    from mtplab.study.acceptance import Acceptance

__all__ = ["Curve"]

MOST = 64  # depths
_SETTING = ("checkpoint", "exclude_label", "quant_policy", "draft_quant_policy", "temperature", "prompt_set")
# likewise, and told only where they differ
_ALSO = ("engine", "n_prompts", "max_new_tokens", "model_format", "seed", "top_k", "top_p")


@dataclass(frozen=True)
class Curve:
    """Acceptance length (tokens a round, the bonus counted) by depth; depth 0 gives 1. `source` says whose it is."""

    lengths: Mapping[int, float]
    source: str

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ConfigError("no acceptance: expected a value for at least depth 1")
        for depth, length in self.lengths.items():
            if type(depth) is not int or not 0 <= depth <= MOST:
                raise ConfigError(f"depth {depth!r:.40} of the acceptance: expected a whole number from 0 to {MOST}")
            if not _number(length) or not 1 <= length <= depth + 1 + 1e-9:
                raise ConfigError(
                    f"acceptance length at depth {depth} is {length!r:.40}; expected 1 to {depth + 1}: a round gives "
                    "its accepted drafts and one token more"
                )
        object.__setattr__(self, "lengths", {0: 1.0, **dict(sorted(self.lengths.items()))})

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths that are known, 0 among them."""
        return tuple(sorted(self.lengths))

    def length(self, depth: int) -> float:
        """Tokens a round gives. Raises ConfigError for a depth that was not given."""
        if depth not in self.lengths:
            raise ConfigError(
                f"acceptance at depth {depth} is not known, only at {', '.join(map(str, self.depths))}: measure it, "
                "for what lies beyond is not extrapolated"
            )
        return self.lengths[depth]

    @classmethod
    def of_lengths(cls, lengths: Sequence[float] | Mapping[int, float], source: str = "lengths as given") -> Curve:
        """Acceptance lengths at depths 1, 2, …, or by depth."""
        return cls(dict(lengths) if isinstance(lengths, Mapping) else dict(enumerate(lengths, 1)), source)

    @classmethod
    def of_positions(cls, shares: Sequence[float], source: str = "shares by position as given") -> Curve:
        """Unconditional shares: of the rounds, those in which drafts 1 … j were all accepted (what engines print).

        One list stands for every depth up to its own: that a draft is accepted does not depend on how many follow it.
        """
        found = _shares(shares, "per-position acceptance")
        for at, (before, share) in enumerate(itertools.pairwise(found), 2):
            if share > before + 1e-9:
                raise ConfigError(
                    f"acceptance at position {at} is {share:g}, above {before:g} at {at - 1}; expected shares that do "
                    "not grow (of all rounds, those whose drafts 1 … j were all accepted); give conditional ones as "
                    "such"
                )
        return cls({depth: 1 + math.fsum(found[:depth]) for depth in range(1, len(found) + 1)}, source)

    @classmethod
    def of_conditional(cls, shares: Sequence[float], source: str = "conditional shares as given") -> Curve:
        """Conditional shares: of the rounds that got to draft j, those that accepted it."""
        found = _shares(shares, "conditional acceptance")
        return cls.of_positions([math.prod(found[: j + 1]) for j in range(len(found))], source)

    @classmethod
    def of_rate(cls, rate: float, depths: int) -> Curve:
        """One conditional share for every position up to `depths`: an assumption, for real heads decay."""
        if type(depths) is not int or not 1 <= depths <= MOST:
            raise ConfigError(f"depths is {depths!r:.40}; expected a whole number from 1 to {MOST}")
        return cls.of_conditional(
            [rate] * depths, f"{_shares([rate], 'acceptance rate')[0]:g} assumed at every position"
        )

    @classmethod
    def of_acceptance(cls, acceptance: Acceptance) -> Curve:
        """What `mtplab.trace(…).acceptance()` measured."""
        lengths = {depth: acceptance.length(depth) for depth in acceptance.depths if depth}
        missing = [depth for depth, length in lengths.items() if length is None]
        if missing:
            raise ConfigError(f"the trace has no rounds at depth {missing[0]}; trace more tokens or other prompts")
        said = f"traced on {len(acceptance.trace.prompt_lengths)} prompts"
        return cls(lengths, said + (", approximate: of an output that was given" if acceptance.approximate else ""))

    @classmethod
    def of_rows(cls, rows: Iterable[Any], **wanted: Any) -> Curve:
        """Rows of a sweep, of one setting; `wanted` picks it by field: exclude_label, quant_policy, temperature, …

        Raises ConfigError where no row or more than one setting is left.
        """
        kept = [row for row in rows if has_length(row)]
        kept = [row for row in kept if all(getattr(row, name) == value for name, value in wanted.items())]
        names = (*_SETTING, *_ALSO)
        settings = {tuple(getattr(row, name) for name in names) for row in kept}
        asked = ", ".join(f"{name} {value}" for name, value in wanted.items()) or "any setting"
        if not settings:
            raise ConfigError(f"no finished row of {asked} has rounds; run the sweep with drafts, or ask for another")
        if len(settings) > 1:
            differ = [at for at in range(len(names)) if len({found[at] for found in settings}) > 1]
            said = "; ".join(sorted(", ".join(f"{names[at]} {found[at]}" for at in differ) for found in settings)[:6])
            raise ConfigError(f"rows of {len(settings)} settings are left, expected those of one; choose: {said}")
        found = next(iter(settings))
        lengths: dict[int, float] = {}
        for row in kept:
            # a run and a trace of one setting count the same at temperature 0; what does not is not one setting
            other = lengths.setdefault(row.depth, row.acceptance_length) if row.depth else row.acceptance_length
            if not math.isclose(other, row.acceptance_length, rel_tol=1e-9):
                raise ConfigError(
                    f"two rows of one setting have {other:.4g} and {row.acceptance_length:.4g} tokens a round at depth "
                    f"{row.depth} (they differ in how they were run, or their checkpoints do); give a folder of one"
                )
        if not lengths:
            raise ConfigError("the rows hold depth 0 only; sweep some depths first, for example --depths 0-4")
        return cls(
            lengths, f"measured by a sweep of {found[0]} ({found[1]}, cache {found[2]}, temperature {found[4]:g})"
        )


def _shares(values: Sequence[float], what: str) -> list[float]:
    if not 0 < len(values) <= MOST:
        raise ConfigError(f"{what} has {len(values)} values; expected 1 to {MOST}")
    for at, value in enumerate(values, 1):
        if not _number(value) or not 0 <= value <= 1:
            raise ConfigError(f"{what} at position {at} is {value!r:.40}; expected a share from 0 to 1")
    return [float(value) for value in values]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
