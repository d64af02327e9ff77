"""The quantised checkpoint formats mtplab reads: one file each, holding a `FORMAT` description.

A new file in this folder is a new format; nothing else needs to name it. What is recognised but not read is
listed in `known.py`, so that an error can say what was found.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from mtplab.checkpoint.config_json import Found
from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme
from mtplab.checkpoint.formats.known import KNOWN_METHODS
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

__all__ = ["Format", "QuantizationConfig", "Scheme", "format_of", "formats", "parse"]


@cache
def formats() -> tuple[Format, ...]:
    """Every format description in this folder."""
    modules = sorted(item.name for item in pkgutil.iter_modules(__path__))
    found = (getattr(importlib.import_module(f"{__name__}.{name}"), "FORMAT", None) for name in modules)
    return tuple(item for item in found if item is not None)


def format_of(method: Any) -> Format | None:
    """The format that answers to this quant_method, or None."""
    return next((item for item in formats() if method in item.methods), None)


def parse(found: Found) -> tuple[Format, QuantizationConfig]:
    """The format and the parsed config of what stands in the checkpoint.

    Raises CheckpointError naming the method found and those that are read.
    """
    method = found.content.get("quant_method")
    fmt = format_of(method)
    if fmt is not None:
        return fmt, fmt.parse(found.content, found.where)
    read = ", ".join(repr(name) for item in formats() for name in item.methods)
    what = KNOWN_METHODS.get(method) if isinstance(method, str) else None
    known = f", {what}" if what else ""
    raise CheckpointError(
        f"{found.where}: quant_method {shown(method)}{known}: expected {read}, or no quantization_config for a plain "
        "BF16, F16 or F32 checkpoint. Convert the checkpoint, or take its BF16 or block-FP8 release."
    )
