"""One sentence for a draft head that is hardly ever right: what to check first.

Nothing crashes when a head is loaded wrong; speculation still gives the target's text, and only acceptance tells.
Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ENOUGH", "LEAST", "faint_draft", "faint_server"]

LEAST = 0.05  # share of first drafts that even a poor head gets right
ENOUGH = 50  # rounds below which a share that small can be chance


def faint_draft(per_position: Sequence[float | None], rounds: float) -> str:
    """What to check where the first draft was accepted in fewer than `LEAST` of at least `ENOUGH` rounds; else ""."""
    first = per_position[0] if per_position else None
    if not _faint(first, rounds):
        return ""
    return (
        f"The first draft was right in {100 * first:.1f} % of {rounds:g} rounds, far below what a working head does: "
        "check its layout and dtypes with mtplab.open_checkpoint(path).plan() and the plan's warnings, the hidden "
        "states it reads with mtplab.compare_hidden and, where the plan has it in FP8, whether keeping it out "
        "(draft_exclude=['mtp.*'], from the BF16 checkpoint) brings it back."
    )


def faint_server(per_position: Sequence[float | None], rounds: float | None) -> str:
    """Likewise for drafts that a serving engine verified."""
    first = per_position[0] if per_position else None
    if not _faint(first, rounds):
        return ""
    return (
        f"The first draft was accepted in {100 * first:.1f} % of {rounds:g} rounds, far below what a working head "
        "does: the same sweep without engine= says whether it is the checkpoint, mtplab audit how each engine reads "
        "its exclusions, and temperature 0 whether it is how the engine draws."
    )


def _faint(first: float | None, rounds: float | None) -> bool:
    return first is not None and rounds is not None and rounds >= ENOUGH and first < LEAST
