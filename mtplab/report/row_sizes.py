"""What rows say of bytes, target and draft together: their weights, a token in their KV caches, a sequence's state.

Reads rows, or dicts with the same fields; puts no number into words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtplab.study.fields import field_of

__all__ = ["SIZES", "kv_bytes", "state_bytes", "weight_bytes"]

Size = Callable[[Any], float | None]


def weight_bytes(row: Any) -> float | None:
    """All weights; None where the row does not say."""
    return _sum(row, "target_weight_bytes", "draft_weight_bytes")


def kv_bytes(row: Any) -> float | None:
    """A token in both caches."""
    return _sum(row, "kv_bytes_per_token", "draft_kv_bytes_per_token")


def state_bytes(row: Any) -> float | None:
    """The recurrent and convolution state of one sequence."""
    return field_of(row, "state_bytes")


#: what a table calls each, and how it is read
SIZES: tuple[tuple[str, Size], ...] = (
    ("weights", weight_bytes),
    ("KV a token", kv_bytes),
    ("state a sequence", state_bytes),
)


def _sum(row: Any, *names: str) -> float | None:
    values = [field_of(row, name) for name in names]
    return None if None in values else sum(values)
