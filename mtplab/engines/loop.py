"""A coroutine run to its end, or its limit, in an event loop of its own: from a script, a thread or a notebook's cell.

Knows nothing of what is run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mtplab.errors import MtplabError

__all__ = ["Cancelled", "OutOfTime", "in_loop"]

_LOOK = 0.1  # seconds between two looks at what may end it
T = TypeVar("T")


class Cancelled(MtplabError):
    """It was stopped."""


class OutOfTime(MtplabError):
    """It was not done in its time."""


def in_loop(start: Callable[[], Coroutine[Any, Any, T]], cancel: Any, seconds: float) -> T:
    """What a coroutine gives, in an event loop and a thread of its own.

    It ends, with everything it had under way, when `cancel` is set, when the time is up, and when the thread that waits
    here is interrupted: a Ctrl-C is raised there, and the other thread would go on.

    Raises MtplabError; Cancelled, OutOfTime.
    """
    interrupted = threading.Event()

    async def watched() -> T:
        task = asyncio.ensure_future(start())
        ends = time.monotonic() + seconds
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK)
                if interrupted.is_set() or (cancel is not None and cancel.is_set()):
                    raise Cancelled("stopped")
                if time.monotonic() > ends and not task.done():
                    raise OutOfTime(f"not done within {seconds:g} s")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with ThreadPoolExecutor(1, thread_name_prefix="mtplab-asking") as thread:
        try:
            return thread.submit(lambda: asyncio.run(watched())).result()
        except BaseException:
            interrupted.set()  # the thread is waited for on the way out
            raise
