"""Every group's cost in FP8 as a gradient says it, dearest by byte first, and the one measurement that checks them all.

Knows nothing of how an estimate is made, nor of sets worth a search.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtplab.study.estimate import LOCAL, Estimate
from mtplab.study.exclusion_meter import Change, ExclusionMeter
from mtplab.study.interval import jackknife, without_one
from mtplab.study.numbers import NATS, rounded
from mtplab.study.sensitivity import shown

__all__ = ["check_together", "ranking", "ranking_dict", "together_sentence"]


def check_together(meter: ExclusionMeter, estimate: Estimate) -> tuple[Change, Change, Change]:
    """(estimated, measured, measured over estimated) KL of the target with everything in FP8 that no set keeps: one
    measurement, which tells whether the estimates of all modules are of the right size."""
    everything = sorted(meter.modules.keys() - meter.fixed)
    guess, measured = estimate.kl_by_text(everything), np.array(meter.all_fp8.kl)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = jackknife(without_one(measured, estimate.judged) / without_one(guess, estimate.judged))
        ratio = Change(float(np.divide(measured.sum(), guess.sum())), error)
    return estimate.kl(everything), meter.all_fp8.mean_kl, ratio


def ranking(meter: ExclusionMeter, estimate: Estimate) -> str:
    """Every group's estimate and bytes, in columns: the target's dearest by byte first, then the draft's."""
    groups = sorted(meter.groups, key=lambda g: (g.part == "draft", -estimate.of(g).value / max(1, g.nbytes)))
    width = max(len(group.name) for group in groups)
    lines = [f"{'':{width}}  {'bytes saved':>11}  {'KL estimated':>24}  {'per GB':>9}"]
    for group in groups:
        change = estimate.of(group)
        words = f"{shown(change):>24}  {change.value * 1e9 / group.nbytes:9.2f}"
        far = "" if estimate.local(group) else f"  beyond {LOCAL:g} nats: too large for an estimate"
        lines.append(f"{group.name:{width}}  {group.nbytes:11,}  {words}{far}")
    lines.append(
        f"Estimated, each alone in FP8, none of them run: the target's KL from BF16 in {NATS}; of modules "
        "of the draft, the change of KL(target ‖ first draft) in nats per slot. ± half a 95 % interval over "
        f"{len(estimate.judged)} texts and {estimate.draws} random vectors; in parentheses where 0 lies within it. "
        "Acceptance length is not estimated: it counts whole tokens."
    )
    return "\n".join(lines)


def ranking_dict(meter: ExclusionMeter, estimate: Estimate) -> dict[str, Any]:
    """The same, with the one measurement that checks it, as JSON can hold it."""
    guess, measured, ratio = check_together(meter, estimate)
    return {
        "texts": len(estimate.judged),
        "draws": estimate.draws,
        "seconds": estimate.seconds,
        "groups": [
            {
                "group": group.name,
                "part": group.part,
                "modules": list(group.modules),
                "bytes_saved": group.nbytes,
                "estimated": estimate.of(group).value,
                "estimated_error": estimate.of(group).error,
                "local": estimate.local(group),
            }
            for group in meter.groups
        ],
        "together": {
            f"{name}{end}": None if value is None or value != value else value
            for name, change in (("estimated", guess), ("measured", measured), ("ratio", ratio))
            for end, value in (("", change.value), ("_error", change.error))
        },
    }


def together_sentence(meter: ExclusionMeter, estimate: Estimate) -> str:
    """What one measurement says of all estimates."""
    guess, measured, ratio = check_together(meter, estimate)
    if not guess.value:
        return "FP8 costs the target nothing."
    error = "" if ratio.error is None else f" ± {ratio.error:.2f}"
    return (
        f"All of it in FP8: KL estimated {rounded(guess.value)[0]}, measured {rounded(measured.value)[0]} {NATS}, "
        f"{ratio.value:.2f}{error} times. The estimates took {estimate.seconds:.1f} s."
    )
