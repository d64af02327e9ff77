"""What becomes of scales of modules that an engine builds as they are stored: missed, or without a place.

Knows under which name an engine looks and what lies in the file; nothing of lists, nor of what builds a module.
"""

from __future__ import annotations

from typing import NamedTuple

from mtplab.checkpoint.lenses.base import LOAD_ERROR, SILENT, Consequence, View
from mtplab.checkpoint.strict_json import shown

__all__ = ["Fault", "fault_of"]

_NOWHERE = Consequence(LOAD_ERROR, "the scale has no parameter to go to")
_UNSET = Consequence(SILENT, "its scale stays as it was made, with no message")


class Fault(NamedTuple):
    """What is wrong with a module's scale, as a clause that follows "builds X", and what comes of it."""

    because: str
    consequence: Consequence


def fault_of(view: View, built: str, suffix: str) -> Fault | None:
    """Of a module built as stored, by an engine that looks for `suffix`; None where nothing is wrong, or known."""
    if built == "plain":
        beside = f"unquantised, and the file has {shown(view.scale)} beside it"
        return Fault(beside, _NOWHERE) if view.scale else None
    if not view.has_scale:
        return Fault(f"in FP8 and finds no {suffix}", _UNSET)
    if view.scale and view.scale != suffix:
        return Fault(f"in FP8 and looks for {suffix}, where the file has {shown(view.scale)}", _NOWHERE)
    return None
