"""Which modules to keep out of FP8, as a tree of groups: what is chosen, what it costs, and the globs that say it.

No widgets; `module_tree.py` shows it. A choice is a number whose bit *i* stands for unit *i*: a linear module, or one
projection of all experts of a layer, which engines build as one and nobody keeps singly. So a mixture of 90 000 tensors
has some 700 units, and whatever is asked of a choice is a few operations on long numbers.
"""

from __future__ import annotations

import fnmatch
import glob
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtplab.checkpoint.exclusions import PUBLISHED, UserPatterns, parse_exclude
from mtplab.checkpoint.header import PLAIN_FLOATS
from mtplab.checkpoint.names import experts_together, in_layer, nearest, normalised
from mtplab.checkpoint.plan import LOAD_BLOCK
from mtplab.errors import ConfigError

__all__ = ["Group", "ModuleChoice", "Unit", "cost_of"]


@dataclass(frozen=True)
class Unit:
    """What is kept or quantised together. `name` is as on disk, with `experts.*` for a layer's experts; `nbytes` is
    what BF16 costs over FP8."""

    name: str
    modules: tuple[str, ...]
    nbytes: int

    @property
    def pattern(self) -> str:
        """The glob that covers it and nothing else."""
        if len(self.modules) == 1:
            return glob.escape(self.name)
        before, experts, after = self.name.partition("experts.*")
        return f"{glob.escape(before)}{experts}{glob.escape(after)}"


@dataclass
class Group:
    """A line of the tree: the units below it as bits, its children in the order of the checkpoint."""

    label: str
    path: tuple[str, ...]
    unit: int | None = None  # of a line that is a unit itself
    bits: int = 0
    children: dict[str, Group] = field(default_factory=dict)


def cost_of(shape: Sequence[int]) -> int:
    """Bytes that a matrix takes in BF16 more than in FP8 with a float32 scale for each block of 128 × 128."""
    count = math.prod(shape)
    scales = math.prod(-(-n // block) for n, block in zip(shape[-2:], LOAD_BLOCK, strict=True)) * math.prod(shape[:-2])
    return 2 * count - count - 4 * scales


class ModuleChoice:
    """Units of a plan, groups over them, and what presets and patterns choose.

    Attributes:
        units: in the plan's order. `root`: the tree, target and draft below it.
        quantised: the checkpoint is stored in FP8; what it holds in another dtype stays so and is no unit.
    """

    def __init__(self, plan: Any) -> None:
        """`plan`: a checkpoint's, as stored."""
        self.quantised = any(module.weight == "fp8" and module.multiplies for module in plan.modules)
        self.total = sum(module.loaded_nbytes for module in plan.modules)
        found: dict[str, tuple[str, list[str], list[int]]] = {}
        for module in plan.modules:
            could = module.weight == "fp8" if self.quantised else module.stored in PLAIN_FLOATS
            if module.multiplies and module.part != "unused" and could:
                name = experts_together(module.name)
                part = "draft" if module.part == "draft" else "target"
                _, names, costs = found.setdefault(name, (part, [], []))
                names.append(module.name)
                costs.append(cost_of(module.shape))
        self.units = tuple(
            Unit(name if len(names) > 1 else names[0], tuple(names), sum(costs))
            for name, (_, names, costs) in found.items()
        )
        self._places = {normalised(module): at for at, unit in enumerate(self.units) for module in unit.modules}
        self.all = (1 << len(self.units)) - 1
        self.root = Group("all modules", ())
        for at, (part, _, _) in enumerate(found.values()):
            self._place(at, part)
        self._candidates = self._globs()

    def _place(self, at: int, part: str) -> None:
        unit = self.units[at]
        layer = in_layer(unit.name)
        pieces = [piece for piece in (layer.rest if layer else normalised(unit.name)).split(".") if piece != "*"]
        if len(unit.modules) > 1:
            pieces = [f"{piece} × {len(unit.modules)}" if piece == "experts" else piece for piece in pieces]
        path = [part, *([f"layer {layer.number}"] if layer else []), *pieces]
        group = self.root
        group.bits |= 1 << at
        for depth, label in enumerate(path, 1):
            group = group.children.setdefault(label, Group(label, tuple(path[:depth])))
            group.bits |= 1 << at
        group.unit = at

    # bits

    def nbytes(self, bits: int) -> int:
        """What the units cost in BF16 over FP8."""
        return sum(self.units[at].nbytes for at in _ones(bits))

    def count(self, bits: int) -> int:
        """Modules in the units, every expert counted."""
        return sum(len(self.units[at].modules) for at in _ones(bits))

    def matching(self, text: str) -> int:
        """Units whose name holds `text`, whatever the case; with `*`, `?` or `[` in it, that it matches as a glob."""
        text = text.strip().lower()
        if not text:
            return self.all
        if any(sign in text for sign in "*?["):
            # as a pattern, and as a part of one: `q_*` finds q_proj
            found = re.compile(f"{fnmatch.translate(text)}|{fnmatch.translate(f'*{text}*')}").match
            return _bits(at for at, unit in enumerate(self.units) if found(unit.name.lower()))
        return _bits(at for at, unit in enumerate(self.units) if text in unit.name.lower())

    def published(self) -> int:
        """What FP8 releases keep of a BF16 checkpoint (`exclusions.PUBLISHED`); of a quantised one nothing more than it
        holds so."""
        if self.quantised:
            return 0
        patterns = UserPatterns(("published",), PUBLISHED)
        return _bits(at for at, unit in enumerate(self.units) if patterns.published_pattern(unit.modules[0]))

    def chosen(self, exclude: str | Iterable[str] | None) -> int:
        """The units that names, globs and presets cover; what is no unit (a norm, a module that is BF16 in the file) is
        passed over. Raises ConfigError for a pattern that covers nothing, or some experts of a layer only."""
        items = parse_exclude(exclude if isinstance(exclude, str | None) else list(exclude), "value")
        if items is None:
            return self.published()
        bits = self.published() if "published" in items else 0
        experts: dict[int, set[str]] = {}
        for item in (item for item in items if item not in ("published", "none")):
            covered, single = self._covered(item)
            bits |= covered
            for module in single:
                experts.setdefault(self._places[normalised(module)], set()).add(module)
        for at, modules in experts.items():
            if len(modules) < len(self.units[at].modules):
                raise ConfigError(
                    f"value: {min(modules)} is one of {len(modules)} of {len(self.units[at].modules)} experts of its "
                    "layer that are covered; expected all or none, as engines build them: write experts.*"
                )
            bits |= 1 << at
        return bits

    def _covered(self, item: str) -> tuple[int, list[str]]:
        """(units covered, single experts covered)."""
        at = self._places.get(normalised(item.removesuffix(".weight")))
        if at is not None:  # a name: lists of them may be long
            return (1 << at, []) if len(self.units[at].modules) == 1 else (0, [item.removesuffix(".weight")])
        covers = UserPatterns((item,), ()).own_pattern
        bits, some, single = 0, [], re.search(r"experts\.[^*]", item)
        for at, unit in enumerate(self.units):
            if single and len(unit.modules) > 1:
                some += [module for module in unit.modules if covers(module) is not None]
            elif covers(unit.modules[0]) is not None:
                bits |= 1 << at
        if not (bits or some or self.quantised):
            near = ", ".join(nearest(item, [unit.name for unit in self.units]))
            raise ConfigError(
                f"value: {item!r:.80} covers no linear module of the checkpoint; expected names as on disk or globs."
                + (f" Nearest: {near}." if near else "")
            )
        return bits, some

    # globs

    def patterns(self, bits: int) -> list[str]:
        """The fewest names and globs found that cover these units and no other, in the order of the checkpoint.

        Each time the glob that covers most of what is left. A glob may cover what is never in FP8 (norms).
        """
        usable = [(glob, covered) for glob, covered in self._candidates if not covered & ~bits]
        left, found = bits, []
        while left:
            best = max(usable, key=lambda each: (each[1] & left).bit_count(), default=None)
            if best is None or (best[1] & left).bit_count() < 2:
                break
            found.append(best)
            left &= ~best[1]
        found += [(self.units[at].pattern, 1 << at) for at in _ones(left)]
        return [pattern for pattern, covered in sorted(found, key=lambda each: each[1] & -each[1])]

    def _globs(self) -> list[tuple[str, int]]:
        """Globs worth having, from the widest to the narrowest, and what each covers, as the plan matches them."""
        found: dict[str, None] = {"*": None}
        for unit in self.units:
            name, layer = unit.name, in_layer(unit.name)
            head, _, last = name.rpartition(".")
            if layer is None:
                found |= {f"{glob.escape(name.split('.')[0])}.*": None} if head else {}
                continue
            root, whole = layer.root, f"{layer.root}{layer.number}."
            rest = unit.pattern[len(glob.escape(whole)) :]
            before = root.removesuffix("layers.").removesuffix("mtp_")
            block = whole + layer.rest.split(".")[0]
            for pattern in (
                f"{glob.escape(before)}*" if before not in ("", "model.", "model.language_model.") else "",
                f"{glob.escape(root)}*",
                f"*.{rest}",
                f"{glob.escape(root)}*.{rest}",
                f"*.{glob.escape(last)}",
                f"{glob.escape(whole)}*",
                f"{glob.escape(block)}.*" if block != name else "",
                f"*.{glob.escape(rest.split('.')[0])}.*" if "." in rest else "",
            ):
                if pattern:
                    found[pattern] = None
        matchers = [(pattern, UserPatterns((pattern,), ()).own_pattern) for pattern in found]
        return [
            (pattern, _bits(at for at, unit in enumerate(self.units) if covers(unit.modules[0]) is not None))
            for pattern, covers in matchers
        ]


def _bits(places: Iterable[int]) -> int:
    found = 0
    for place in places:
        found |= 1 << place
    return found


def _ones(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
