"""Which modules to keep out of FP8: the front of bytes against quality, and a list for a budget.

Sets are grown from all FP8, the group with the most gain per byte first: the target's for its KL, the draft's for
acceptance. Every step measures, the best few candidates each time. The list for a budget is the smallest set found
that keeps it, then made smaller as long as leaving a group out, or changing one for a smaller, still keeps it. All that
was measured is kept and compared, so that the front is of what was tried, not of what was liked.

Deterministic: the same meter gives the same search. Knows nothing of how a set is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtplab.errors import ConfigError
from mtplab.study.exclusion_meter import Change, ExclusionMeter, Measured, kl_change, length_change, relative_loss
from mtplab.study.exclusion_words import sentences
from mtplab.study.module_groups import ModuleGroup
from mtplab.study.sensitivity import Sensitivity, sensitivity

__all__ = ["Better", "Confirmed", "ExclusionSearch", "check_search", "search_exclusions"]

_Groups = frozenset[ModuleGroup]
# changes of one group for a smaller that are tried on a set, smallest first: of hundreds of groups there are thousands
_SWAPS = 64


@dataclass(frozen=True)
class Better:
    """A set against another one, the published list say: bytes, KL and acceptance length less the other's."""

    measured: Measured
    nbytes: int
    kl: Change
    length: Change

    @property
    def worse_by_estimate(self) -> bool:
        """Whether it is worse in one of the three, by however little."""
        return self.nbytes > 0 or self.kl.value > 0 or self.length.value < 0

    @property
    def dominates(self) -> bool:
        """No worse in any of the three, and better in one; KL and acceptance count as worse, or as better, where the
        difference lies outside chance."""
        worse = self.nbytes > 0 or _beyond(self.kl) > 0 or _beyond(self.length) < 0
        better = self.nbytes < 0 or _beyond(self.kl) < 0 or _beyond(self.length) > 0
        return better and not worse


@dataclass(frozen=True)
class Confirmed:
    """What other prompts say of the two sets that a search ends with: chosen among many on its own prompts, they look
    better there than they are."""

    loss: Change | None  # of the recommended set, as a share
    kl: Change | None
    better: Better | None  # the set that dominated the published list, against that list
    prompts: int


@dataclass(frozen=True)
class ExclusionSearch:
    """What a search found. `recommended` is the smallest set that keeps the budgets, None where no measured one does.

    A budget of acceptance counts as kept unless the loss lies above it by more than chance; `loss` says what the
    recommended set loses, as a share, and `sure` whether chance leaves no doubt.
    """

    sensitivity: Sensitivity
    points: tuple[Measured, ...]
    reference: Measured
    published: Measured
    recommended: Measured | None
    groups: tuple[ModuleGroup, ...]  # those that are recommended to stay BF16
    al_budget: float
    kl_budget: float
    depth: int
    confirmed: Confirmed | None = None

    @property
    def exclude(self) -> list[str] | None:
        """The recommended list, as `quantize_checkpoint(exclude=…)` and `load_model` take it."""
        return None if self.recommended is None else list(self.recommended.excluded) or ["none"]

    @property
    def loss(self) -> Change | None:
        """The share of acceptance length that the recommended set loses."""
        return None if self.recommended is None else relative_loss(self.recommended, self.reference)

    @property
    def sure(self) -> bool:
        """Whether both budgets are kept by the whole interval."""
        if self.loss is None or self.recommended is None:
            return False
        return self.loss.upper <= self.al_budget and self.recommended.mean_kl.upper <= self.kl_budget

    def front(self, axis: str = "kl") -> list[Measured]:
        """Measured sets that no other beats in both bytes and `axis`, "kl" or "length", smallest first."""
        if axis not in ("kl", "length"):
            raise ConfigError(f"axis is {axis!r}; expected 'kl' or 'length'")
        found: list[Measured] = []
        cost = (lambda p: p.mean_kl.value) if axis == "kl" else (lambda p: -p.length.value)
        for point in sorted(self.points, key=lambda p: (p.nbytes, cost(p), p.excluded)):
            if not found or cost(point) < cost(found[-1]):
                found.append(point)
        return found

    def against(self, other: Measured) -> list[Better]:
        """Every measured set against `other`: first those that dominate it, before them those whose estimates are all
        no worse, and by KL."""
        found = [
            Better(point, point.nbytes - other.nbytes, kl_change(point, other), length_change(point, other))
            for point in self.points
            if point.excluded != other.excluded
        ]
        return sorted(
            found, key=lambda b: (not b.dominates, b.worse_by_estimate, b.kl.value, b.nbytes, b.measured.excluded)
        )

    @property
    def better_than_published(self) -> Better | None:
        """Of the sets that dominate the published list and are no worse by any estimate, that of the lowest KL; None
        where there is none."""
        first = next(iter(self.against(self.published)), None)
        return first if first is not None and first.dominates and not first.worse_by_estimate else None

    def to_records(self) -> list[dict[str, Any]]:
        """A dict for each measured set, smallest first."""
        fronts = {axis: {point.excluded for point in self.front(axis)} for axis in ("kl", "length")}
        return [
            {
                "excluded": list(point.excluded),
                "bytes": point.nbytes,
                "kl": point.mean_kl.value,
                "kl_error": point.mean_kl.error,
                "top1_agreement": point.top1_agreement,
                "acceptance_length": point.length.value,
                "acceptance_length_error": point.length.error,
                "loss": (loss := relative_loss(point, self.reference)).value,
                "loss_error": loss.error,
                "on_kl_front": point.excluded in fronts["kl"],
                "on_length_front": point.excluded in fronts["length"],
            }
            for point in sorted(self.points, key=lambda p: (p.nbytes, p.excluded))
        ]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        best = self.better_than_published
        again = self.confirmed.better if self.confirmed is not None else None
        return {
            "depth": self.depth,
            "al_budget": self.al_budget,
            "kl_budget": self.kl_budget,
            "exclude": self.exclude,
            "sure": self.sure,
            "sensitivity": self.sensitivity.to_records(),
            "points": self.to_records(),
            "published": list(self.published.excluded),
            "dominates_published": None if best is None else list(best.measured.excluded),
            "dominates_published_on_other_prompts": None if again is None else again.dominates,
        }

    def sentences(self) -> list[str]:
        """What was found, what chance leaves open and what would settle it."""
        return sentences(self)

    def sentence(self) -> str:
        """All of them, one after the other."""
        return " ".join(self.sentences())


def search_exclusions(
    meter: ExclusionMeter,
    al_budget: float = 0.005,
    kl_budget: float = 0.01,
    width: int = 2,
    steps: int | None = None,
    confirm: ExclusionMeter | None = None,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> ExclusionSearch:
    """Search the sets of the meter's groups.

    Args:
        al_budget: the share of BF16's acceptance length that may be lost, 0 to 1.
        kl_budget: nats per token that the target may lie from BF16, the interval's upper end counted.
        width: candidates that each step measures.
        steps: groups that a path grows by at most; None goes on until everything is kept.
        confirm: the same meter `over` other prompts, on which the sets found are looked at again.
        progress: told (measured so far, of how many, or None where that is open; what is next).

    Raises ConfigError for budgets out of range, Cancelled as the meter does; what was measured is kept.
    """
    check_search(al_budget, kl_budget, width, steps)
    found = sensitivity(meter, progress)
    done = _Search(meter, found, al_budget, kl_budget, width, steps, progress).go()
    return done if confirm is None else replace(done, confirmed=_confirm(done, confirm, progress))


def check_search(al_budget: float, kl_budget: float, width: int = 2, steps: int | None = None) -> None:
    """Raises ConfigError for what `search_exclusions` refuses; to be asked before a model is loaded for it."""
    for name, value, top in (("al_budget", al_budget, 1.0), ("kl_budget", kl_budget, float("inf"))):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= top:
            raise ConfigError(f"{name} is {value!r:.60}; expected a number from 0 to {top:g}")
    for name, count in (("width", width), ("steps", 1 if steps is None else steps)):
        if type(count) is not int or count < 1:
            raise ConfigError(f"{name} is {count!r:.60}; expected a whole number of at least 1")


def _confirm(done: ExclusionSearch, meter: ExclusionMeter, progress: Any) -> Confirmed:
    if progress is not None:
        progress(len(done.points), None, "again on other prompts")
    loss = kl = better = None
    if done.recommended is not None:
        again = meter.measure(done.recommended.excluded)
        loss, kl = relative_loss(again, meter.bf16), again.mean_kl
    best = done.better_than_published
    if best is not None:
        mine, other = meter.measure(best.measured.excluded), meter.published
        better = Better(mine, mine.nbytes - other.nbytes, kl_change(mine, other), length_change(mine, other))
    return Confirmed(loss, kl, better, len(meter.prompts))


class _Search:
    def __init__(
        self,
        meter: ExclusionMeter,
        found: Sensitivity,
        al_budget: float,
        kl_budget: float,
        width: int,
        steps: int | None,
        progress: Callable[[int, int | None, str], None] | None,
    ) -> None:
        self.meter, self.sensitivity = meter, found
        self.al_budget, self.kl_budget, self.width, self.steps = al_budget, kl_budget, width, steps
        self.tell = progress
        self.seen: dict[tuple[str, ...], Measured] = {}
        # what a group is worth, as last measured
        self.gain = {row.group: row.kl.value if row.group.part == "target" else -row.length.value for row in found.rows}

    def go(self) -> ExclusionSearch:
        for point in (self.meter.bf16, self.meter.all_fp8, self.meter.published):
            self.seen[point.excluded] = point
        for group in self.meter.groups:  # measured already
            for point in (self.meter.alone(group), self.meter.measure((group,))):
                self.seen[point.excluded] = point
        target = self._path("target")
        draft = self._path("draft")
        chosen = self._for_budget(target, draft)
        if chosen is not None:
            chosen = self._smaller(chosen)
        return ExclusionSearch(
            self.sensitivity,
            tuple(self.seen.values()),
            self.meter.bf16,
            self.meter.published,
            None if chosen is None else self._measure(chosen),
            () if chosen is None else tuple(group for group in self.meter.groups if group in chosen),
            self.al_budget,
            self.kl_budget,
            self.meter.depth,
        )

    def _measure(self, kept: Iterable[ModuleGroup]) -> Measured:
        kept = frozenset(kept)
        if self.tell is not None:
            names = [group.name for group in self.meter.groups if group in kept]
            what = f"{len(names)} groups in BF16" if len(names) > 2 else f"{', '.join(names) or 'nothing'} in BF16"
            self.tell(len(self.seen), None, what)
        found = self.meter.measure(kept)
        self.seen[found.excluded] = found
        return found

    def _path(self, part: str) -> list[_Groups]:
        """Sets that grow by one group of a part at a time, from nothing kept."""
        left = [group for group in self.meter.groups if group.part == part]
        path: list[_Groups] = [frozenset()]
        while left and (self.steps is None or len(path) <= self.steps):
            here = self._measure(path[-1])
            left.sort(key=lambda group: -self.gain[group] / group.nbytes)  # stable: the plan's order decides ties
            for group in left[: self.width]:
                self.gain[group] = self._worth(part, here, self._measure(path[-1] | {group}))
            best = max(left[: self.width], key=lambda group: self.gain[group] / group.nbytes)
            left.remove(best)
            path.append(path[-1] | {best})
        return path

    @staticmethod
    def _worth(part: str, before: Measured, after: Measured) -> float:
        if part == "target":
            return before.mean_kl.value - after.mean_kl.value
        return after.length.value - before.length.value

    def _keeps_kl(self, point: Measured) -> bool:
        return point.mean_kl.upper <= self.kl_budget

    def _keeps(self, point: Measured) -> bool:
        loss = relative_loss(point, self.meter.bf16)
        # where there is no interval, the value itself decides
        return self._keeps_kl(point) and loss.value - (loss.error or 0.0) <= self.al_budget

    def _for_budget(self, target: Sequence[_Groups], draft: Sequence[_Groups]) -> _Groups | None:
        """The first set along both paths that keeps both budgets: as little of the target as KL allows, then of the
        draft as acceptance does, then more of the target."""
        for mine in target:
            if not self._keeps_kl(self._measure(mine)):
                continue
            for theirs in draft:
                if self._keeps(self._measure(mine | theirs)):
                    return mine | theirs
        everything = frozenset(self.meter.groups)
        return everything if self._keeps(self._measure(everything)) else None

    def _smaller(self, chosen: _Groups) -> _Groups:
        """Fewer bytes as long as the budgets are kept: groups left out, or changed for a smaller of the same part."""
        while True:
            step = next((s for s in self._steps_down(chosen) if self._keeps(self._measure(s))), None)
            if step is None:
                return chosen
            chosen = step

    def _steps_down(self, chosen: _Groups) -> list[_Groups]:
        inside = [group for group in self.meter.groups if group in chosen]
        outside = [group for group in self.meter.groups if group not in chosen]
        left_out = [chosen - {group} for group in sorted(inside, key=lambda group: -group.nbytes)]
        swaps = [
            chosen - {old} | {new}
            for old in inside
            for new in outside
            if new.part == old.part and new.nbytes < old.nbytes
        ]
        return left_out + sorted((s for s in swaps if self._promising(s)), key=_size)[:_SWAPS]

    def _promising(self, kept: _Groups) -> bool:
        """Whether the sum of single KLs leaves hope that a set keeps the budget; without such sums, all are tried."""
        estimate = self.sensitivity.estimated_kl(kept)
        return estimate is None or estimate <= self.kl_budget


def _size(groups: _Groups) -> tuple[int, list[str]]:
    return sum(group.nbytes for group in groups), sorted(group.name for group in groups)


def _beyond(change: Change) -> float:
    """The change where it lies outside chance, else 0."""
    return 0.0 if change.within_chance else change.value
