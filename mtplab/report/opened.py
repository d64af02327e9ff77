"""The checkpoint that a panel is given: by its path, open already, or of a loaded model.

Reads headers; knows nothing of panels.
"""

from __future__ import annotations

from typing import Any

__all__ = ["opened_checkpoint"]


def opened_checkpoint(checkpoint: Any, lenient: bool = False) -> Any:
    """The open checkpoint; `lenient` opens one with faults too. Raises what `mtplab.open_checkpoint` raises."""
    checkpoint = getattr(checkpoint, "checkpoint", checkpoint)
    if callable(getattr(checkpoint, "plan", None)):
        return checkpoint
    from mtplab.checkpoint import open_checkpoint

    return open_checkpoint(checkpoint, lenient=lenient)
