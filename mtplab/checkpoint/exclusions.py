"""Which modules are kept out of FP8: the list a checkpoint was published with, and the user's own patterns.

Names and patterns are compared with both roots made alike (`model.layers` / `model.language_model.layers`).
Knows nothing of dtypes; what an exclusion does to a module is decided in `plan.py`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Iterable, Sequence

from mtplab.checkpoint.bounded_regex import FIRST_SECONDS, MODULE_SECONDS, BoundedPatterns
from mtplab.checkpoint.names import nearest, normalised
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError, ConfigError

__all__ = ["PRESETS", "PUBLISHED", "ListedModules", "UserPatterns", "parse_exclude"]

PRESETS = ("published", "none")

# what is kept in high precision by default when plain weights are quantised, as they are loaded or in a file, as globs
# over normalised names. A vision tower is no part of what is run, and stays whatever is asked.
PUBLISHED: tuple[str, ...] = (
    # what Qwen's block-FP8 releases keep (Qwen3.5-27B-FP8, Qwen3-Next-80B-A3B-FP8: modules_to_not_convert)
    "lm_head",
    "*embed_tokens",
    "*norm",
    "*.linear_attn.conv1d",
    "*.linear_attn.in_proj_a",
    "*.linear_attn.in_proj_b",
    "*.linear_attn.in_proj_ba",
    "*.mlp.shared_expert_gate",
    "mtp.fc",
    # what other families do: routers, and a draft head's copy of the vocabulary head and what joins its two inputs
    "*.gate",
    "*.router",
    "*.router.*",
    "*.eh_proj",
    "*.mtp_layers.*.input_proj",
    "*.shared_head.head",
    "*.shared_head.output",
    "*.self_attn.g_proj",  # a row a head: Step-3.5's 64 are no whole block
)

# a module lies at most so deep
_DEPTHS = frozenset(range(1, 65))
_LITERAL = re.compile(r"[\w.\-/]*", re.ASCII)


class ListedModules:
    """A published exclusion list, asked module by module.

    An entry counts for a module it names in full, for what lies below it (`mtp`: `mtp.fc`), and as the end of
    its name at a dot (`in_proj_a`), which together is what the writers of HF `fp8` files mean by it; with
    other characters it is a regular expression from the start of the name to a dot or its end, as
    transformers reads it; without `to_end`, to anywhere, as compressed-tensors does.
    """

    def __init__(self, entries: Iterable[str], where: str, to_end: bool = True) -> None:
        self._where = where
        self._to_end = to_end
        self._literal: dict[str, str] = {}
        self._patterns: list[str] = []
        for entry in entries:
            if _LITERAL.fullmatch(entry):
                self._literal.setdefault(normalised(entry).rstrip("."), entry)
            else:
                self._patterns.append(entry)
        self._literal.pop("", None)
        # how many parts the entries have that can be part of a name: a name is cut at these only
        self._depths = sorted({key.count(".") + 1 for key in self._literal} & _DEPTHS)
        self._bounded = BoundedPatterns(self._patterns, where, to_module_end=to_end)
        self.matched: set[str] = set()

    def entry_for(self, module: str) -> str | None:
        """The entry that covers the module, or None.

        Raises CheckpointError for a pattern that is no regular expression or takes longer than
        bounded_regex.PATTERN_SECONDS.
        """
        if not self._literal and not self._patterns:
            return None
        name = normalised(module)
        entry = self._literal.get(name)
        if entry is None and self._literal:
            parts = name.split(".")
            depths = [depth for depth in reversed(self._depths) if depth < len(parts)]  # the longest entry first
            keys = (*(".".join(parts[-depth:]) for depth in depths), *(".".join(parts[:depth]) for depth in depths))
            entry = next((self._literal[key] for key in keys if key in self._literal), None)
        if entry is None and self._patterns:
            entry = self._bounded.first(module, name)
        if entry is not None:
            self.matched.add(entry)
        return entry

    @property
    def has_patterns(self) -> bool:
        """Whether an entry is a regular expression rather than a name."""
        return bool(self._patterns)

    def unmatched(self, modules: Sequence[str]) -> list[str]:
        """Entries that cover none of `modules`: what they were to protect is not protected."""
        left = {key: entry for key, entry in self._literal.items() if entry not in self.matched}
        for module in modules if left else ():
            name = normalised(module)
            parts = name.split(".")
            left.pop(name, None)
            for depth in self._depths:
                left.pop(".".join(parts[:depth]), None)
                left.pop(".".join(parts[-depth:]), None)
        undecided = [item for item in self._patterns if item not in self.matched]
        return [*left.values(), *self._idle_patterns(undecided, modules)]

    def _idle_patterns(self, patterns: list[str], modules: Sequence[str]) -> list[str]:
        """Of patterns that decided nothing, those that match nothing either; the others only came second.

        Within the time that patterns have in all; what is left then is not reported.
        """
        seconds = FIRST_SECONDS / 2 + MODULE_SECONDS * len(modules)
        bounded = BoundedPatterns(patterns, self._where, to_module_end=self._to_end, seconds=seconds)
        idle: list[str] = []
        with contextlib.suppress(CheckpointError):
            for item in patterns:
                if not any(bounded.matches(item, module, normalised(module)) for module in modules):
                    idle.append(item)
        return idle


def parse_exclude(exclude: str | Sequence[str] | None, option: str = "exclude") -> tuple[str, ...] | None:
    """The user's exclusion setting as a tuple of globs and presets; None means "as published".

    Raises ConfigError for anything but None, a string or a sequence of strings.
    """
    if exclude is None:
        return None
    items = (exclude,) if isinstance(exclude, str) else exclude
    if not isinstance(items, Sequence | set | frozenset) or not all(isinstance(item, str) and item for item in items):
        raise ConfigError(
            f"{option}={shown(exclude)}: expected None, 'published', 'none', or a list of module names and globs."
        )
    found = tuple(dict.fromkeys(items))
    if "none" in found and len(found) > 1:
        raise ConfigError(
            f"{option}={list(found)}: expected 'none' to stand alone. Leave it out to exclude the others."
        )
    return found


class UserPatterns:
    """The user's exclusions for one part of the model, asked module by module."""

    def __init__(self, items: tuple[str, ...] | None, published: tuple[str, ...]) -> None:
        self.as_published = items is None or "published" in items
        own = () if items is None else tuple(item for item in items if item not in PRESETS)
        self._own = [(item, *_glob(item)) for item in own]
        self._published = [(item, *_glob(item)) for item in published] if self.as_published else []

    def own_pattern(self, module: str) -> str | None:
        """The user's own pattern that covers the module, or None."""
        return _first(self._own, module)

    def published_pattern(self, module: str) -> str | None:
        """The pattern of the "published" preset that covers the module, or None where it is not asked for."""
        return _first(self._published, module)

    def check(self, modules: Sequence[str], option: str) -> None:
        """Raises ConfigError for a pattern of the user's that covers none of `modules`."""
        for item, raw, plain in self._own:
            if not any(_covers(raw, plain, module) for module in modules):
                near = ", ".join(map(shown, nearest(item, modules)))
                raise ConfigError(
                    f"{option}: {shown(item)} matches no module of the checkpoint: expected names as they stand on "
                    f"disk, globs, 'published' or 'none'. " + (f"Nearest: {near}." if near else "")
                )


def _glob(item: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    item = item.removesuffix(".weight")
    return re.compile(fnmatch.translate(item)), re.compile(fnmatch.translate(normalised(item)))


def _covers(raw: re.Pattern[str], plain: re.Pattern[str], module: str) -> bool:
    return bool(raw.match(module) or plain.match(normalised(module)))


def _first(patterns: Sequence[tuple[str, re.Pattern[str], re.Pattern[str]]], module: str) -> str | None:
    return next((item for item, raw, plain in patterns if _covers(raw, plain, module)), None)
