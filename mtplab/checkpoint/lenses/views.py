"""A plan's modules as the lenses take them. Knows plans; nothing of engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mtplab.checkpoint.lenses.base import View

if TYPE_CHECKING:
    from mtplab.checkpoint.plan import ModulePlan

__all__ = ["views_of"]


def views_of(modules: Iterable[ModulePlan], orphans: Iterable[str] = ()) -> list[View]:
    """Planned modules as they are stored; what no run loads is left out. `orphans`: scales of weights without codes."""
    beside = dict(name.rpartition(".")[::2] for name in orphans)
    return [
        View(
            m.name,
            m.kind,
            m.part,
            m.weight in ("fp8", "unusable"),
            m.scale is not None,
            beside.get(m.name, "") if m.scale is None else _called(m.name, m.scale.name),
        )
        for m in modules
        if m.part != "unused"
    ]


def _called(module: str, scale: str) -> str:
    """What a scale is called behind its module's name; "" for one that is not the module's alone."""
    head, _, last = scale.rpartition(".")
    return last if head == module else ""
