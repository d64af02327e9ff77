"""Bytes by part of the model and storage dtype. Knows nothing of what is right or wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["PARTS", "bytes_by_part", "part_shown"]

PARTS = ("embedding", "target", "target experts", "head", "draft", "draft experts", "not loaded")


def part_shown(module: Any) -> str:
    """The row of the table a planned module belongs to; experts apart, since they decide a mixture's size."""
    if module.part == "unused":
        return "not loaded"
    if module.part in ("target", "draft") and ".experts." in f"{module.name}.":
        return f"{module.part} experts"
    return module.part


def bytes_by_part(modules: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Part → dtype as stored → bytes, scales and biases with the weight they belong to. In the order of PARTS."""
    found: dict[str, dict[str, int]] = {}
    for module in modules:
        row = found.setdefault(part_shown(module), {})
        row[module.stored] = row.get(module.stored, 0) + module.nbytes
    return {part: found[part] for part in PARTS if part in found}
