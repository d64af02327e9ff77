"""A result row's field, whether it is a `ResultRow` or a dict with the same names, as an exported row is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["field_of"]


def field_of(row: Any, name: str) -> Any:
    """The field of this name; None where there is none."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)
