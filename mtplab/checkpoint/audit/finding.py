"""One thing an audit has to say, and how serious it is. Knows no checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["SEVERITIES", "Finding", "at_least", "ordered"]

# what a run does: is wrong or fails; is wrong or fails in some engines, or is likely not what was meant; is fine
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """A fault, or a fact to know: what was found, in which tensors, why it matters and what to do.

    `tensors` are names of tensors or modules as they stand on disk; all of them, of a kind that many share.
    """

    severity: str
    kind: str  # one word, stable: what a test or a gate may ask for
    message: str
    tensors: tuple[str, ...] = ()
    why: str = ""
    fix: str = ""

    def to_dict(self) -> dict[str, object]:
        """The finding as JSON can hold it."""
        return {
            "severity": self.severity,
            "kind": self.kind,
            "message": self.message,
            "why": self.why,
            "fix": self.fix,
            "tensors": list(self.tensors),
        }


def at_least(findings: Iterable[Finding], severity: str) -> list[Finding]:
    """The findings of this severity or a worse one."""
    worst = SEVERITIES[: SEVERITIES.index(severity) + 1]
    return [finding for finding in findings if finding.severity in worst]


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes; within each as found."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def listed(names: Sequence[str], most: int = 4) -> str:
    """`a`, `b` and 3 more, escaped: names come from a file nobody vouches for."""
    from mtplab.checkpoint.strict_json import shown

    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(shown, names[:most])) + more
