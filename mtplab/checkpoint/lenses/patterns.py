"""Entries that are more than a name: the regular expression an engine makes of each, run under a time limit.

Knows nothing of names without special characters, which `matching.py` looks up.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable

from mtplab.checkpoint.bounded_regex import BoundedPatterns
from mtplab.errors import CheckpointError

__all__ = [
    "Patterns",
    "anywhere",
    "full_or_subtree",
    "is_glob",
    "is_plain",
    "matched",
    "simple_glob",
    "to_boundary",
]

_PLAIN = re.compile(r"[\w.\-/]*", re.ASCII)
# numbered and named groups, flags and counts mean something else beside other patterns
_ALONE = re.compile(r"\\[0-9g]|\(\?|\{")
# of expressions tried together, in characters; `bounded_regex` refuses more than 2000
_LONGEST = 1900


class Patterns:
    """Entries that are more than a name, each with the regular expression an engine makes of it.

    Those that can stand side by side in one expression are tried together first, since most match nothing.
    """

    def __init__(self, entries: Iterable[str], where: str, translate: Callable[[str], str]) -> None:
        sources = {entry: translate(entry) for entry in entries}
        chunks: list[dict[str, str]] = [{}]
        size = 0
        for entry, source in sources.items():
            alone = bool(_ALONE.search(entry))
            size += len(source) + 1
            if alone or size > _LONGEST:
                chunks.append({})
                size = _LONGEST if alone else len(source) + 1
            chunks[-1][entry] = source
        self._together = [("|".join(chunk.values()) if len(chunk) > 1 else None, chunk) for chunk in chunks]
        joined = [whole for whole, _ in self._together if whole is not None]
        self._bounded = BoundedPatterns([*sources.values(), *joined], where)
        self.broken: dict[str, str] = {}

    def find(self, *names: str) -> str | None:
        """The first entry that matches one of the names; those that cannot be run are set aside in `broken`."""
        for at, (whole, chunk) in enumerate(self._together):
            if whole is not None:
                try:
                    if not self._bounded.matches(whole, *names):
                        continue
                except CheckpointError:  # which of them it is is found one by one
                    self._together[at] = (None, chunk)
            for entry, source in chunk.items():
                if entry in self.broken:
                    continue
                try:
                    if self._bounded.matches(source, *names):
                        return entry
                except CheckpointError as error:
                    self.broken[entry] = str(error)
        return None


def matched(entry: str) -> str:
    """From the start of a name, without `re:` (re.match)."""
    return f"(?:{entry.removeprefix('re:')})"


def _full(entry: str) -> str:
    return rf"(?:{entry.removeprefix('re:')})\Z"


def anywhere(entry: str) -> str:
    """Anywhere in a name (re.search)."""
    return rf"(?s:.*?)(?:{entry})"


def to_boundary(entry: str) -> str:
    """From the start of a name to a dot or its end (transformers)."""
    return rf"(?:{entry})(?:(?<=\.)|(?=\.|$))"


def simple_glob(entry: str) -> str:
    """The whole text, a star for anything, a dot for itself, the rest as in regular expressions (SGLang)."""
    return rf"(?:{entry.replace('.', chr(92) + '.').replace('*', '.*')})\Z"


def full_or_subtree(entry: str) -> str:
    """TensorRT-LLM's: the whole name, by `re:` or as a glob; `a.*` covers `a` too."""
    if entry.startswith("re:"):
        return _full(entry)
    glob = fnmatch.translate(entry)
    return f"(?:{glob}|{fnmatch.translate(entry[:-2])})" if entry.endswith(".*") else glob


def is_glob(entry: str) -> bool:
    """Whether fnmatch takes the entry for more than a name."""
    return any(char in entry for char in "*?[")


def is_plain(entry: str) -> bool:
    """Whether an entry has no character that means something in a pattern, but for its dots."""
    return bool(_PLAIN.fullmatch(entry))
