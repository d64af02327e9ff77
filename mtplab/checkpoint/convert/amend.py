"""The config of an FP8 checkpoint whose layout stays, with more modules listed as kept out of FP8.

How a list is written is each format's to say; everything else in its config stays as it stands.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mtplab.checkpoint.formats import format_of, formats
from mtplab.errors import ConfigError

__all__ = ["amended"]


def amended(content: dict[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """A copy of a quantisation config in which `modules`, by full name, are not FP8.

    Raises ConfigError for a method whose config has no list that could say so.
    """
    if not modules:
        return copy.deepcopy(content)
    method = content.get("quant_method")
    fmt = format_of(method)
    if fmt is None or not fmt.can_keep_more:
        able = ", ".join(name for item in formats() if item.can_keep_more for name in item.methods)
        raise ConfigError(
            f"a checkpoint of {method} cannot say in its config that further modules are not FP8: expected one of "
            f"{able}. Give --format and --layout to write it anew."
        )
    return fmt.with_list(content, modules, add=True)
