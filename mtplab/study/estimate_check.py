"""Estimates of what modules cost against what was measured, group by group and text by text.

Both are over the same texts, so what makes a text hard is in both, and their difference is surer than either. Knows
nothing of how an estimate is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mtplab.study.draft_divergence import draft_divergence
from mtplab.study.estimate import LOCAL, Estimate
from mtplab.study.exclusion_meter import Change, ExclusionMeter
from mtplab.study.interval import Z
from mtplab.study.module_groups import ModuleGroup

__all__ = ["Checked", "EstimateCheck", "check_estimates"]


@dataclass(frozen=True)
class Checked:
    """One group alone in FP8, of the target: KL from BF16, nats per token; of the draft: change of KL(target ‖ first
    draft), nats per slot. `off` is measured less estimated, ± over texts; `local` whether an estimate so large is one.
    """

    group: ModuleGroup
    estimated: Change
    measured: Change
    off: Change
    local: bool

    @property
    def sound(self) -> bool:
        """Whether the estimate is small enough to be one, and off by no more than chance or a third of the
        measurement."""
        return self.local and (self.off.within_chance or abs(self.off.value) <= abs(self.measured.value) / 3)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        changes = {"estimated": self.estimated, "measured": self.measured, "off": self.off}
        return {"group": self.group.name, "part": self.group.part, "local": self.local, "sound": self.sound} | {
            f"{name}{end}": value
            for name, change in changes.items()
            for end, value in (("", change.value), ("_error", change.error))
        }


@dataclass(frozen=True)
class EstimateCheck:
    """Every group's, in the meter's order."""

    rows: tuple[Checked, ...]
    draws: int
    texts: int
    seconds: float  # of the estimate, all groups together

    def of(self, part: str) -> list[Checked]:
        """The rows of "target" or "draft"."""
        return [row for row in self.rows if row.group.part == part]

    def rank(self, part: str) -> float | None:
        """Spearman's correlation of estimates and measurements; None below three groups."""
        rows = self.of(part)
        if len(rows) < 3:
            return None
        ranks = [
            np.argsort(np.argsort([getattr(row, name).value for row in rows])) for name in ("estimated", "measured")
        ]
        return float(np.corrcoef(*ranks)[0, 1])

    def ratio(self, part: str) -> float | None:
        """Sum of measurements over sum of estimates; None where there is nothing to divide by."""
        rows = self.of(part)
        total = sum(row.estimated.value for row in rows)
        return sum(row.measured.value for row in rows) / total if total else None

    def sentence(self) -> str:
        """How far the estimates can be trusted here."""
        words = []
        for part, what in (("target", "KL of the target"), ("draft", "KL of the draft from its target")):
            rows = self.of(part)
            if not rows:
                continue
            unsound = [row for row in rows if not row.sound]
            ratio, rank = self.ratio(part), self.rank(part)
            words.append(
                f"{what}, {len(rows)} groups, estimated with none of them run"
                + ("" if ratio is None else f": measured is {ratio:.2f} times estimated in all")
                + ("" if rank is None else f", ranks correlate by {rank:.2f}")
                + (f"; not sound: {_why(unsound)}." if unsound else "; none is off beyond chance and a third.")
            )
        words.append(f"{self.draws} random vectors, {self.texts} texts, {self.seconds:.1f} s.")
        return " ".join(words)


def _why(rows: list[Checked]) -> str:
    return ", ".join(f"{row.group.name} ({'off' if row.local else f'beyond {LOCAL:g} nats'})" for row in rows)


def check_estimates(meter: ExclusionMeter, estimate: Estimate) -> EstimateCheck:
    """Measure every group alone in FP8 (or read back what was measured) and compare. Raises Cancelled as the meter
    does.

    A draft's groups are measured by one pass of target and head each; nothing of that is kept.
    """
    skips = [len(prompt) - 1 for prompt in meter.prompts]
    plain = None
    rows = []
    for group in meter.groups:
        if group.part == "target":
            measured, guess, sizes = np.array(meter.alone(group).kl), estimate.kl_by_text([group]), estimate.judged
        else:
            plain = plain or draft_divergence(meter.model, meter.texts, skips)
            others = sorted(meter.modules.keys() - set(group.modules))
            variant = meter.model.with_exclusions(others or "none", model_format="fp8")
            measured = draft_divergence(variant, meter.texts, skips).kl - plain.kl
            guess, sizes = estimate.draft_kl_by_text([group]), estimate.slots
        off = Change.of(measured - guess, sizes)
        if group.part == "target" and off.error is not None:
            # squares of normal scores are skewed: draws that came out low look surer than they are. With what was
            # measured in their place, their variance is known
            chance = Z * float(np.sqrt(2 / estimate.draws * (measured**2).sum())) / sum(sizes)
            off = off._replace(error=max(off.error, chance))
        rows.append(Checked(group, Change.of(guess, sizes), Change.of(measured, sizes), off, estimate.local(group)))
    return EstimateCheck(tuple(rows), estimate.draws, len(estimate.judged), estimate.seconds)
