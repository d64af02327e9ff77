"""Python's cycle collector, kept still while many small objects are made that live on.

A large checkpoint is 100 000 tensors and as many modules, none of them in a cycle; looking through all of them again
and again as more are made takes a quarter of an audit (LOG.md).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_still"]


@contextmanager
def collector_still() -> Iterator[None]:
    """No collection of cycles while this lasts, in any thread; set back as it was, also after an error."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
