"""The audit of a checkpoint as one object: its sizes, its modules, its head, its findings, what engines make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtplab.checkpoint.audit import (
    checks_draft,
    checks_expected,
    checks_files,
    checks_lists,
    checks_scales,
    checks_target,
)
from mtplab.checkpoint.audit.compare import compare, compared, values_findings
from mtplab.checkpoint.audit.engines import engine_findings, engines_of
from mtplab.checkpoint.audit.finding import SEVERITIES, Finding, at_least, ordered
from mtplab.checkpoint.audit.heads import Head
from mtplab.checkpoint.audit.sizes import bytes_by_part, part_shown
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.collector import collector_still
from mtplab.checkpoint.lenses import Looks
from mtplab.checkpoint.plan import ModulePlan, Plan
from mtplab.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mtplab.checkpoint.checkpoint import Checkpoint

__all__ = ["Audit", "examine"]

_CHECKS = (
    *checks_files.CHECKS,
    *checks_expected.CHECKS,
    *checks_target.CHECKS,
    *checks_lists.CHECKS,
    *checks_scales.CHECKS,
    *checks_draft.CHECKS,
)


@dataclass(frozen=True, repr=False)
class Audit:
    """What an audit found. Prints as tables, shows as HTML in a notebook, and goes to JSON with `to_dict`."""

    path: Path
    method: str  # quant_method as it stands, or "none"
    plan: Plan
    head: Head | None
    findings: tuple[Finding, ...]  # errors first
    looks: Looks | None  # what each engine makes of it; None where nothing is quantised, or it cannot be read
    deep: bool  # whether values were read
    files: int
    tensors: int

    @property
    def modules(self) -> tuple[ModulePlan, ...]:
        """Every module, in the plan's order."""
        return self.plan.modules

    @property
    def bytes_by_part(self) -> dict[str, dict[str, int]]:
        """Part of the model → dtype as stored → bytes."""
        return bytes_by_part(self.modules)

    @property
    def reading(self) -> str:
        """The sentence that compares the engines, and that errors in the files hold all the same; "" without one."""
        if self.looks is None:
            return ""
        wrong = len(at_least(self.findings, "error"))
        errors = f"the error{'s' if wrong > 1 else ''} found hold{'' if wrong > 1 else 's'} all the same"
        return f"By names and lists: {self.looks.sentence}" + (f" But {errors}." if wrong else "")

    def at_least(self, severity: str) -> list[Finding]:
        """The findings of "error", "warning" or "note" and what is worse. Raises ConfigError for another word."""
        if severity not in SEVERITIES:
            raise ConfigError(f"severity={severity!r}: expected one of {', '.join(SEVERITIES)}.")
        return at_least(self.findings, severity)

    def to_dict(self, modules: bool = True) -> dict[str, Any]:
        """Everything as JSON can hold it; `modules`: with a line for each of them."""
        with collector_still():
            return self._to_dict(modules)

    def _to_dict(self, modules: bool) -> dict[str, Any]:
        found: dict[str, Any] = {
            "path": str(self.path),
            "method": self.method,
            "files": self.files,
            "tensors": self.tensors,
            "deep": self.deep,
            "bytes": self.bytes_by_part,
            "head": self.head.to_dict() if self.head is not None else None,
            "findings": [finding.to_dict() for finding in self.findings],
            "engines": self.looks.to_dict() if self.looks is not None else None,
        }
        if modules:
            found["modules"] = [
                {
                    "name": module.name,
                    "part": part_shown(module),
                    "kind": module.kind,
                    "shape": list(module.shape),
                    "stored": module.stored,
                    "weight": module.weight,
                    "scale": module.scale.name if module.scale is not None else None,
                    "scale_dtype": module.scale.dtype if module.scale is not None else None,
                    "block": list(module.block) if module.block is not None else None,
                    "bytes": module.nbytes,
                    "rule": module.rule,
                }
                for module in self.modules
            ]
        return found

    def __repr__(self) -> str:
        counts = {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES}
        said = ", ".join(f"{count} {severity}s" for severity, count in counts.items())
        return f"<Audit {self.path}: {len(self.modules)} modules, {said}>"

    def __str__(self) -> str:
        from mtplab.checkpoint.audit.text import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from mtplab.checkpoint.audit.html import as_html

        return as_html(self)


def _readable(ckpt: Checkpoint) -> tuple[Subject, list[Finding]]:
    """The subject, and what is wrong with entries of its exclusion list that cannot be run: it is audited without."""
    subject = Subject(ckpt)
    try:
        subject.plan  # noqa: B018 - asks the list about every module
        return subject, []
    except CheckpointError:
        bad = subject.bad_patterns()
        if not bad:
            raise
    names = tuple(entry for entry, _ in bad)
    more = f" ({len(bad) - 1} more entries are wrong.)" if len(bad) > 1 else ""
    finding = Finding(
        "error", "bad-pattern", bad[0][1] + more, names,
        "Engines refuse such a list, take the entry for a name, or never match it.", "Correct or remove the entry.",
    )  # fmt: skip
    assert ckpt.quantization is not None
    kept = [entry for entry in ckpt.quantization.exclusions if entry not in names]
    return Subject(ckpt.with_exclusions(kept), as_on_disk=False), [finding]


class _Reading:
    """Counts bytes read for a progress bar that ends at `total`."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def examine(
    ckpt: Checkpoint,
    deep: bool = False,
    progress: Callable[[int, int], None] | None = None,
    source: Checkpoint | None = None,
) -> Audit:
    """Audit an opened checkpoint; as `Checkpoint.audit`. Without `deep` nothing but headers is read."""
    with collector_still():
        subject, bad = _readable(ckpt)
        origin = Subject(source) if source is not None else None
        found = [*bad, *(finding for check in _CHECKS for finding in check(subject))]
        if origin is not None:
            found += compare(subject, origin)
        looks = engines_of(subject)
        by_engines = list(engine_findings(subject, looks))
    if deep:
        from mtplab.checkpoint.audit.deep import deep_findings

        total = sum(module.nbytes for module in subject.modules)
        if origin is not None:
            total += sum(module.nbytes + other.nbytes for module, other in compared(subject, origin))
        reading = _Reading(progress, total)
        found += deep_findings(subject, reading)
        if origin is not None:
            found += values_findings(subject, origin, reading)
    method = str(subject.content.get("quant_method", "unnamed")) if ckpt.found is not None else "none"
    return Audit(
        path=ckpt.path,
        method=method,
        plan=subject.plan,
        head=subject.head,
        findings=ordered([*found, *by_engines]),
        looks=looks,
        deep=deep,
        files=len(ckpt.files.shards),
        tensors=len(ckpt.tensors),
    )
