"""A plan's modules as the lenses take them. Knows plans; nothing of engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mtplab.checkpoint.lenses.base import View

if TYPE_CHECKING:
    from mtplab.checkpoint.plan import ModulePlan

__all__ = ["views_of"]


def views_of(modules: Iterable[ModulePlan]) -> list[View]:
    """Planned modules as they are stored; what no run loads is left out."""
    return [
        View(m.name, m.kind, m.part, m.weight in ("fp8", "unusable"), m.scale is not None)
        for m in modules
        if m.part != "unused"
    ]
