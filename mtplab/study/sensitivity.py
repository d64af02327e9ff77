"""How much each module minds FP8: alone in it, and alone kept out of it.

Alone says what a module costs by itself, out of it what keeping it would bring back. For the target's KL one more
question can be answered from the first kind alone: a small change of the logits costs KL in its square, and errors of
different modules that have nothing to do with each other add up in the mean; then the KL of any set is the sum over
its quantised modules. Whether that holds is measured (`Additivity`), and where it does not, no estimate is given. For
acceptance, which counts whole tokens, there is no such sum.

Knows nothing of which sets are best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mtplab.study.exclusion_meter import Change, ExclusionMeter, Measured, kl_change, length_change
from mtplab.study.interval import jackknife, without_one
from mtplab.study.module_groups import ModuleGroup
from mtplab.study.number_table import Cell
from mtplab.study.numbers import NATS, rounded

if TYPE_CHECKING:
    from mtplab.study.estimate import Estimate

__all__ = ["Additivity", "Sensitivity", "SensitivityRow", "sensitivity", "shown", "shown_cell"]

# a sum farther off than this from what was measured is no estimate of it
_FACTOR = 1.5


@dataclass(frozen=True)
class SensitivityRow:
    """One group of modules. `kl` and `length` are alone in FP8 against BF16, `kl_back` and `length_back` all in FP8
    but this against all in FP8: KL in nats per token (lower is better), acceptance length in tokens per round.
    `estimated` is what `study.estimate` says of it without running it, where that was asked: of the target's groups
    `kl`, of the draft's the change of the draft's own KL from the target, nats per slot."""

    group: ModuleGroup
    kl: Change
    length: Change
    kl_back: Change
    length_back: Change
    estimated: Change | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        changes = {"kl": self.kl, "length": self.length, "kl_back": self.kl_back, "length_back": self.length_back}
        if self.estimated is not None:
            changes["estimated"] = self.estimated
        return {
            "group": self.group.name,
            "part": self.group.part,
            "modules": list(self.group.modules),
            "bytes_saved": self.group.nbytes,
        } | {
            f"{name}{end}": value
            for name, change in changes.items()
            for end, value in (
                ("", change.value), ("_error", change.error), ("_within_chance", change.within_chance)
            )
        }  # fmt: skip


@dataclass(frozen=True)
class Additivity:
    """The sum of the groups' own KL against the KL of all of them together: `ratio` ± `error` over texts, which is 1
    where errors simply add up."""

    summed: float
    measured: float
    ratio: float
    error: float | None

    @property
    def holds(self) -> bool:
        """Whether the whole interval lies within a factor of 1.5 of the measurement."""
        low, high = (self.ratio - (self.error or 0.0), self.ratio + (self.error or 0.0))
        return self.error is not None and low >= 1 / _FACTOR and high <= _FACTOR

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2f}"
        verdict = "so" if self.holds else "too far from 1:"
        verdict += f" a set's KL is {'' if self.holds else 'not '}estimated by its sum"
        return (
            f"KL of all groups in FP8 {rounded(self.measured)[0]} {NATS}, sum of each alone {rounded(self.summed)[0]}: "
            f"{self.ratio:.2f}{error} times it, {verdict}"
        )


@dataclass(frozen=True)
class Sensitivity:
    """Every group's row, in the plan's order, and how far KL adds up."""

    rows: tuple[SensitivityRow, ...]
    additivity: Additivity | None  # None where the target has no group, or FP8 costs it nothing
    depth: int

    def estimated_kl(self, excluded: Iterable[ModuleGroup | str]) -> float | None:
        """KL of the set that keeps these groups, or modules by name, and quantises the others; None where sums are no
        estimate, or a group is kept in part."""
        if self.additivity is None or not self.additivity.holds:
            return None
        kept = {name for each in excluded for name in ((each,) if isinstance(each, str) else each.modules)}
        if any(0 < len(kept & set(row.group.modules)) < len(row.group.modules) for row in self.rows):
            return None
        return sum(row.kl.value for row in self.rows if not kept >= set(row.group.modules))

    def estimates(self, points: Iterable[Measured]) -> list[tuple[float, float]]:
        """(measured, estimated) KL of sets that were measured, target by target; those that lie on the sum by
        construction (nothing or one group quantised) are left out."""
        found = {}
        groups = [row.group for row in self.rows if row.group.part == "target"]
        for point in points:
            quantised = [group for group in groups if not set(point.excluded) >= set(group.modules)]
            estimate = self.estimated_kl(point.excluded)
            if len(quantised) > 1 and estimate is not None:
                found.setdefault(frozenset(quantised), (point.mean_kl.value, estimate))
        return list(found.values())

    def with_estimate(self, estimate: Estimate) -> Sensitivity:
        """The same with what an estimate says beside every row."""
        return replace(self, rows=tuple(replace(row, estimated=estimate.of(row.group)) for row in self.rows))

    def to_records(self) -> list[dict[str, Any]]:
        """A dict for each row."""
        return [row.to_dict() for row in self.rows]

    def __str__(self) -> str:
        width = max(len(row.group.name) for row in self.rows)
        titles = (f"{'KL alone':>22}", f"{'KL back':>22}", f"{'AL alone':>17}", f"{'AL back':>17}")
        lines = [f"{'':{width}}  {'bytes saved':>11}  {'  '.join(titles)}"]
        for row in self.rows:
            kl = (f"{shown(change):>22}" for change in (row.kl, row.kl_back))
            length = (f"{shown(change):>17}" for change in (row.length, row.length_back))
            lines.append(f"{row.group.name:{width}}  {row.group.nbytes:11,}  {'  '.join((*kl, *length))}")
        lines.append(
            f"KL in {NATS}; AL in tokens per round at depth "
            f"{self.depth}. Alone: in FP8, all else BF16, against BF16. Back: kept in BF16, all else FP8, against all "
            "FP8. ± half a 95 % interval, prompt by prompt; what lies within it of 0 is in parentheses."
        )
        if self.additivity is not None:
            lines.append(f"{self.additivity}.")
        return "\n".join(lines)


def sensitivity(meter: ExclusionMeter, progress: Callable[[int, int, str], None] | None = None) -> Sensitivity:
    """Measure every group alone in FP8 and alone in BF16: two measurements each, and three for all.

    `progress` is told (measured so far, of how many, what is next). Raises Cancelled; what was measured is kept.
    """
    tasks = 2 * len(meter.groups) + 2
    say = progress or (lambda done, total, what: None)
    say(0, tasks, "all in BF16")
    reference = meter.bf16
    say(1, tasks, "all in FP8")
    quantised = meter.all_fp8
    rows, alone = [], []
    for at, group in enumerate(meter.groups):
        say(2 + 2 * at, tasks, f"{group.name} alone in FP8")
        alone.append(meter.alone(group))
        say(3 + 2 * at, tasks, f"all but {group.name} in FP8")
        back = meter.measure((group,))
        rows.append(
            SensitivityRow(
                group,
                kl_change(alone[-1], reference),
                length_change(alone[-1], reference),
                kl_change(back, quantised),
                length_change(back, quantised),
            )
        )
    say(tasks, tasks, "")
    return Sensitivity(tuple(rows), _additivity(meter, alone, quantised), meter.depth)


def _additivity(meter: ExclusionMeter, alone: list[Measured], together: Measured) -> Additivity | None:
    covered = {name for group in meter.groups for name in group.modules}
    targets = [found for found, group in zip(alone, meter.groups, strict=True) if group.part == "target"]
    if not targets or together.mean_kl.value == 0 or covered | meter.fixed != set(meter.modules):
        return None
    sums = np.sum([found.kl for found in targets], 0)
    ratios = without_one(sums, together.judged) / without_one(together.kl, together.judged)
    summed = float(sums.sum() / sum(together.judged))
    return Additivity(summed, together.mean_kl.value, summed / together.mean_kl.value, jackknife(ratios))


def shown(change: Change) -> str:
    """A change ± its error; in parentheses where it lies within chance."""
    cell = shown_cell(change)
    return cell if isinstance(cell, str) else " ± ".join(part.lstrip("±") for part in cell)


def shown_cell(change: Change) -> Cell:
    """The same for a table with errors below their numbers."""
    if change.value == 0 and not change.error:
        return "0"
    number, error = rounded(change.value, change.error, sign=True)
    opening, closing = ("(", ")") if change.within_chance else ("", "")
    return f"{opening}{number}{closing}" if error is None else (f"{opening}{number}", f"±{error}{closing}")
