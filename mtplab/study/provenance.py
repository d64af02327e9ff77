"""Where a result came from: versions, commit, device, threads, date.

This module knows nothing of points or rows. Nothing here may fail a run: what cannot be found out is None.
No path, host name or user name is recorded, so that a results folder can be published as it is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "collect", "version"]

# where a checkout keeps pyproject.toml and .git; an installed package has neither there
_ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mtplab", "torch", "triton", "numpy", "safetensors", "tokenizers")


def collect(device: str = "cpu", config: dict[str, Any] | None = None) -> dict[str, Any]:
    """JSON-ready facts about this process and machine.

    `device` is a torch device name; `config` (already JSON-ready) is stored as it is.
    """
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "device": _device_name(device),
        "threads": _threads(),
    }
    if config is not None:
        facts["config"] = config
    return facts


@cache
def version(name: str) -> str | None:
    """Version of an installed package, or None. For mtplab, that of the checkout if this is one."""
    if name == "mtplab":
        # the checkout that runs is what counts, whatever an older installed copy says
        with suppress(OSError, ValueError, KeyError):
            return tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def _commit() -> str | None:
    """The commit of mtplab's own checkout, with `+changes` when tracked files differ; None outside one."""
    if not (_ROOT / ".git").exists():
        return None
    head = _git("rev-parse", "HEAD")
    if not head:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


@cache
def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _device_name(device: str) -> str:
    torch = sys.modules.get("torch")
    if torch is None or not str(device).startswith("cuda"):
        return str(device)
    try:
        return f"{device} ({torch.cuda.get_device_name(device)})"
    except Exception:  # a provenance line is no reason to lose a result
        return str(device)


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else None
