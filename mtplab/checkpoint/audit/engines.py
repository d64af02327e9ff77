"""What the engine lenses see of this checkpoint, and what of it is a finding. What helps is `remedies.py`'s."""

from __future__ import annotations

from collections.abc import Iterator

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.remedies import Remedies
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.lenses import Disagreement, Look, Looks, lenses, look
from mtplab.checkpoint.lenses.base import LOAD_ERROR, LOSSY, SILENT
from mtplab.checkpoint.lenses.judge import REFUSED

__all__ = ["engine_findings", "engines_of"]

_SEVERITY = {SILENT: "warning", LOAD_ERROR: "warning", LOSSY: "note"}
_KIND = {SILENT: "engine-silent", LOAD_ERROR: "engine-refuses", LOSSY: "engine-lossy"}


def engines_of(subject: Subject) -> Looks | None:
    """Every engine's look, or None where nothing is quantised or the quantisation is not read."""
    if subject.quantization is None or not any(module.weight == "fp8" for module in subject.modules):
        return None
    return look(subject.views, subject.method, subject.content, subject.config)


def engine_findings(subject: Subject, looks: Looks | None) -> Iterator[Finding]:
    """What an engine refuses or builds otherwise than the file holds it: one finding for each engine and outcome.

    An engine that reads no FP8 file of the method is a note: the checkpoint was not made for it.
    """
    remedies = Remedies(subject)
    for item in looks.looks if looks is not None else ():
        why = f"As {item.engine} {item.version} reads the config."
        meant = _reads(item)
        if item.status == REFUSED:
            yield Finding(
                "warning" if meant else "note", "engine-refuses" if meant else "engine-unread", item.summary, (), why,
                remedies.layout_for(item),
            )  # fmt: skip
            continue
        by_outcome: dict[str, list[Disagreement]] = {}
        for found in item.disagreements:
            by_outcome.setdefault(found.outcome, []).append(found)
        for outcome, alike in by_outcome.items():
            if outcome not in _SEVERITY:
                continue
            modules = tuple(name for found in alike for name in found.modules)
            more = f" ({len(modules)} modules in all: {listed(modules)}.)" if len(modules) > 1 else ""
            yield Finding(
                _SEVERITY[outcome] if meant else "note", _KIND[outcome] if meant else "engine-unread",
                alike[0].sentence + more, modules, why,
                remedies.against(item, modules) if meant else remedies.layout_for(item),
            )  # fmt: skip


def _reads(item: Look) -> bool:
    """Whether the engine reads FP8 files of this method at all; a method's variants are named behind a space."""
    name = item.method.split(" ")[0]
    methods = next(engine.methods for engine in lenses() if engine.name == item.engine)
    method = methods.get("modelopt" if name.startswith("modelopt") else name)
    return method is not None and method.fp8
