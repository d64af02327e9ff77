"""A comparison as one HTML file: sentences, the figure, the tables, and an explorer over the rows of all files.

Puts together what `comparison*.py` found; compares nothing itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtplab.report.comparison import Against, Comparison, Source
from mtplab.report.comparison_figure import differences_by_depth
from mtplab.report.comparison_tables import tables
from mtplab.report.comparison_words import sentences
from mtplab.report.explorer import SweepExplorer
from mtplab.report.findings import Findings
from mtplab.report.page import Page, page_path, save_page
from mtplab.report.row_facts import row_facts
from mtplab.report.table import html_table
from mtplab.report.text import escape, one_line
from mtplab.study.matching import display_order

__all__ = ["comparison_page", "write_comparison"]

NAME = 60  # characters of a file's name in a heading


def write_comparison(comparison: Comparison, output: str | Path | None = None) -> Path:
    """Writes the page to `output`, or below reports/compare/, and returns its path. Raises `ConfigError` where it
    cannot be written."""
    return save_page(page_path(output, "compare"), comparison_page(comparison))


def comparison_page(comparison: Comparison) -> str:
    """The HTML document."""
    base = one_line(comparison.sources[0].name, NAME)
    others = ", ".join(one_line(source.name, NAME) for source in comparison.sources[1:])
    page = Page(f"{others} against {base}")
    for number, against in enumerate(comparison.against, 1):
        _part(page, against, number, alone=len(comparison.against) == 1)
    page.text(
        "## Explore the rows\n\nAll rows of all files; a line's name begins with its file. This works without a kernel "
        "and without a network."
    )
    page.show(SweepExplorer(_all_rows(comparison.sources), first=len(comparison.sources)))
    return page.render(_provenance(comparison.sources))


def _part(page: Page, against: Against, number: int, alone: bool) -> None:
    # with one file only, the title says already what is compared
    names = (one_line(source.name, NAME) for source in (against.other, against.base))
    heading = "What changed" if alone else " against ".join(names)
    page.html(f'<h2 id="against-{number}">{escape(heading)}</h2>')
    page.show(Findings(sentences(against)))
    if any(point.pair.depth for point in against.points):
        page.show(differences_by_depth(against))
        page.text(
            "Bars are 95 % intervals of each difference; a hollow point lies within chance. It is the other file's "
            "number less the baseline's, so a point below the line is a loss."
        )
    for table in tables(against):
        page.html(table.to_html())


def _all_rows(sources: list[Source]) -> list[dict[str, Any]]:
    """Every row with its file's name, lines of one setting next to each other."""
    found = [(display_order(row), source.name, row) for source in sources for row in source.rows]
    return [
        {**json.loads(row.to_json()), "source": name} for _, name, row in sorted(found, key=lambda each: each[0][5:])
    ]


def _provenance(sources: list[Source]) -> str:
    facts = [row_facts(source.rows) for source in sources]
    names = dict.fromkeys(name for each in facts for name in each)
    body = [(name, *(each.get(name, "–") for each in facts)) for name in names]
    return html_table(["What", *(one_line(source.name, NAME) for source in sources)], body, left=1 + len(sources))
