"""What every benchmark's command line needs. Knows nothing of what is measured."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["cpu_name", "positive"]


def positive(text: str) -> int:
    """A whole number from 1 up. Raises ValueError, which argparse reports, for any other."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def cpu_name() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
