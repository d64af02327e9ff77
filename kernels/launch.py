"""What every launcher shares: which implementation runs, and how a wrong argument is told.

Knows no kernel. Nothing here needs a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

import torch

from mtplab.kernels.targets import TARGETS, Target
from mtplab.kernels.variants import UNITS

__all__ = [
    "CHOICES",
    "FLOATS",
    "VARIABLE",
    "check",
    "check_together",
    "chosen",
    "interpreted",
    "processors",
    "reason",
    "step",
    "target",
    "unit_of",
]

# what activations, queries and caches are computed in
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
VARIABLE = "MTPLAB_KERNELS"
CHOICES = ("auto", "triton", "reference")


def chosen(device: torch.device) -> str:
    """"triton" or "reference" for tensors on this device.

    By default Triton's kernels on a GPU, the torch references on a CPU; the environment's MTPLAB_KERNELS forces one or
    the other. Raises ValueError for another value, and for Triton on a CPU without its interpreter.
    """
    return _decide(device)[0]


def reason(device: torch.device) -> str:
    """Why `chosen` says what it says, in a few words."""
    return _decide(device)[1]


def _decide(device: torch.device) -> tuple[str, str]:
    asked = os.environ.get(VARIABLE, "auto") or "auto"
    if asked not in CHOICES:
        raise ValueError(f"{VARIABLE} is {asked!r}; expected one of {', '.join(CHOICES)}")
    if asked == "reference":
        return "reference", f"{VARIABLE}=reference"
    if device.type == "cpu":
        if asked == "auto":
            return "reference", "Triton compiles for GPUs only, and this is a CPU"
        if not interpreted():
            raise ValueError(
                f"{VARIABLE}=triton on a CPU needs Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
            )
        return "triton", f"{VARIABLE}=triton, interpreted"
    if not _has_triton():
        if asked == "triton":
            raise ValueError(f"{VARIABLE}=triton, but triton is not installed")
        return "reference", "triton is not installed"
    found, known = _architecture(device)
    if known is None:
        if asked == "triton":
            raise ValueError(f"{VARIABLE}=triton, but this GPU is {found}; the kernels are for {', '.join(TARGETS)}")
        return "reference", f"this GPU is {found}, and the kernels are for {', '.join(TARGETS)}"
    return "triton", f"a GPU, {found}" if asked == "auto" else f"{VARIABLE}=triton"


@cache
def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter, which it then corrects (`interpreter.py`)."""
    if not _has_triton() or os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from mtplab.kernels.interpreter import correct

    correct()
    return True


@cache
def target(device: torch.device) -> Target:
    """The entry of `TARGETS` whose choices hold on this device; sm_90's for a CPU, where kernels are interpreted.

    Raises ValueError for a GPU that has none.
    """
    if device.type == "cpu":
        return TARGETS["sm_90"]
    found, known = _architecture(device)
    if known is None:
        raise ValueError(f"this GPU is {found}; the FP8 kernels are for {', '.join(TARGETS)}")
    return known


@cache
def _architecture(device: torch.device) -> tuple[str, Target | None]:
    """What a GPU is, and which of the targets serves it: its own, or the one of its family."""
    if torch.version.hip is not None:
        name = found = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability(device)
        found = f"sm_{major}{minor}"
        name = {10: "sm_100", 12: "sm_120"}.get(major, found)
    return found, TARGETS.get(name)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of the device; an H100's 132 for a CPU."""
    return 132 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def step(x: torch.Tensor | None) -> int:
    """Elements from one row to the next; 0 of nothing. torch lets the stride of a single row be any number."""
    if x is None:
        return 0
    return x.stride(-2) if x.shape[-2] > 1 else x.shape[-1]


def unit_of(sizes: Iterable[int], *tensors: torch.Tensor, unit: int = UNITS[0]) -> int:
    """What a kernel gets sizes and strides in: `unit`, or 1 where one of them is no multiple of it.

    The tensors must lie at multiples of 16 bytes too.
    """
    fits = all(size % unit == 0 for size in sizes) and all(x.data_ptr() % 16 == 0 for x in tensors)
    return unit if fits else 1


def check_together(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors that are not all on one device: a kernel would read an address that is another's.

    Raises ValueError. Triton looks at plain pointers itself, but not at what a tensor descriptor points to.
    """
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{found}; expected all on one device")


def check(name: str, x: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse a tensor of another rank, size (None: any) or dtype, with what was found and what was expected.

    Raises ValueError; a launcher that is given garbage would read beyond it.
    """
    sizes = zip(x.shape, shape, strict=False)
    if x.dim() != len(shape) or any(want is not None and have != want for have, want in sizes):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(x.shape)}; expected [{wanted}]")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype}; expected {' or '.join(map(str, dtypes))}")
