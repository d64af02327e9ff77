"""A sweep's results as one HTML file, without a notebook: what they say, figures, tables, the explorer, what failed.

Reads rows, from a results folder or a file; measures nothing. Rows of different checkpoints or prompts stand in parts
of their own, since their numbers cannot be set side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mtplab.report.conclusion import Conclusion
from mtplab.report.cost_figure import break_even
from mtplab.report.explorer import SweepExplorer
from mtplab.report.figures import acceptance_by_depth, acceptance_by_position
from mtplab.report.page import Page, page_path, save_page
from mtplab.report.row_facts import row_facts
from mtplab.report.row_sizes import SIZES
from mtplab.report.rows import Record, as_records
from mtplab.report.rows_table import acceptance_table
from mtplab.report.table import html_table
from mtplab.report.text import escape, human_bytes, one_line
from mtplab.study.acceptance_views import FEW_ROUNDS
from mtplab.study.fields import fact_of, has_length
from mtplab.study.matching import display_order
from mtplab.study.provenance import collect
from mtplab.study.row import ResultRow
from mtplab.study.rowfile import rows_of_source
from mtplab.study.speed import costs
from mtplab.study.words import prompts_words

__all__ = ["results_page", "write_results"]

LINES = 8  # of a figure; more cannot be told apart
PARTS = 12  # parts with figures of their own
FAILED = 200  # failed rows that are listed


def write_results(source: str | Path, output: str | Path | None = None) -> Path:
    """Writes the rows of `source` (what `rows_of_source` takes) as one HTML file to `output`, or below reports/, and
    returns its path.

    Raises:
        ConfigError: `source` holds no rows, or the file cannot be written.
    """
    path = Path(source)
    rows = rows_of_source(path)
    name = path.resolve().name
    name = name if path.is_dir() else name.removesuffix(path.suffix).removesuffix(".rows")
    return save_page(page_path(output, name), results_page(rows, name))


def results_page(rows: Sequence[ResultRow], name: str) -> str:
    """The HTML document. No path of this machine is in it, so that it can be published as it is."""
    rows = sorted(rows, key=display_order)
    good = [row for row in rows if has_length(row)]
    failed = [row for row in rows if row.error is not None]
    parts = _parts(good)
    page = Page(f"Results: {one_line(name, 60)}")
    page.words(*_opening(rows, failed, parts))
    if len(parts) == 1:
        _part(page, good, "##")
    else:
        for number, (words, found) in enumerate(parts.items(), 1):
            if number > PARTS:
                page.words(f"And {len(parts) - PARTS} more parts, which are in the explorer.")
                break
            page.html(f'<h2 id="part-{number}">{escape(words)}</h2>')
            _part(page, found, "###")
    if good:
        page.text("## Explore the rows\n\nEvery row; this works without a kernel and without a network.")
        page.show(SweepExplorer(rows))
    if failed:
        page.text("## What failed")
        page.html(_failed_table(failed))
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, mtplab {collect().get('commit') or 'of no known commit'}"
    facts = {"Read from": name, **row_facts(rows), "This page": now}
    return page.render(html_table(("What", "Value"), facts.items(), left=2))


def _opening(rows: Sequence[ResultRow], failed: Sequence[ResultRow], parts: dict[str, Any]) -> list[str]:
    points = len({row.point for row in rows})
    said = [f"{len(rows)} rows of {points} point{'s' * (points != 1)}; {len(failed) or 'none'} of them failed."]
    if len(parts) > 1:
        said.append(
            f"They are of {len(parts)} different combinations of checkpoint and prompts. Each has a part of its own: "
            "numbers of different parts are not to be compared line by line, but mtplab compare can."
        )
    if not parts:
        said.append("No row has a result, so there is nothing to draw.")
    return said


def _parts(rows: Iterable[ResultRow]) -> dict[str, list[ResultRow]]:
    """Rows whose numbers can be set side by side, under words for what they share."""
    rows = list(rows)
    contents: dict[str, set[str]] = {}
    for row in rows:
        contents.setdefault(row.checkpoint, set()).add(_content(row))
    found: dict[str, list[ResultRow]] = {}
    for row in rows:
        # one name for two contents: the checkpoint changed between two sweeps
        which = f" ({_content(row)[:17]})" if len(contents[row.checkpoint]) > 1 else ""
        words = f"{one_line(row.checkpoint, 60)}{which} · {one_line(row.prompt_set, 60)} · {prompts_words(row)}"
        found.setdefault(words, []).append(row)
    return found


def _content(row: ResultRow) -> str:
    return str(fact_of(row, "config", "checkpoint") or "unknown")


def _part(page: Page, rows: list[ResultRow], level: str) -> None:
    """Rows of one checkpoint over one set of prompts."""
    temperatures = sorted({row.temperature for row in rows})
    page.text(f"{level} What the numbers say")
    for temperature in temperatures:
        if len(temperatures) > 1:
            page.words("Greedy:" if temperature == 0 else f"At temperature {temperature:g}:")
        page.show(Conclusion([row for row in rows if row.temperature == temperature]))
    page.text(
        f"{level} Acceptance by depth\n\nBars are 95 % intervals over prompts, of each setting by itself; two settings "
        "on the same prompts are compared prompt by prompt, which tells smaller differences apart."
    )
    for temperature in temperatures:
        page.show(*_depth_figures([row for row in rows if row.temperature == temperature], temperature))
    page.html(acceptance_table(rows))
    first = _line_of([row for row in rows if row.temperature == temperatures[0]])
    if any(row.depth for row in first):
        page.text(
            f"{level} Acceptance by draft position\n\nOnly rounds that got so far count on the right; their number "
            f"stands below each position, and hollow points are over fewer than {FEW_ROUNDS}."
        )
        page.show(acceptance_by_position(first, temperature=temperatures[0]))
    records = as_records(rows)
    timed = costs([r for r in records if r["temperature"] == temperatures[0]])
    if len(timed) > 1:
        page.text(f"{level} What a round takes\n\nDrafting pays where the solid line lies above the dashed one.")
        page.show(break_even(rows))
    table = _setting_table(records)
    if table:
        page.text(f"{level} Bytes")
        page.html(table)


def _line_of(rows: list[ResultRow]) -> list[ResultRow]:
    """Rows with the first exclusion set: all its caches."""
    first = rows[0]
    return [r for r in rows if (r.exclude_label, r.model_format) == (first.exclude_label, first.model_format)]


def _depth_figures(rows: list[ResultRow], temperature: float) -> list[Any]:
    """One figure, or two where one would hold too many lines: caches of one exclusion set, and sets with one cache."""
    if len({record["series"] for record in as_records(rows)}) <= LINES:
        return [acceptance_by_depth(rows, temperature)]
    caches = _line_of(rows)
    sets = [row for row in rows if row.quant_policy == rows[0].quant_policy]
    chosen = [found for found in (caches, sets) if len({record["series"] for record in as_records(found)}) > 1]
    return [acceptance_by_depth(found, temperature) for found in chosen]


def _setting_table(records: list[Record]) -> str:
    """What does not depend on the depth, one line for each setting; what no row has is left out."""
    several = len({record["temperature"] for record in records}) > 1
    settings: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        lead = (record["weights_label"], record["policy_label"])
        settings.setdefault((*lead, f"{record['temperature']:g}") if several else lead, []).append(record)
    told = [(title, read) for title, read in SIZES if any(read(record) is not None for record in records)]
    if not told:
        return ""
    body = []
    for lead, found in settings.items():
        # a size of 0 is one
        sizes = (next((size for size in map(read, found) if size is not None), None) for _, read in told)
        body.append((*lead, *map(human_bytes, sizes)))
    titles = (title[0].upper() + title[1:] for title, _ in told)
    head = ["Exclusions", "KV cache", *(["Temperature"] if several else []), *titles]
    return html_table(head, body, "Bytes as deployed, target and draft together", left=2)


def _failed_table(failed: Sequence[ResultRow]) -> str:
    body = [
        (record["series"], one_line(record["error"], 400), f"{record['temperature']:g}", record["depth"])
        for record in as_records(failed[:FAILED])
    ]
    more = f"<p>And {len(failed) - FAILED} more.</p>" if len(failed) > FAILED else ""
    return html_table(("Setting", "Why", "Temperature", "Depth"), body, "Points without a result", left=2) + more
