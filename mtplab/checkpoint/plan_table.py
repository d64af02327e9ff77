"""A plan as an aligned text table and as HTML. Knows nothing of how it was decided; every name is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from mtplab.checkpoint.text_table import aligned, html_table, printable, scrolling

if TYPE_CHECKING:
    from mtplab.checkpoint.plan import ModulePlan, Plan

__all__ = ["as_html", "as_text"]

MAX_ROWS = 400
# bytes are those of a run; what is on disk is named so
_COLUMNS = ("module", "part", "kind", "shape", "stored", "weight", "activation", "bytes", "stored bytes", "rule")
_RIGHT = {"bytes", "stored bytes"}


def _cells(module: ModulePlan) -> tuple[str, ...]:
    shape = "x".join(map(str, module.shape)) or "scalar"
    texts = (module.name, module.part, module.kind, shape, module.stored, module.weight, module.activation)
    return (*map(printable, texts), f"{module.loaded_nbytes:,}", f"{module.nbytes:,}", printable(module.rule, 400))


def _summary(plan: Plan) -> str:
    fp8 = [module for module in plan.modules if module.weight == "fp8"]
    parts = ("embedding", "target", "head", "draft")
    sizes = ", ".join(f"{part} {plan.loaded_nbytes(part):,}" for part in parts if plan.loaded_nbytes(part))
    unused = f", unused {plan.nbytes('unused'):,} of them" if plan.nbytes("unused") else ""
    return (
        f"{len(plan.modules)} modules, {len(fp8)} in FP8; {plan.loaded_nbytes():,} bytes as planned ({sizes}), "
        f"{plan.nbytes():,} as stored{unused}"
    )


def as_text(plan: Plan) -> str:
    """One line per module (the first 400), columns aligned, and a line that sums up."""
    rows = [_cells(module) for module in plan.modules[:MAX_ROWS]]
    lines = aligned(_COLUMNS, rows, _RIGHT)
    if len(plan.modules) > MAX_ROWS:
        lines.append(f"... and {len(plan.modules) - MAX_ROWS} modules more")
    lines.append(_summary(plan))
    lines += [f"warning: {printable(text, 600)}" for text in plan.warnings]
    return "\n".join(lines)


def as_html(plan: Plan) -> str:
    """The same table as HTML, names escaped: they come from a file nobody vouches for."""
    table = html_table(_COLUMNS, map(_cells, plan.modules[:MAX_ROWS]), _RIGHT)
    more = len(plan.modules) - MAX_ROWS
    notes = [_summary(plan), *([f"{more} modules more are not shown"] if more > 0 else [])]
    notes += [f"warning: {printable(text, 600)}" for text in plan.warnings]
    return scrolling(table, "Modules", "32em", "mtplab-plan") + "".join(f"<p>{escape(note)}</p>" for note in notes)
