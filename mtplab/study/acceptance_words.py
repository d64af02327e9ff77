"""What a set of traced acceptances says, in sentences that hold whichever way the numbers fall.

Numbers come from the set alone; what lies within chance is called so.
"""

from __future__ import annotations

import numpy as np

from mtplab.study.acceptance_set import AcceptanceSet
from mtplab.study.acceptance_views import Line
from mtplab.study.bootstrap import change_interval
from mtplab.study.words import signed

__all__ = ["acceptance_sentences"]

FLAT = 0.02  # a deeper depth that adds less than this share adds nothing worth having


def acceptance_sentences(found: AcceptanceSet) -> list[str]:
    """Findings by temperature, domain, position, gate and schedule, each a sentence with its numbers."""
    deepest, lowest = found.depths[-1], found.temperatures[0]
    said = [_of_temperature(found, deepest), _of_domain(found, lowest, deepest), _of_position(found, lowest, deepest)]
    said += [_of_context(found, lowest, deepest), _of_plan(found, lowest, deepest, "gate")]
    said.append(_of_plan(found, lowest, deepest, "schedule"))
    return [sentence for sentence in said if sentence]


def _span(span: tuple[float, float] | None) -> str:
    return "" if span is None else f" ({span[0]:.2f} to {span[1]:.2f})"


def _of_temperature(found: AcceptanceSet, deepest: int) -> str:
    each = []
    for one in found:
        length = one.length(deepest)
        if length is None:
            return "No prompt gave a round: nothing can be said of acceptance."
        enough = next(depth for depth in found.depths if (one.length(depth) or 1.0) >= length * (1 - FLAT))
        each.append(
            f"{length:.2f}{_span(one.interval(deepest))} at temperature {one.temperature:g}, within {100 * FLAT:g} % "
            f"of that from depth {enough} on"
        )
    return f"At depth {deepest} a round gives {'; '.join(each)}."


def _of_domain(found: AcceptanceSet, temperature: float, deepest: int) -> str:
    if len(found.domains) < 2:
        return ""
    one = found[temperature]
    lengths = {name: one.only(name).length(deepest) for name in found.domains}
    known = {name: length for name, length in lengths.items() if length is not None}
    if len(known) < 2:
        return ""
    high, low = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    a, b = one.only(high).counts(deepest), one.only(low).counts(deepest)
    span = change_interval((a.emitted, a.rounds), (b.emitted, b.rounds))
    sure = (
        "too few prompts to say whether that is chance"
        if span is None
        else f"a difference of {signed(span[0])} to {signed(span[1])}, beyond chance for these two taken alone"
        if span[0] > 0
        else f"a difference of {signed(span[0])} to {signed(span[1])}, within chance"
    )
    return (
        f"At temperature {temperature:g}, {high} is the easiest domain ({known[high]:.2f}) and {low} the hardest "
        f"({known[low]:.2f}): {sure}."
    )


def _of_position(found: AcceptanceSet, temperature: float, deepest: int) -> str:
    line = found.view("conditional", temperatures=[temperature]).lines[0]
    told = [at for at, few in enumerate(line.few) if not few and line.y[at] is not None]
    if len(told) < 2:
        return ""
    first, last = told[0], told[-1]
    counts = found[temperature].counts(deepest)
    columns = [counts.rounds, *counts.accepted_per_position.T]
    span = change_interval(
        (columns[last + 1], columns[last]), (columns[first + 1], columns[first]), paired=True
    )
    chance = span is None or span[0] <= 0 <= span[1]
    way = "within chance of" if chance else "below" if span[1] < 0 else "above"
    return (
        f"At temperature {temperature:g}, where all drafts before it were right, draft {last + 1} is right in "
        f"{100 * line.y[last]:.0f} % of rounds, which is {way} the {100 * line.y[first]:.0f} % of draft {first + 1}."
    )


def _of_context(found: AcceptanceSet, temperature: float, deepest: int) -> str:
    one = found[temperature]
    starts, counts = one.starts, one.counts(deepest)
    if not counts.visits.sum():
        return ""
    middle = int(np.quantile(np.repeat(starts.ravel(), np.ceil(counts.visits.ravel()).astype(int)), 0.5))
    edges = [0, middle, int(starts.max()) + 1]
    if not edges[0] < edges[1] < edges[2]:
        return ""
    (_, _, t0, r0), (_, _, t1, r1) = one.context_counts(deepest, edges)
    if not r0.sum() or not r1.sum():
        return ""
    span = change_interval((t1, r1), (t0, r0), paired=True)
    sure = "within chance" if span is None or span[0] <= 0 <= span[1] else "beyond chance"
    return (
        f"At temperature {temperature:g}, rounds that begin at token {middle} or later give "
        f"{t1.sum() / r1.sum():.2f} tokens, those before it {t0.sum() / r0.sum():.2f}: {sure}."
    )


def _of_plan(found: AcceptanceSet, temperature: float, deepest: int, name: str) -> str:
    if deepest < 2:
        return ""
    view = found.view(name, temperatures=[temperature], depths=(1, deepest))
    plan, fixed = (next(line for line in view.lines if line.kind == kind) for kind in ("measured", "fixed"))
    if any(y is None for y in plan.y):
        return ""
    most, at = _gain(plan, plan.x, fixed)
    against = "tokens a round against a fixed depth with as many drafts"
    if plan.least is None:
        return (
            f"At temperature {temperature:g}, depth 1 first and {deepest} later gives at best {signed(most)} "
            f"{against} (switch at token {at:g})."
        )
    least, where = _gain(plan, plan.least, fixed)
    return (
        f"At temperature {temperature:g}, the best confidence gate gives {signed(most)} {against} if every chain goes "
        f"on past its miss (threshold {at:g}) and {signed(least)} if none does (threshold {where:g})."
    )


def _gain(plan: Line, x: tuple[float, ...], fixed: Line) -> tuple[float, float]:
    """(the most tokens a round above fixed depths of as many drafts, the setting that gives it), ends left out."""
    assert plan.setting is not None
    here = [float(y or 0.0) - float(np.interp(at, fixed.x, fixed.y)) for at, y in zip(x, plan.y, strict=True)]
    # a gate of 0 and a switch at an end are fixed depths themselves
    inside = range(1, len(here) - 1) if len(here) > 2 else range(len(here))
    best = max(inside, key=here.__getitem__)
    return here[best], plan.setting[best]
