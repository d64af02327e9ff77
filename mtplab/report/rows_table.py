"""The HTML table of a study's rows: acceptance length by depth, and what each line's target is worth.

Reads rows; measures nothing. Every text is escaped.
"""

from __future__ import annotations

from typing import Any

from mtplab.report.rows import as_records, group_series
from mtplab.report.table import html_table
from mtplab.report.text import escape
from mtplab.study.number_table import Cell, with_error
from mtplab.study.soundness import COLUMNS, quality_notes, quality_numbers

__all__ = ["acceptance_table"]


def acceptance_table(rows: Any, caption: str = "Acceptance length (tokens per round) by draft depth") -> str:
    """One line per setting, one column per depth, ± half a 95 % interval, and what its target is worth where that was
    measured; broken targets and failed points are told below the table."""
    records = as_records(rows)
    series = group_series(records)
    depths = sorted({record["depth"] for found in series.values() for record in found})
    several = len({record.get("temperature") for record in records}) > 1
    body, first_of = [], []
    for found in series.values():
        # one line per temperature: the same setting at another temperature is another measurement
        for temperature in sorted({record.get("temperature") or 0.0 for record in found}):
            mine = {r["depth"]: r for r in found if (r.get("temperature") or 0.0) == temperature}
            first = next(iter(mine.values()))
            lead = [first["weights_label"], first["policy_label"]] + ([f"{temperature:g}"] if several else [])
            first_of.append(first)
            body.append((lead, [_length(mine.get(depth)) for depth in depths]))
    judged = quality_numbers(first_of)
    lines = [[*lead, *([] if judged is None else judged[at]), *cells] for at, (lead, cells) in enumerate(body)]
    head = ["Exclusions", "KV cache"] + (["Temperature"] if several else []) + ([] if judged is None else [*COLUMNS])
    head += [f"k = {d}" for d in depths]
    failed = [record for record in records if record.get("error") is not None]
    notes = "".join(
        f'<p role="alert">{escape(record["series"])}, depth {record["depth"]} failed: {escape(record["error"])}</p>'
        for record in failed[:5]
    )
    if len(failed) > 5:
        notes += f"<p>… and {len(failed) - 5} more failed rows.</p>"
    told = "".join(f"<p>{escape(note)}</p>" for note in quality_notes(records))
    return html_table(head, lines, caption, left=2) + told + notes


def _length(record: Any) -> Cell:
    return "–" if record is None else with_error(record["acceptance_length"], record["length_error"])
