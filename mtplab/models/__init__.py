"""Models: layers, one small file per family, and the loader that turns checkpoint names into parameters.

The names below are imported when they are first asked for: what a load will cost is said without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_WHERE = {"Model": "model", "ModelConfig": "config", "load_model": "model"}

__all__ = ["Model", "ModelConfig", "load_model"]

if TYPE_CHECKING:
    from mtplab.models.config import ModelConfig
    from mtplab.models.model import Model, load_model


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mtplab.models' has no attribute {name!r}")
    return getattr(import_module(f"mtplab.models.{_WHERE[name]}"), name)
