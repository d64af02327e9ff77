"""An audit for a terminal: what it is, its sizes, its head, what was found, what engines make of it."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from mtplab.checkpoint.audit.sizes import part_shown
from mtplab.checkpoint.lenses.looks import COLUMNS
from mtplab.checkpoint.text_table import aligned, as_bytes, printable

if TYPE_CHECKING:
    from mtplab.checkpoint.audit.audit import Audit
    from mtplab.checkpoint.audit.finding import Finding

__all__ = ["as_text", "module_rows", "size_rows", "title", "verdict"]

MODULE_COLUMNS = ("module", "part", "shape", "stored", "scale", "bytes", "rule")
_MAX_NAMES = 6


def title(audit: Audit, name: str | None = None) -> str:
    """One line: what kind of checkpoint it is and how large; called by its path unless `name` is given."""
    total = sum(sum(row.values()) for row in audit.bytes_by_part.values())
    files = f"{audit.files} file{'s' if audit.files != 1 else ''}"
    what = "not quantised" if audit.method == "none" else f"quant_method {printable(audit.method)}"
    return f"{printable(name or audit.path, 400)}: {what}, {audit.tensors:,} tensors in {files}, {as_bytes(total)}"


def verdict(audit: Audit) -> str:
    """One line: how many findings, and whether values were read."""
    counts = {severity: 0 for severity in ("error", "warning", "note")}
    for finding in audit.findings:
        counts[finding.severity] += 1
    said = ", ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in counts.items())
    depth = "headers and values read" if audit.deep else "headers read, values not (--deep reads them)"
    return f"{said if audit.findings else 'nothing found'}; {depth}"


def size_rows(audit: Audit) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(columns, rows) of bytes by part and dtype, with a row of totals."""
    table = audit.bytes_by_part
    dtypes = sorted({dtype for row in table.values() for dtype in row})
    columns = ("part", *dtypes, "bytes")
    rows = [
        (part, *(as_bytes(row[dtype]) if dtype in row else "" for dtype in dtypes), as_bytes(sum(row.values())))
        for part, row in table.items()
    ]
    if len(table) > 1:
        sums = [sum(row.get(dtype, 0) for row in table.values()) for dtype in dtypes]
        rows.append(("all", *map(as_bytes, sums), as_bytes(sum(sums))))
    return columns, rows


def module_rows(audit: Audit) -> list[tuple[str, ...]]:
    """A row of MODULE_COLUMNS for every module."""
    found = []
    for module in audit.modules:
        scale = ""
        if module.scale is not None and module.block is not None:
            block = "x".join(map(str, module.block))
            scale = f"{module.scale.dtype} per {'tensor' if module.block == module.shape else block}"
        shape = "x".join(map(str, module.shape)) or "scalar"
        cells = (module.name, part_shown(module), shape, module.stored, scale)
        found.append((*map(printable, cells), f"{module.nbytes:,}", printable(module.rule, 400)))
    return found


def as_text(audit: Audit, modules: bool = False, width: int | None = None) -> str:
    """The audit as lines of at most `width` characters (tables may be wider); `modules`: with a line for each."""
    width = width or min(110, shutil.get_terminal_size((100, 24)).columns)
    columns, rows = size_rows(audit)
    lines = [title(audit), "", *aligned(columns, rows, columns[1:])]
    lines += ["", *_wrapped(f"MTP head: {audit.head if audit.head is not None else 'none'}", width)]
    lines += ["", verdict(audit)]
    for finding in audit.findings:
        lines += ["", *_finding(finding, width)]
    if audit.looks is not None:
        lines += ["", "How engines read its list (linear modules)", *aligned(COLUMNS, audit.looks.rows()), ""]
        for text in (audit.reading, *audit.looks.caveats()):
            lines += _wrapped(text, width)
    if modules:
        lines += ["", *aligned(MODULE_COLUMNS, module_rows(audit), ("bytes",))]
    return "\n".join(lines)


def _finding(finding: Finding, width: int) -> list[str]:
    lines = _wrapped(f"{finding.severity.upper()} {finding.kind}: {printable(finding.message, 1500)}", width)
    for label, text in (("why", finding.why), ("fix", finding.fix)):
        if text:
            lines += _wrapped(f"{label}: {printable(text, 1500)}", width, "  ")
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    # paths and names are not broken, so that they can be copied
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
