"""The MTP head of a checkpoint: its family, what it shares with the target, and whether it is complete.

Knows names only (`draft_layouts.py`); a block's own parts are compared with the target's layers, which name them alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.checkpoint.config_json import text_config
from mtplab.checkpoint.draft_layouts import COUNT_KEYS, FUSION_NORMS, LAYOUTS, Layout
from mtplab.checkpoint.names import draft_prefixes, normalised, part_of
from mtplab.checkpoint.pairing import KV_SCALE_SUFFIXES

__all__ = ["Head", "find_head"]


_EXPERT = re.compile(r"experts\.[0-9]{1,6}\.")
_MLP = {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_TARGET = re.compile(r"(?:model\.)?layers\.([0-9]{1,4})\.(.+)")  # DeepSeek-V4 names its own without a root


@dataclass(frozen=True)
class Head:
    """What the head is: its family's layout, layers on disk and promised, and what is missing or shared."""

    family: str
    layers: int  # on disk
    promised: int | None  # by config.json; None where it says nothing
    modules: tuple[str, ...]
    missing: tuple[str, ...]  # modules that its layout or its target's layers have and it does not
    shared: tuple[str, ...]  # modules that may be the target's own and are not in the file
    dtypes: Mapping[str, int]  # linear weights by dtype as planned
    step_layers: int = 1  # layers on disk to one that config.json counts

    @property
    def complete(self) -> bool:
        """Whether as many layers are there as are promised, at least one, and no module of them is missing."""
        return self.layers > 0 and not self.missing and self.layers >= (self.promised or 0) * self.step_layers

    def to_dict(self) -> dict[str, Any]:
        """The head as JSON can hold it."""
        return {
            "family": self.family,
            "layers": self.layers,
            "promised": self.promised,
            "complete": self.complete,
            "missing": list(self.missing),
            "shared_with_target": list(self.shared),
            "linear_weights": dict(self.dtypes),
        }

    def __str__(self) -> str:
        if not self.layers:
            return "no MTP head" + (f", though config.json promises {self.promised}" if self.promised else "")
        kinds = ", ".join(f"{count} {dtype.upper()}" for dtype, count in self.dtypes.items())
        state = "complete" if self.complete else f"INCOMPLETE: {len(self.missing)} modules missing"
        shared = (
            f"; uses the target's {', '.join(name.rpartition('.')[2] for name in self.shared)}" if self.shared else ""
        )
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        return f"{self.family}: {layers}, linear weights {kinds}, {state}{shared}"


def find_head(modules: Iterable[Any], config: dict[str, Any]) -> Head | None:
    """The draft head among planned modules, or None where there is none and none is promised."""
    text = text_config(config)
    plain = {normalised(m.name): m for m in modules if not m.name.endswith(KV_SCALE_SUFFIXES)}
    promised = _promised(text)
    count = text.get("num_hidden_layers")
    base = count if type(count) is int and 0 < count < 100_000 else None
    best: tuple[int, Layout, dict[int, list[str]]] | None = None
    for layout in LAYOUTS:
        behind = text.get(layout.count_key) if layout.behind else None
        behind = behind if type(behind) is int and behind > 0 else 0
        found = _layers(layout, plain, base, behind)
        score = 2 * sum(name in plain for name in _all_named(layout.fusion, found, base))
        # Step and DeepSeek-V3 differ in what is under shared_head alone, of which some may be missing
        score += bool(score) * sum(name in plain for name in _all_named(layout.shared, found, base))
        # a block without its fusion is a head as well, where nothing else can be named so
        score += bool(found) * (not layout.behind or behind > 0)
        score += bool(score) * (layout.count_key in text)
        if score and (best is None or score > best[0]):
            best = score, layout, found
    if best is None:
        return Head("", 0, promised, (), (), (), {}) if promised else None
    _, layout, found = best
    missing = [name for name in _all_named(layout.fusion, found, base) if name not in plain]
    shared = [name for name in _all_named(layout.shared, found, base) if name not in plain]
    missing += _missing_in_blocks(layout, found, plain, base)
    drafts = draft_prefixes(config)
    inside = [name for name in plain if part_of(name, drafts) == "draft"]
    dtypes = Counter(plain[name].weight for name in inside if plain[name].kind == "linear")
    return Head(
        layout.family,
        len(found),
        promised,
        tuple(inside),
        tuple(missing),
        tuple(shared),
        dict(dtypes.most_common()),
        layout.step_layers,
    )


def _promised(text: dict[str, Any]) -> int | None:
    for key in COUNT_KEYS:
        if type(text.get(key)) is int:
            return text[key]
    return None


def _all_named(names: Sequence[str], found: Mapping[int, Any], base: int | None) -> list[str]:
    """The names for every layer that is there, or for the first where none is; each once."""
    numbers = sorted(found) or [0]
    filled = (name.format(i=i, n=(base or 0) + i, last=numbers[-1]) for i in numbers for name in names)
    return list(dict.fromkeys(filled))


def _layers(layout: Layout, plain: Mapping[str, Any], base: int | None, behind: int) -> dict[int, list[str]]:
    """Head layer → what it holds, by name after its prefix; of those behind the target's the first `behind`, if any."""
    found: dict[int, list[str]] = {}
    if layout.behind and base is None:
        return found
    pattern = re.compile(layout.layer)
    for name in plain:
        at = pattern.match(name)
        if at is not None:
            number = int(at[1]) - (base or 0 if layout.behind else 0)
            if number >= 0 and not (behind and number >= behind):
                found.setdefault(number, []).append(name[at.end() :])
    return found


def _missing_in_blocks(
    layout: Layout, found: Mapping[int, list[str]], plain: Mapping[str, Any], base: int | None
) -> list[str]:
    """What the most alike of the target's layers has and a head layer's block has not; experts count as one."""
    targets: dict[int, set[str]] = {}
    experts: Counter[int] = Counter()
    for name in plain:
        at = _TARGET.match(name)
        if at is not None and (base is None or int(at[1]) < base):
            generic = _EXPERT.sub("experts.*.", at[2])
            targets.setdefault(int(at[1]), set()).add(generic)
            experts[int(at[1])] += generic != at[2]
    missing: list[str] = []
    for number, names in found.items():
        own = {_EXPERT.sub("experts.*.", name) for name in names}
        # a hybrid's head has one kind of attention, and is like the layers that have it
        attention = {name.partition(".")[0] for name in own if "attn" in name.partition(".")[0]} or {"self_attn"}
        alike = {i: names for i, names in targets.items() if attention <= {name.partition(".")[0] for name in names}}
        if not alike or not own:
            continue
        like = max(alike, key=lambda layer: (len(alike[layer] & own) - 0.1 * len(alike[layer] - own), -layer))
        if not targets[like] & own:
            continue
        prefix = layout.layer.replace(r"([0-9]{1,4})", str(number + (base or 0 if layout.behind else 0)))
        prefix = prefix.replace("\\", "")
        missing += [prefix + name for name in sorted(_believed(targets[like] - own, own - targets[like]))]
        few = experts[like] - sum(bool(_EXPERT.search(name)) for name in names)
        if few > 0 and "experts.*." in " ".join(own & targets[like]):
            place = next(name.partition("experts.")[0] for name in names if _EXPERT.search(name))
            missing.append(f"{prefix}{place}experts: {few} of {experts[like]} experts' weights")
    return missing


def _believed(missing: set[str], extra: set[str]) -> set[str]:
    """What a block lacks of the target's names, less what it has under names of its own.

    Heads name norms their own way (MiMo-V2), and stack experts that the target has one by one, or the other way round;
    or they have an MLP where the target's layers have experts.
    """
    if extra >= _MLP:
        missing = {name for name in missing if not name.startswith("mlp.")}
    if any("experts." in name or name.endswith("experts") for name in extra):
        missing = {name for name in missing if "experts." not in name}
    if any("norm" in name for name in extra - FUSION_NORMS):
        missing = {name for name in missing if "norm" not in name}
    return missing
