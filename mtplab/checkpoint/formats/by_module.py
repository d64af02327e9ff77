"""Which scheme a module has where a config gives several: by name, by what it lies in, by pattern.

Names are compared with both roots made alike. Knows no format and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mtplab.checkpoint.bounded_regex import BoundedPatterns
from mtplab.checkpoint.formats.base import Scheme
from mtplab.checkpoint.names import normalised

__all__ = ["ByModule"]


class ByModule:
    """`scheme_of` of a config: the scheme of an exact name counts, then of the first pattern, then `default`.

    `below`: a name stands for what lies below it too, the longest first. `globs`: patterns are those of fnmatch.
    """

    def __init__(
        self,
        where: str,
        names: Mapping[str, Scheme],
        patterns: Iterable[tuple[str, Scheme]] = (),
        default: Scheme | None = None,
        below: bool = False,
        globs: bool = False,
    ) -> None:
        self._names: dict[str, Scheme] = {}
        for name, scheme in names.items():
            self._names.setdefault(normalised(name), scheme)
        self._patterns: dict[str, Scheme] = {}
        for pattern, scheme in patterns:
            self._patterns.setdefault(pattern, scheme)
        self._bounded = BoundedPatterns(self._patterns, where, globs=globs)
        self._default, self._below = default, below

    def __call__(self, module: str) -> Scheme | None:
        """The module's scheme. Raises CheckpointError for a pattern that cannot be run."""
        name = normalised(module)
        found = self._names.get(name)
        if found is None and self._below:
            above = name
            while found is None and "." in above:  # at most header.MAX_NAME times
                above = above.rpartition(".")[0]
                found = self._names.get(above)
        if found is None and self._patterns:
            pattern = self._bounded.first(module, name)
            found = self._patterns[pattern] if pattern is not None else None
        return found or self._default
