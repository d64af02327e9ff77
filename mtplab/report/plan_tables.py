"""HTML tables of a checkpoint's plan: how many modules of each part are held how, and every module by itself.

Reads a resolved plan; opens no file and knows no rule. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mtplab.report.table import html_table
from mtplab.report.text import human_bytes, part_words

__all__ = ["plan_summary", "plan_table", "size_against"]


def plan_summary(plan: Any, caption: str = "Modules by part and by how they are held") -> str:
    """A few lines for a plan of any length (modules of each part that are FP8, BF16 or F32, and their bytes); all of
    it folded away below."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for module in plan.modules:
        groups.setdefault((module.part, module.weight, module.activation), []).append(module)
    body = []
    for (part, weight, activation), found in groups.items():
        kinds = dict.fromkeys(module.name.rsplit(".", 1)[-1] for module in found)
        shown = ", ".join(list(kinds)[:6]) + (", …" if len(kinds) > 6 else "")
        rounded = "FP8" if activation == "fp8" else "–"
        size = human_bytes(sum(getattr(module, "loaded_nbytes", module.nbytes) for module in found))
        body.append((part_words(part), weight.upper(), rounded, shown, len(found), size))
    table = html_table(("Part", "Weight", "Activations", "Among them", "Modules", "Bytes"), body, caption, left=4)
    every = f"All {len(plan.modules)} modules, and the rule that decided each"
    return f"{table}<details><summary>{every}</summary>{plan_table(plan.modules)}</details>"


def size_against(plan: Any, other: Any) -> str:
    """A sentence: how many bytes of weights the plan holds, and what share of the other plan's that is."""
    mine, theirs = plan.loaded_nbytes(), other.loaded_nbytes()
    return (
        f"<p>All weights as planned: {human_bytes(mine)}, {100 * mine / theirs:.0f} % of the {human_bytes(theirs)} of "
        "the original. What is FP8 takes half of BF16 and a scale per block; what stays in BF16 "
        "takes all of it.</p>"
    )


def plan_table(modules: Iterable[Any], caption: str = "Modules", limit: int = 400) -> str:
    """Modules of a plan: how each is stored and held, whether activations are rounded, its bytes and the rule.

    Bytes are those of a run, in the dtype that the plan gives; stored bytes those on disk.
    """
    found = list(modules)
    body = [
        (
            module.name,
            "×".join(str(size) for size in module.shape),
            module.stored,
            module.weight,
            module.activation,
            human_bytes(module.loaded_nbytes),
            human_bytes(module.nbytes),
            module.rule,
        )
        for module in found[:limit]
    ]
    if len(found) > limit:
        body.append((f"… and {len(found) - limit} more", "", "", "", "", "", "", ""))
    head = ("Module", "Shape", "Stored", "Weight", "Activation", "Bytes", "Stored bytes", "Rule that decided")
    return html_table(head, body, caption, height="32em")
