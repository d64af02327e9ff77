"""A result row's field or a fact of its provenance, whether it is a `ResultRow` or a dict with the same names, as an
exported row is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["fact_of", "field_of", "has_length"]


def field_of(row: Any, name: str) -> Any:
    """The field of this name; None where there is none."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def fact_of(row: Any, *path: str) -> Any:
    """What the row's provenance holds under these keys, one inside the other; None where it does not say."""
    value = field_of(row, "provenance")
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def has_length(row: Any) -> bool:
    """Whether the row has an acceptance length: it did not fail, and there were rounds."""
    return field_of(row, "error") is None and field_of(row, "acceptance_length") is not None
