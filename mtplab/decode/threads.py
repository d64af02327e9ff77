"""How many CPU threads a run uses, and which GPU its kernels are launched on.

A pass over a small model is some hundred parallel regions of microseconds. Two threads gain at most a quarter there,
and on a machine that is doing something else too they lose a hundredfold: OpenMP's threads spin at every barrier while
the one they wait for is not running (LOG.md). Knows nothing of what is run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.models import Model

# float32 bytes of weights that a pass reads
SMALL_WEIGHTS = 64 << 20


def thread_count(asked: int | None, weights: int, device: torch.device) -> int:
    """`asked`, or where it is None: one for a small model on a CPU, torch's own setting for any other.

    `weights` is how many a pass reads. OMP_NUM_THREADS in the environment is taken for the user's word on it. Raises
    ConfigError for a number below 1 or beyond any machine's.
    """
    if asked is not None:
        most = max(256, os.cpu_count() or 1)  # more than a machine has are of no use, and OpenMP dies of too many
        if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= most:
            raise ConfigError(f"threads is {asked!r}; expected None or a whole number from 1 to {most}")
        return asked
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if device.type == "cpu" and 4 * weights < SMALL_WEIGHTS and not (told.isdecimal() and int(told)):
        return 1
    return torch.get_num_threads()


def model_threads(model: Model, asked: int | None = None) -> int:
    """`thread_count` for a model's passes."""
    return thread_count(asked, sum(math.prod(module.shape) for module in model.plan.modules), model.device)


@contextmanager
def running_with(threads: int) -> Iterator[None]:
    """Set the number of threads that torch uses from this thread, and set it back."""
    before = torch.get_num_threads()
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton launches there, wherever the tensors are. Nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
