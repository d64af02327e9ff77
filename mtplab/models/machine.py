"""How much memory this machine has to give, and giving back what loading no longer uses.

Knows nothing of models. Imports torch only to ask a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

from mtplab.errors import ConfigError

__all__ = ["available_memory", "give_back", "shortage_said"]

_MEMINFO = Path("/proc/meminfo")
# (limit, in use, a file whose line `inactive_file` is a cache that makes room when asked) of cgroups 2 and 1
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def available_memory(device: str = "cpu") -> tuple[int | None, str]:
    """(bytes that can be had without swapping, whose they are); None where this machine does not say or has no such
    device."""
    if not device.startswith("cpu"):
        return _gpu(device)
    found: list[tuple[int, str]] = []
    with contextlib.suppress(OSError, ValueError, StopIteration, IndexError):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append((int(line.split()[1]) * 1024, "memory available (MemAvailable)"))
    for limit, used, stat in _CGROUPS:
        # "max", and a version 1 without a limit says a number no machine has
        with contextlib.suppress(OSError, ValueError):
            room = int(Path(limit).read_text()) - int(Path(used).read_text()) + _inactive(Path(stat))
            found.append((max(0, room), "memory left under the limit of this container (cgroup)"))
    return min(found, default=(None, "this system does not say how much memory is available"))


def _inactive(stat: Path) -> int:
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("inactive_file", 0))


def _gpu(device: str) -> tuple[int | None, str]:
    import torch

    if not torch.cuda.is_available():
        return None, f"torch sees no GPU here for {device!r}"
    place = torch.device(device)
    if (place.index or 0) >= torch.cuda.device_count():
        return None, f"torch sees {torch.cuda.device_count()} GPUs, and none is {device!r}"
    return torch.cuda.mem_get_info(place)[0], f"memory free on {torch.cuda.get_device_name(place)}"


@contextlib.contextmanager
def shortage_said(what: object) -> Iterator[None]:
    """Makes running out of memory an error that says so, of torch's kinds and Python's. Raises ConfigError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        torchs = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
        if not (torchs or isinstance(error, MemoryError)):
            raise
        raise ConfigError(
            f"{what}: memory ran out while its weights were read ({' '.join(str(error).split())[:200]}). "
            "`mtplab doctor PATH` says what they take; try dtype='bfloat16', another device or a smaller model."
        ) from None


def give_back() -> None:
    """Return to the system what the C library keeps of freed memory: up to 64 MB and the gaps, after a load."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc has no such function
            ctypes.CDLL(None).malloc_trim(0)
