"""Who draws a view of the study: named by the room that draws, asked by the one that is drawn, which knows no figures.

A module of its own, so that naming it imports neither room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtplab.errors import ConfigError

__all__ = ["drawn", "set_drawing"]

_drawing: Callable[[Any], Any] | None = None


def set_drawing(draw: Callable[[Any], Any]) -> None:
    """Say what makes a picture of a view; `mtplab.report` does when it is imported."""
    global _drawing
    _drawing = draw


def drawn(view: Any) -> Any:
    """The view as a picture. Raises ConfigError before `mtplab.report` is imported."""
    if _drawing is None:
        raise ConfigError("nothing draws views yet: `import mtplab.report` first, or take to_frame()")
    return _drawing(view)
