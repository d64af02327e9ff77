"""Checkpoints written as other checkpoints: to FP8 in a layout of choice, to BF16, with more or less kept out.

Knows nothing of layers or runs. What converts needs torch and is loaded on first use: what is to be written
(`decide.py`, `layouts/`) is known from headers alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["FORMATS", "Written", "quantize_checkpoint"]

if TYPE_CHECKING:
    from mtplab.checkpoint.convert.quantize import FORMATS, Written, quantize_checkpoint


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.quantize"), name)
