"""Names by their shape: what differs between layers and experts only in a number is decided once.

Knows nothing of engines: a family's renames are given to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mtplab.checkpoint.lenses.base import View
from mtplab.checkpoint.lenses.matching import Unit

__all__ = ["Asked", "Shaped", "shaped", "units_of"]

_NUMBER = re.compile(r"(?:(?<=\.)|(?<=^))([0-9]{1,9})(?=\.|$)")
_ROUTED = re.compile(r"(?:^|\.)experts(?=\.\{[0-9]+\}\.)")
# the names under which compressed-tensors' readers look for a layer's routed experts
_FIRST_EXPERT = (".0.gate_proj", ".0.up_proj", ".0.down_proj")


class Shaped(NamedTuple):
    """Linear layers of one shape (`model.layers.{0}.mlp.gate`) and part, each with its numbers (("3",))."""

    shape: str
    part: str
    members: list[tuple[View, tuple[str, ...]]]


class Asked(NamedTuple):
    """How modules of one shape are asked for: `str.format` templates for the unit, its members and the module."""

    unit: str
    members: tuple[str, ...]
    module: str
    experts: bool
    depth: int  # how many of the module's numbers stand in the unit's name; later ones make no difference

    def at(self, numbers: Sequence[str]) -> Unit:
        """The unit that the module with these numbers belongs to."""
        name = self.unit.format(*numbers)
        if self.experts:
            return Unit(name, tuple(name + end for end in _FIRST_EXPERT), True)
        return Unit(name, tuple(member.format(*numbers) for member in self.members), False)


def shaped(views: Iterable[View]) -> list[Shaped]:
    """The linear layers among `views` by shape and part, in the order in which these first occur."""
    found: dict[tuple[str, ...], list[tuple[View, tuple[str, ...]]]] = {}
    for view in views:
        if view.kind == "linear":
            pieces = _NUMBER.split(view.name)
            found.setdefault((view.part, *pieces[::2]), []).append((view, tuple(pieces[1::2])))
    made = []
    for (part, *pieces), members in found.items():
        escaped = [piece.replace("{", "{{").replace("}", "}}") for piece in pieces]
        shape = escaped[0] + "".join(f"{{{i}}}{piece}" for i, piece in enumerate(escaped[1:]))
        made.append(Shaped(shape, part, members))
    return made


def units_of(shape: str, renames: Sequence[tuple[str, str]], fused: Mapping[str, tuple[str, ...]]) -> Asked:
    """How an engine asks for modules of this shape."""
    name = shape
    for pattern, new in renames:
        name = re.sub(pattern, new, name)
    routed = _ROUTED.search(name)
    if routed is not None:
        unit = name[: routed.end()]
        return Asked(unit, (), name, True, unit.count("{") - unit.count("{{") * 2)
    parent, dot, last = name.rpartition(".")
    for whole, members in fused.items():
        if last in members and len(members) > 1:
            made = tuple(parent + dot + member for member in members)
            return Asked(parent + dot + whole, made, name, False, 99)
    return Asked(name, (name,), name, False, 99)
