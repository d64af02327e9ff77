"""mtplab: a research workbench for FP8 models with an MTP draft head.

The names below are loaded on first use (PEP 562), so that `import mtplab`, the command line's `--help` and the
header-only checkpoint tools start without importing torch. This file knows where they are, and nothing of what they do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "MtplabError": "mtplab.errors",
    "CheckpointError": "mtplab.errors",
    "ConfigError": "mtplab.errors",
    "open_checkpoint": "mtplab.checkpoint",
    "quantize_checkpoint": "mtplab.checkpoint.convert",
    "load_model": "mtplab.models",
    "generate": "mtplab.decode",
    "Cancelled": "mtplab.decode",
    "sweep": "mtplab.study",
    "trace": "mtplab.study.trace",
    "compare_caches": "mtplab.study.cache_study",
    "compare_hidden": "mtplab.study.hidden",
    "memory": "mtplab.models.memory",
    "numerics": "mtplab.study.numerics",
    "compare": "mtplab.report.comparison",
}

__all__ = [
    "Cancelled",
    "CheckpointError",
    "ConfigError",
    "MtplabError",
    "__version__",
    "compare",
    "compare_caches",
    "compare_hidden",
    "generate",
    "load_model",
    "memory",
    "numerics",
    "open_checkpoint",
    "quantize_checkpoint",
    "sweep",
    "trace",
]

if TYPE_CHECKING:
    from mtplab.checkpoint import open_checkpoint
    from mtplab.checkpoint.convert import quantize_checkpoint
    from mtplab.decode import Cancelled, generate
    from mtplab.errors import CheckpointError, ConfigError, MtplabError
    from mtplab.models import load_model
    from mtplab.models.memory import memory
    from mtplab.report.comparison import compare
    from mtplab.study import sweep
    from mtplab.study.cache_study import compare_caches
    from mtplab.study.hidden import compare_hidden
    from mtplab.study.numerics import numerics
    from mtplab.study.trace import trace


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mtplab' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
