# RECREATED: the first version of this file (1338 bytes, never committed) was deleted by mistake. This one is
# rebuilt from the interface notes only; its author should compare it with what was meant before committing it.
"""mtplab: FP8 checkpoints with an MTP draft head, from the file to the acceptance they give.

Names are imported when they are first asked for (PEP 562), so that opening a checkpoint needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "MtplabError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "open_checkpoint": "checkpoint",
    "load_model": "models",
    "generate": "decode",
    "sweep": "study",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mtplab' has no attribute {name!r}")
    return getattr(import_module(f"mtplab.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
