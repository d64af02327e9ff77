"""Where rows come from, in a few lines: what their provenance says, values that differ among them side by side.

Reads rows; knows no page and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from mtplab.report.text import plain
from mtplab.study.fields import fact_of
from mtplab.study.row import ResultRow
from mtplab.study.words import engine_words

__all__ = ["row_facts"]

MOST = 4  # values of one fact that are written out


def row_facts(rows: Sequence[ResultRow]) -> dict[str, str]:
    """Name -> value, in the order of a provenance table; a fact that no row has is left out."""
    dates = sorted(filter(None, (_of(row, "date") for row in rows)))
    found = {
        "Rows": f"{len(rows)}, of {len({row.point for row in rows})} points",
        "Checkpoint": _each(rows, lambda row: _with(row.checkpoint, _of(row, "config", "checkpoint"))),
        "Prompts": _each(rows, lambda row: f"{row.prompt_set}: {row.n_prompts} × {row.max_new_tokens} tokens"),
        "Sampling": _each(rows, _sampling),
        "Measured by": _each(rows, _method),
        "Measured": " to ".join(dict.fromkeys(map(_moment, (dates[0], dates[-1])))) if dates else "",
        "To be known": _each(rows, lambda row: plain(row.caveat or "")),
        "Commit": _each(rows, lambda row: _of(row, "commit")),
        "Versions": _each(rows, _versions),
        "Machine": _each(rows, _machine),
    }
    return {name: value for name, value in found.items() if value}


def _of(row: ResultRow, *path: str) -> str:
    value = fact_of(row, *path)
    return "" if value is None else plain(value)[:120]


def _moment(date: str) -> str:
    """`2026-11-30 17:36:29 UTC`; what is no such date as it is."""
    try:
        return f"{datetime.fromisoformat(date).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return date


def _each(rows: Iterable[ResultRow], read: Callable[[ResultRow], str]) -> str:
    values = [value for value in dict.fromkeys(map(read, rows)) if value]
    more = f"; and {len(values) - MOST} more" if len(values) > MOST else ""
    return "; ".join(values[:MOST]) + more


def _with(name: str, content: str) -> str:
    return f"{name} ({content[:21]}…)" if len(content) > 21 else name


def _sampling(row: ResultRow) -> str:
    if row.temperature == 0:
        return "greedy"
    limits = [f"top-k {row.top_k}"] * bool(row.top_k) + [f"top-p {row.top_p:g}"] * (row.top_p < 1)
    return ", ".join([f"temperature {row.temperature:g}", *limits, f"seed {row.seed}"])


def _method(row: ResultRow) -> str:
    if row.engine is not None:
        version, counted = _of(row, "engine", "version"), _of(row, "engine", "counted")
        return f"{engine_words(row.engine)}{' ' * bool(version)}{version}, counted {counted or 'by the server'}"
    return "a trace: one decoding for all depths" if row.method == "trace" else "a run at every depth"


def _versions(row: ResultRow) -> str:
    versions = fact_of(row, "versions") or {}
    python = _of(row, "python")
    named = [f"{plain(name)[:40]} {plain(version)[:40]}" for name, version in versions.items() if version]
    return ", ".join([f"python {python}"] * bool(python) + named)


def _machine(row: ResultRow) -> str:
    threads = fact_of(row, "threads")
    parts = [_of(row, "platform"), _of(row, "cpu"), f"device {_of(row, 'device')}" if _of(row, "device") else ""]
    return ", ".join(filter(None, [*parts, f"{threads} thread{'s' * (threads != 1)}" if threads else ""]))
