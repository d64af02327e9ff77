"""Regular expressions out of files nobody vouches for, run under a time limit.

Knows nothing of what the patterns are for.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

__all__ = ["ALL_PATTERNS_SECONDS", "PATTERN_SECONDS", "BoundedPatterns"]

# of a processor, for one pattern of a checkpoint, and all of them, over all its modules
PATTERN_SECONDS, ALL_PATTERNS_SECONDS = 0.2, 2.0
# where `first` asks them all of each module: together, and for each module beside. DeepSeek-V3 has 46 000 modules, for
# which a few honest patterns take half a second
FIRST_SECONDS, MODULE_SECONDS = 0.6, 100e-6
_TRIES = 5
_UNTIMED = 64  # patterns between two looks at the clock
_MAX_PATTERN = 2000
_MAX_REPEATS = 1000
_COUNTED = re.compile(r"\{[^{}]*[0-9][^{}]*\}")


class BoundedPatterns:
    """The patterns of one list, matched from a name's start; a leading `re:` is taken off.

    `to_module_end`: what a pattern matches must end at a dot or the name's end (transformers), else anywhere
    (compressed-tensors). `globs`: they are fnmatch's, and match whole names. `where` names the list in messages.
    `seconds`: of all of them together, where they are asked one by one.
    """

    def __init__(
        self,
        patterns: Iterable[str],
        where: str,
        to_module_end: bool = False,
        globs: bool = False,
        seconds: float = ALL_PATTERNS_SECONDS,
    ) -> None:
        self._where = where
        self._template = "*" if globs else r"(?:{})(?:\.|$)" if to_module_end else "{}"
        self._spent = dict.fromkeys(patterns, 0.0)
        self._left = self._all = seconds
        self._compiled: dict[str, Any] = {}

    def first(self, *texts: str) -> str | None:
        """The first pattern of the list that matches any of `texts`, the names of one module, from its start, or None.

        Raises CheckpointError for one that is no regular expression, and where one of them or all together have used
        up their time.
        """
        if self._all != FIRST_SECONDS:
            self._left = self._all = FIRST_SECONDS
        self._left += MODULE_SECONDS
        names = tuple(dict.fromkeys(texts))
        begun = time.thread_time()
        pattern = None
        try:
            # looking at a clock takes as long as a match
            for count, pattern in enumerate(self._spent, 1):
                if not count % _UNTIMED and time.thread_time() - begun > self._left:
                    raise self._slow(pattern, len(self._spent) == 1)
                compiled = self._compiled.get(pattern) or self._compile(pattern)
                for name in names:
                    if _match(compiled, name, PATTERN_SECONDS):
                        return pattern
        except TimeoutError:
            raise self._slow(pattern or "", True) from None
        finally:
            self._left -= time.thread_time() - begun
        if self._left <= 0:
            raise self._slow(pattern or "", len(self._spent) == 1)
        return None

    def matches(self, pattern: str, *texts: str) -> bool:
        """Whether the pattern, one of the list, matches any of `texts` from its start. Raises as `first` does."""
        compiled = self._compiled.get(pattern) or self._compile(pattern)
        for text in dict.fromkeys(texts):
            left = min(PATTERN_SECONDS - self._spent[pattern], self._left)
            if left <= 0:
                raise self._slow(pattern, self._spent[pattern] >= PATTERN_SECONDS)
            # around the match alone: whatever makes objects may be stopped to collect garbage
            begun = time.thread_time()
            try:
                found = _match(compiled, text, left)
            except TimeoutError:
                self._spent[pattern] = PATTERN_SECONDS
                raise self._slow(pattern, True) from None
            finally:
                spent = time.thread_time() - begun
                # what a linear match of a name takes is no pattern's fault
                self._spent[pattern] += max(0.0, spent - MODULE_SECONDS)
                self._left -= spent
            if found:
                return True
        return False

    def _compile(self, pattern: str) -> Any:
        import regex  # the standard library's re has no time limit

        begun = time.thread_time()
        try:
            compiled = self._compiled[pattern] = _compile(pattern, self._template)
        except (regex.error, RecursionError, OverflowError, ValueError) as error:
            why = f"is neither a module name nor a regular expression that is tried: {str(error)[:120]}."
            raise self._refused(pattern, why) from None
        finally:
            if self._all != FIRST_SECONDS:  # `first` counts it
                self._left -= time.thread_time() - begun
        return compiled

    def _slow(self, pattern: str, alone: bool) -> CheckpointError:
        if alone:
            why = f"takes more than {PATTERN_SECONDS} s to match: expected a module name or a simple pattern."
            return self._refused(pattern, why)
        return CheckpointError(
            f"{self._where}: its {len(self._spent)} patterns, {shown(pattern)} among them, take more than "
            f"{self._all} s to match: expected module names, or a few patterns. Shorten the list."
        )

    def _refused(self, pattern: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: the pattern {shown(pattern)} {why} Rewrite the entry.")


def _match(compiled: Any, text: str, seconds: float) -> bool:
    """Whether the text matches from its start. Raises TimeoutError where that takes longer."""
    for _ in range(_TRIES):
        begun = time.thread_time()
        try:
            return compiled.match(text, timeout=seconds) is not None
        except TimeoutError:  # by the clock, which goes on while others have the processor
            if time.thread_time() - begun > seconds / 2:
                raise
    raise TimeoutError


@lru_cache(maxsize=1024)
def _compile(pattern: str, template: str) -> Any:
    import fnmatch

    import regex

    if len(pattern) > _MAX_PATTERN:
        raise ValueError(f"{len(pattern)} characters long, expected at most {_MAX_PATTERN}")
    if template == "*":
        return regex.compile(fnmatch.translate(pattern))
    # the regex package unrolls counted repeats as it compiles: (a{65535}){65535} takes all memory there is
    repeats = math.prod(max(map(int, re.findall("[0-9]+", count))) for count in _COUNTED.findall(pattern))
    if repeats > _MAX_REPEATS:
        raise ValueError(f"its counted repeats multiply to {repeats}, expected at most {_MAX_REPEATS}")
    body = pattern.removeprefix("re:")
    if not any(char in body for char in "\\^$()[]{}|+?") and "*" in body and ".*" not in body:
        return regex.compile(fnmatch.translate(body))  # a plain glob, as some hand-written lists have
    return regex.compile(template.format(body) if template != "{}" else body)
