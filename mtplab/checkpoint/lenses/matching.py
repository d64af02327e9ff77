"""How engines match the entries of an exclusion list with the names they ask with.

Every rule answers for one unit: a module, a fused module with its members, or a layer's routed experts, which all
engines build as one. Entries without special characters are looked up in sets; the rest run under a time limit.
Knows nothing of configs nor of which engine has which rule.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mtplab.checkpoint.lenses.patterns import (
    Patterns,
    anywhere,
    full_or_subtree,
    is_glob,
    is_plain,
    matched,
    simple_glob,
    to_boundary,
)
from mtplab.checkpoint.strict_json import shown

__all__ = ["BLOCK", "RULES", "Answer", "Rule", "Targets", "Unit"]

# opens what is no entry but a part of the model that alone is quantised (auto-round's block_name_to_quantize)
BLOCK = "block:"
_OUTSIDE = "block_name_to_quantize leaves it out"

# what auto-round's readers take for a sign that a key is a regular expression
_SPECIAL = frozenset("*+?^$()[]{}|\\")


class Unit(NamedTuple):
    """What an engine asks for at once: its name there, its members' names (itself if not fused), experts or not."""

    name: str
    members: tuple[str, ...]
    experts: bool = False

    @property
    def fused(self) -> bool:
        """Whether several modules of the file are asked for as one, routed experts not counted."""
        return not self.experts and self.members != (self.name,)


class Answer(NamedTuple):
    """Whether a unit is kept out: True, False, or None where the engine stops; and the entry, or why it stops."""

    excluded: bool | None
    by: str


_NO = Answer(False, "")


class _Within:
    """Which entry has a name in it: one search through all entries at once."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._text = "\0" + "\0".join(entries) + "\0"

    def find(self, name: str) -> str | None:
        at = self._text.find(name)
        if at < 0:
            return None
        return self._text[self._text.rfind("\0", 0, at) + 1 : self._text.find("\0", at)]


class Rule:
    """The entries of one list, as one engine reads them.

    `members` of a fused module must be kept out together: an engine that builds them as one stops at a mixture.
    """

    def __init__(self, entries: Sequence[str], where: str) -> None:
        self.entries = list(dict.fromkeys(entries))
        self._names = set(self.entries)
        self.patterns: Patterns | None = None
        self._prepare(where)

    @property
    def broken(self) -> dict[str, str]:
        """Entries that are no pattern or took too long, and what was said of them."""
        return self.patterns.broken if self.patterns is not None else {}

    def answer(self, unit: Unit) -> Answer:
        """Whether the list keeps a unit out, and by which entry; None with the reason where the engine stops."""
        entry = self.find(unit.name)
        return _NO if entry is None else Answer(True, entry)

    def find(self, name: str) -> str | None:
        """The entry that covers a single name, or None."""
        return name if name in self._names else None

    def _prepare(self, where: str) -> None:
        pass

    def _together(self, unit: Unit, find: Callable[[str], str | None]) -> Answer:
        found = [find(member) for member in unit.members]
        if all(entry is None for entry in found):
            return _NO
        if None in found:
            at = next(i for i, entry in enumerate(found) if entry is not None)
            missed = unit.members[found.index(None)]
            return Answer(
                None,
                f"{shown(found[at])} covers {_last(unit.members[at])} but nothing covers {_last(missed)}, and "
                f"{_last(unit.name)} is built as one",
            )
        return Answer(True, str(found[0]))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


class _FullName(Rule):
    """vLLM's `fp8` and `fbgemm_fp8`: full names; with "experts" in its name, a module inside an entry."""

    def _prepare(self, where: str) -> None:
        self._experts = _Within(entry for entry in self.entries if "experts" in entry)

    def answer(self, unit: Unit) -> Answer:
        if unit.fused:
            return Answer(True, unit.name) if unit.name in self._names else self._together(unit, self._whole)
        found = self._experts.find(unit.name) if "experts" in unit.name else self._whole(unit.name)
        return _NO if found is None else Answer(True, found)

    def _whole(self, name: str) -> str | None:
        return name if name in self._names else None

    def find(self, name: str) -> str | None:
        return self._experts.find(name) if "experts" in name else self._whole(name)


class _FullNameThenInside(_FullName):
    """vLLM's ModelOpt: full names, then an entry anywhere inside the name, then globs."""

    def _prepare(self, where: str) -> None:
        super()._prepare(where)
        self._literal = [entry for entry in self.entries if not is_glob(entry)]
        self.patterns = Patterns(filter(is_glob, self.entries), where, fnmatch.translate)

    def answer(self, unit: Unit) -> Answer:
        first = super().answer(unit)
        if first.excluded is not False:
            return first
        found = self.find(unit.name)
        return _NO if found is None else Answer(True, found)

    def find(self, name: str) -> str | None:
        inside = next((entry for entry in self._literal if entry in name), None)
        return inside if inside is not None or self.patterns is None else self.patterns.find(name)


class _NameOrRegex(Rule):
    """compressed-tensors and Quark: a full name, or `re:` and a regular expression matched from the start."""

    direct = True  # an entry may name the fused module itself
    children = False  # an entry for one expert keeps all of them out

    def _prepare(self, where: str) -> None:
        self.patterns = Patterns((e for e in self.entries if e.startswith("re:")), where, matched)
        self._above: set[str] = set()
        for entry in self.entries if self.children else ():
            head, experts, _ = entry.partition(".experts.")
            if experts:
                self._above.add(head + ".experts")

    def find(self, name: str) -> str | None:
        if name in self._names:
            return name
        return self.patterns.find(name) if self.patterns is not None else None

    def answer(self, unit: Unit) -> Answer:
        if self.children:
            if unit.name in self._above and unit.experts:
                return Answer(True, unit.name + ".…")
            if unit.experts:
                return super().answer(unit)
        if unit.experts:
            return self._together(unit, self.find)
        if not unit.fused:
            return super().answer(unit)
        found = self.find(unit.name) if self.direct else (unit.name if unit.name in self._names else None)
        return Answer(True, found) if found is not None else self._together(unit, self.find)


class _NameOrRegexOrChild(_NameOrRegex):
    children = True


class _SuffixOrRegex(_NameOrRegex):
    """SGLang's compressed-tensors: as above, and a name's end from a dot on."""

    direct = False

    def find(self, name: str) -> str | None:
        if name in self._names:
            return name
        for start in _dots(name):
            if name[start:] in self._names:
                return name[start:]
        return self.patterns.find(name) if self.patterns is not None else None


class _NameOrRegexEach(_NameOrRegex):
    """compressed-tensors itself, which meets no fused modules."""

    def answer(self, unit: Unit) -> Answer:
        return Rule.answer(self, unit)


# vLLM's and SGLang's classes of linear layers, in which they look for a target as a part, whatever its case
_CLASSES = "mergedcolumnparallellinear qkvparallellinear rowparallellinear replicatedlinear"


class Targets:
    """The targets of compressed-tensors' config groups: names, `re:` patterns, or classes of modules."""

    def __init__(self, targets: Iterable[str], where: str, class_parts: bool) -> None:
        self._rule = _NameOrRegex(list(targets), where)
        plain = [target for target in self._rule.entries if not target.startswith("re:")]
        self._linear = next(
            (t for t in plain if t == "Linear" or (class_parts and t and t.lower() in _CLASSES and "." not in t)), None
        )

    def find(self, unit: Unit) -> str | None:
        """The target that covers a unit (all members of a fused one), or None."""
        found = self._rule.find(unit.name)
        if found is None:
            members = [self._rule.find(member) for member in unit.members]
            found = members[0] if members and None not in members else None
        return found or self._linear


class _Segments(Rule):
    """A run of whole segments anywhere in the name (torchao in vLLM)."""

    def _prepare(self, where: str) -> None:
        self._names = {entry.rstrip(".") for entry in self.entries}
        self._longest = max((entry.count(".") + 1 for entry in self._names), default=0)

    def find(self, name: str) -> str | None:
        parts = name.split(".")
        for start in range(len(parts)):
            for end in range(start + 1, min(len(parts), start + self._longest) + 1):
                piece = ".".join(parts[start:end])
                if piece in self._names:
                    return piece
        return None


class _SegmentsFused(_Segments):
    """SGLang's `fp8`: runs of segments, members of a fused module together, experts also inside an entry."""

    def _prepare(self, where: str) -> None:
        super()._prepare(where)
        self._experts = _Within(entry for entry in self.entries if "experts" in entry)

    def answer(self, unit: Unit) -> Answer:
        if unit.fused:
            return self._together(unit, self._run)
        found = self.find(unit.name)
        return _NO if found is None else Answer(True, found)

    def _run(self, name: str) -> str | None:
        return super().find(name)

    def find(self, name: str) -> str | None:
        found = self._run(name)
        return self._experts.find(name) if found is None and "experts" in name else found


class _SegmentGlob(_SegmentsFused):
    """SGLang's ModelOpt: as its `fp8`, then a glob over the whole name or any one segment of it."""

    # one of these inside a fused name's last segment is enough
    _pieces = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

    def _prepare(self, where: str) -> None:
        super()._prepare(where)
        self.patterns = Patterns((e for e in self.entries if not is_plain(e)), where, simple_glob)
        self._tails = {piece: e for e in self.entries if (piece := _last(e)) in self._pieces}

    def answer(self, unit: Unit) -> Answer:
        first = _NO if unit.experts else super().answer(unit)
        if first.excluded is not False:
            return first
        found = self._glob(unit.name)
        return _NO if found is None else Answer(True, found)

    def _glob(self, name: str) -> str | None:
        parts = name.split(".")
        pieces = (name, *parts)
        if parts[0] == "language_model":
            pieces = (name, name.removeprefix("language_model."), *parts)
        for piece in pieces:
            if piece in self._names:
                return piece
        for piece, entry in self._tails.items():
            if piece in parts[-1]:
                return entry
        return self.patterns.find(*pieces) if self.patterns is not None else None


class _Around(Rule):
    """lmdeploy: the module's name is inside an entry; lists are widened to the fused modules beforehand."""

    def _prepare(self, where: str) -> None:
        self._all = _Within([*self.entries, *_widened(self.entries)])

    def find(self, name: str) -> str | None:
        return self._all.find(name)


def _widened(entries: Iterable[str]) -> list[str]:
    """What lmdeploy adds for fused modules: by the first member alone, and by any projection of an expert."""
    added = []
    for entry in entries:
        if ".q_proj" in entry:
            added.append(entry.replace(".q_proj", ".qkv_proj"))
        elif ".experts" in entry and (".gate_proj" in entry or ".down_proj" in entry):
            added.append(entry.split(".experts", 1)[0] + ".experts")
        elif ".gate_proj" in entry:
            added.append(entry.replace(".gate_proj", ".gate_up_proj"))
    return added


class _GlobOrAbove(Rule):
    """TensorRT-LLM: a glob or `re:` over the whole name, of the module or of any above it; one member is enough."""

    def _prepare(self, where: str) -> None:
        special = [e for e in self.entries if e.startswith("re:") or is_glob(e)]
        self.patterns = Patterns(special, where, full_or_subtree)

    def find(self, name: str) -> str | None:
        names = [name, *(name[: at - 1] for at in reversed(_dots(name)))]
        for candidate in names:
            if candidate in self._names:
                return candidate
        return self.patterns.find(*names) if self.patterns is not None else None

    def answer(self, unit: Unit) -> Answer:
        # only these two are asked for by their members' names as well
        members = unit.members if _last(unit.name) in ("qkv_proj", "gate_up_proj") else ()
        found = next((entry for name in (unit.name, *members) if (entry := self.find(name)) is not None), None)
        return _NO if found is None else Answer(True, found)


class _RegexOrEnd(Rule):
    """transformers: a regular expression from the start to a dot or the end, or the name's last characters.

    In an entry without special characters a dot stands for itself here, in transformers for any character.
    """

    def _prepare(self, where: str) -> None:
        # a last dot takes any character: `layers.1.` covers layers.11
        literal = {entry for entry in self.entries if is_plain(entry) and not entry.endswith(".")}
        self._starts = literal
        self._lengths = sorted({len(entry) for entry in self.entries})
        self.patterns = Patterns((e for e in self.entries if e not in literal), where, to_boundary)

    def find(self, name: str) -> str | None:
        if name in self._starts:
            return name
        for at in _dots(name):
            if name[: at - 1] in self._starts:
                return name[: at - 1]
        for length in self._lengths:
            if length <= len(name) and name[len(name) - length :] in self._names:
                return name[len(name) - length :]
        return self.patterns.find(name) if self.patterns is not None else None


class _PerLayer(Rule):
    """auto-round in vLLM: keys that are full names or their ends, and regular expressions found anywhere."""

    def _prepare(self, where: str) -> None:
        special = [entry for entry in self.entries if _SPECIAL & set(entry)]
        self.patterns = Patterns(special, where, anywhere)
        self._blocks = tuple(entry.removeprefix(BLOCK) for entry in self.entries if entry.startswith(BLOCK))

    def answer(self, unit: Unit) -> Answer:
        ends = [unit.name[start:] for start in (0, *_dots(unit.name))]
        found = next((end for end in (*ends, f"model.{unit.name}") if end in self._names), None)
        if found is None and unit.experts:  # any one's key
            found = next((entry for entry in self.entries if entry.startswith(unit.name)), None)
        outside = bool(self._blocks) and not unit.name.startswith(self._blocks)
        # the members are asked for only where one of them has an entry, and their names' ends do not count
        if found is None and unit.fused and any(map(self._own, unit.members)):
            return self._together(unit, lambda name: self._own(name) or (_OUTSIDE if outside else None))
        found = found or self._own(unit.name) or (_OUTSIDE if outside else None)
        return _NO if found is None else Answer(True, found)

    def _own(self, name: str) -> str | None:
        if name in self._names:
            return name
        return self.patterns.find(name) if self.patterns is not None else None


def _dots(name: str) -> list[int]:
    """Where a segment begins, but for the first."""
    return [at + 1 for at, char in enumerate(name) if char == "."]


RULES: dict[str, Any] = {
    "full name": _FullName,
    "full name, inside, glob": _FullNameThenInside,
    "full name or re:": _NameOrRegex,
    "full name or re:, any expert": _NameOrRegexOrChild,
    "full name or re:, unfused": _NameOrRegexEach,
    "end of name or re:": _SuffixOrRegex,
    "segments": _Segments,
    "segments, fused": _SegmentsFused,
    "segments or glob": _SegmentGlob,
    "name inside entry": _Around,
    "glob or above": _GlobOrAbove,
    "regex or end": _RegexOrEnd,
    "per layer": _PerLayer,
}
