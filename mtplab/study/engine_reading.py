"""What an engine will make of the checkpoint that it is given, by the audit's lens for it, before it is started.

A list that an engine reads otherwise than it was meant gives a row of 0 % acceptance, or none, whose cause is nowhere
in it. Reads headers and lists; asks no engine.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.lenses.base import LOAD_ERROR, SILENT

__all__ = ["engine_reading"]


def engine_reading(checkpoint: Any, engine: str, kept: tuple[str, ...] | None) -> str | None:
    """What is wrong with it in this engine, in a sentence; None where nothing is known to be.

    Args:
        checkpoint: open.
        engine: its title, as lenses have it ("vLLM").
        kept: names of modules that are kept out of FP8 in the checkpoint that `mtplab quantize` will write of it; None
            where it is served as it is.
    """
    if kept is None:
        looks = checkpoint.audit().looks if checkpoint.quantization is not None else None
    else:
        from mtplab.checkpoint.audit.supposed import rewritten

        looks = rewritten(checkpoint, exclude=list(kept) or "none").looks
    found = [look for look in looks.looks if look.engine == engine] if looks is not None else []
    wrong = [each for look in found for each in look.disagreements if each.outcome in (LOAD_ERROR, SILENT)]
    if not wrong:
        return None
    more = f" (and {len(wrong) - 1} more: mtplab audit)" if len(wrong) > 1 else ""
    return f"by its exclusion list, {wrong[0].sentence.rstrip('.')}{more}"
