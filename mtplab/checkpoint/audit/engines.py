"""What the engine lenses see of this checkpoint, and what of it is a finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.lenses import Disagreement, Looks, View, lenses, look
from mtplab.checkpoint.lenses.base import LOAD_ERROR, LOSSY, SILENT

__all__ = ["engine_findings", "engines_of", "views_of"]

_SEVERITY = {SILENT: "warning", LOAD_ERROR: "warning", LOSSY: "note"}
_KIND = {SILENT: "engine-silent", LOAD_ERROR: "engine-refuses", LOSSY: "engine-lossy"}


def views_of(modules: Iterable[Any]) -> list[View]:
    """Planned modules as the lenses take them; what no run loads is left out."""
    return [
        View(m.name, m.kind, m.part, m.weight in ("fp8", "unusable"), m.scale is not None)
        for m in modules
        if m.part != "unused"
    ]


def engines_of(subject: Subject) -> Looks | None:
    """Every engine's look, or None where nothing is quantised or the quantisation is not read."""
    if subject.quantization is None or not any(module.weight == "fp8" for module in subject.modules):
        return None
    method = str(subject.content.get("quant_method", subject.quantization.method))
    return look(views_of(subject.modules), method, subject.content, subject.config)


def engine_findings(looks: Looks | None) -> Iterator[Finding]:
    """What an engine builds otherwise than the file holds it: one finding for each engine and outcome.

    An engine that does not read the format at all is a note: the checkpoint was not made for it.
    """
    reads = {engine.name: engine.methods for engine in lenses()}
    for item in looks.looks if looks is not None else ():
        by_outcome: dict[str, list[Disagreement]] = {}
        for found in item.disagreements:
            by_outcome.setdefault(found.outcome, []).append(found)
        for outcome, alike in by_outcome.items():
            if outcome not in _SEVERITY:
                continue
            modules = tuple(name for found in alike for name in found.modules)
            more = f" ({len(modules)} modules in all: {listed(modules)}.)" if len(modules) > 1 else ""
            meant = item.method in reads[item.engine]
            yield Finding(
                _SEVERITY[outcome] if meant else "note", _KIND[outcome] if meant else "engine-unread",
                alike[0].sentence + more, modules, f"As {item.engine} {item.version} reads the config.",
                "If the list is at fault, write the one under which engines agree (mtplab quantize does); if the "
                "engine does so whatever the list says, use another." if meant
                else "Use an engine that reads the format, or write the checkpoint in another layout.",
            )  # fmt: skip
