"""What draft depth pays: what a round gives (`curve.py`) against what it takes (`cost.py`), in numbers and sentences.

Everything here but the acceptance is a model's unless its constants were measured, and says so. Knows no figures and no
command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.errors import ConfigError
from mtplab.study.cost import BINDS, RoundCost, Setting, round_cost
from mtplab.study.curve import Curve
from mtplab.study.numbers import percent
from mtplab.study.words import cache_words

__all__ = ["MARGIN", "Advice", "Cell", "DepthLine", "advise", "best_map"]

MARGIN = 1.05  # speeds closer than this are one to the model


@dataclass(frozen=True)
class DepthLine:
    """One depth: tokens a round and sequence, what the round takes, tokens a second of all sequences, speed-up over
    depth 0, and whether weights, caches and states fit."""

    depth: int
    length: float
    cost: RoundCost
    tokens_per_second: float
    speedup: float
    fits: bool

    @property
    def ratio(self) -> float:
        """Rounds of plain decoding that the round takes: what it must give to break even."""
        return self.length / self.speedup


@dataclass(frozen=True)
class Advice:
    """Every known depth at one batch and context."""

    setting: Setting
    curve: Curve
    batch: int
    context: int
    lines: tuple[DepthLine, ...]

    @property
    def best(self) -> DepthLine:
        """The fastest depth among those that fit; depth 0 where none does."""
        return max((line for line in self.lines if line.fits), key=lambda line: line.speedup, default=self.lines[0])

    @property
    def pays(self) -> bool:
        """Whether drafting is faster than plain decoding at all."""
        return self.best.depth > 0

    @property
    def alike(self) -> tuple[int, ...]:
        """Depths that are as fast as the best within `MARGIN`."""
        return tuple(line.depth for line in self.lines if line.fits and line.speedup * MARGIN > self.best.speedup)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The advice in words."""
        s, plain = self.setting, self.lines[0]
        where = f"{s.tp} × {s.gpu.name}" if s.tp > 1 else s.gpu.name
        first = (
            f"{s.sizes.name} with {s.weights.name} weights on {where}, KV cache {cache_words(s.cache)}, batch "
            f"{self.batch}, context {self.context}: plain decoding takes "
            f"{plain.cost.seconds * 1e3:.2f} ms a round, {plain.tokens_per_second:.0f} tokens/s; "
            f"{percent(plain.cost.parts[plain.cost.binds] / plain.cost.seconds)} of it is "
            f"{plain.cost.words(plain.cost.binds)}."
        )
        if not plain.fits:
            need = s.held_bytes(self.batch, self.context, 0) / 1e9
            first += (
                f" It does not fit: each GPU would hold {need:.0f} GB and has {s.gpu.memory}; take more of them, a "
                "smaller batch or context, or smaller weights."
            )
            return (first, self.basis)
        return (first, self._upshot(), self.basis)

    def _upshot(self) -> str:
        plain, drafted = self.lines[0], [line for line in self.lines if line.depth]
        if not drafted:
            return "No depth but 0 is known."
        if not any(line.fits for line in drafted):
            return "No depth above 0 fits: the states and caches of drafts want memory that is not there."
        best = self.best if self.pays else max((x for x in drafted if x.fits), key=lambda line: line.speedup)
        takes = f"takes {best.ratio:.2f} times as long as plain decoding's and gives {best.length:.2f} tokens"
        growth = _growth(plain.cost, best.cost)
        if not self.pays:
            return f"MTP loses here because a round at depth {best.depth} {takes}; {growth}."
        said = (
            f"Depth {best.depth} pays most: {best.speedup:.2f} times plain decoding. A round there {takes}; {growth}."
        )
        others = [depth for depth in self.alike if depth != best.depth]
        if 0 in others:
            said += " That is within what the model can tell from no gain."
        elif others:
            said += f" Depth {_listed(others)} lies within {percent(MARGIN - 1)} of it, closer than the model can tell."
        if best.depth == drafted[-1].depth:
            said += " Acceptance is known no deeper: more may pay better."
        return said

    @property
    def basis(self) -> str:
        """What of this is a model and what is measured."""
        measured = self.setting.measured
        said = f"Acceptance: {self.curve.source}. Times are a roofline model's, not measured"
        if measured:
            said += f", but for {', '.join(f'{name} ({how})' for name, how in measured.items())}"
        return f"{said}; weights: {self.setting.weights.source}."

    def to_dict(self) -> dict[str, Any]:
        """Plain data, times in seconds."""
        return {
            "model": self.setting.sizes.name, "weights": self.setting.weights.name, "gpu": self.setting.gpu.name,
            "tp": self.setting.tp, "cache": self.setting.cache, "batch": self.batch, "context": self.context,
            "best": self.best.depth, "alike": list(self.alike), "sentences": list(self.sentences),
            "depths": [
                {
                    "depth": line.depth, "acceptance_length": line.length, "tokens_per_second": line.tokens_per_second,
                    "speedup": line.speedup, "round_seconds": line.cost.seconds, "draft_seconds": line.cost.draft,
                    "round_ratio": line.ratio, "binds": line.cost.binds, "parts": dict(line.cost.parts),
                    "fits": line.fits,
                }
                for line in self.lines
            ],
        }  # fmt: skip


def advise(setting: Setting, curve: Curve, batch: int = 1, context: int = 2048) -> Advice:
    """Every depth of the curve at one batch and context. Raises ConfigError for numbers out of range."""
    plain = round_cost(setting, batch, context, 0)
    lines = []
    for depth in curve.depths:
        cost = plain if depth == 0 else round_cost(setting, batch, context, depth)
        length = curve.length(depth)
        lines.append(
            DepthLine(
                depth, length, cost, batch * length / cost.seconds, length * plain.seconds / cost.seconds,
                setting.fits(batch, context, depth),
            )
        )  # fmt: skip
    return Advice(setting, curve, batch, context, tuple(lines))


@dataclass(frozen=True)
class Cell:
    """The best depth at one batch and context; None where not even plain decoding fits."""

    batch: int
    context: int
    depth: int | None
    speedup: float


def best_map(setting: Setting, curve: Curve, batches: Sequence[int], contexts: Sequence[int]) -> list[list[Cell]]:
    """The best depth for every batch (outer) and context (inner). Raises ConfigError as `advise` does."""
    if not batches or not contexts:
        raise ConfigError(f"{len(batches)} batches and {len(contexts)} contexts; expected at least one of each")

    def cell(batch: int, context: int) -> Cell:
        if not setting.fits(batch, context, 0):
            return Cell(batch, context, None, 1.0)
        best = advise(setting, curve, batch, context).best
        return Cell(batch, context, best.depth, best.speedup)

    return [[cell(batch, context) for context in contexts] for batch in batches]


def _growth(plain: RoundCost, other: RoundCost) -> str:
    """Where the additional time of a round goes: the two largest parts, and what of all of it is drafting."""
    more = other.seconds - plain.seconds
    grown = {key: other.parts[key] - plain.parts[key] for key in BINDS}
    first = sorted(grown, key=lambda key: -grown[key])[:2]
    said = " and ".join(f"{grown[key] * 1e3:.2f} go to {other.words(key)}" for key in first if grown[key] > 0)
    return f"of the {more * 1e3:.2f} ms more, {said}; the draft steps take {other.draft * 1e3:.2f} ms in all"


def _listed(depths: Sequence[int]) -> str:
    return " or ".join(map(str, depths))
