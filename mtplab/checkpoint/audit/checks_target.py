"""Checks that the target is whole: every layer there, and no layer without what the others of its kind have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.names import normalised
from mtplab.checkpoint.pairing import INPUT_SCALE_SUFFIXES, KV_SCALE_SUFFIXES

__all__ = ["CHECKS"]

_LAYER = re.compile(r"(?:model\.|backbone\.)?layers\.([0-9]{1,5})\.(.+)")
_BESIDE = (*KV_SCALE_SUFFIXES, *INPUT_SCALE_SUFFIXES, ".bias")


def _layers(subject: Subject) -> Iterator[Finding]:
    count = subject.text.get("num_hidden_layers")
    found = {int(at[1]) for m in subject.modules if m.part != "draft" and (at := _LAYER.match(normalised(m.name)))}
    if type(count) is not int or not 0 < count < 10_000 or not found:
        return
    absent = sorted(set(range(count)) - found)
    if absent:
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        yield Finding(
            "error", "missing-layers",
            f"config.json counts {count} layers, and there is nothing of {', '.join(map(str, absent[:8]))}{more}.", (),
            "They stay as they are initialised, in engines that do not refuse: garbage from a server that looks well.",
            "A shard is missing, or only one of several was opened: take the whole checkpoint.",
        )  # fmt: skip


def _modules(subject: Subject) -> Iterator[Finding]:
    """What a few layers lack of a part (`mlp`, `self_attn`) that all others have in full."""
    parts: dict[str, dict[str, set[str]]] = {}  # generic part → part → what it holds
    for module in subject.modules:
        at = _LAYER.match(normalised(module.name))
        if at is None or module.part != "target" or module.name.endswith(_BESIDE):
            continue
        where, _, last = at[2].rpartition(".")
        generic = re.sub(r"[0-9]+", "*", where)
        parts.setdefault(generic, {}).setdefault(module.name.rpartition(".")[0], set()).add(last)
    missing: list[str] = []
    for owners in parts.values():
        usual = set(Counter(map(frozenset, owners.values())).most_common(1)[0][0])
        few = {owner: usual - held for owner, held in owners.items() if held < usual and 2 * len(held) > len(usual)}
        if 0 < len(few) <= len(owners) // 4:  # a kind of layer of its own is no fault
            missing += [f"{owner}.{name}" for owner, names in few.items() for name in sorted(names)]
    by_group: dict[str, list[str]] = {}  # experts' numbers by where they are
    for generic, owners in parts.items():
        for owner in owners if generic.endswith("experts.*") else ():
            group, _, number = owner.rpartition(".")
            by_group.setdefault(group, []).append(number)
    # the router has a row for each expert; pruned models have other numbers of them from layer to layer
    rows = {m.name: m.shape[0] for m in subject.modules if m.name.endswith(".gate") and len(m.shape) == 2}
    for group, numbers in by_group.items():
        wanted = rows.get(group.removesuffix("experts") + "gate", 0)
        missing += [f"{group}.{i}" for i in range(wanted) if str(i) not in numbers]
    if missing:
        yield Finding(
            "error", "missing-modules",
            f"{len(missing)} modules are not there that all layers like theirs have: {listed(missing)}.",
            tuple(missing), "They stay as they are initialised, in engines that do not refuse to load.",
            "Take them from the original checkpoint; a shard or an export left them out.",
        )  # fmt: skip


CHECKS = (_layers, _modules)
