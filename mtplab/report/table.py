"""One table, three ways to show it: aligned text for a terminal, Markdown for a page of CI, HTML for a report.

Cells may hold anything that a file brought along; in all three it is shown and not obeyed. Knows nothing of what
stands in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.checkpoint.text_table import scrolling
from mtplab.report.text import escape, in_markdown, one_line, plain
from mtplab.study.number_table import Cell, number_lines, on_one_line

__all__ = ["Table", "html_table"]


@dataclass(frozen=True)
class Table:
    """`head` and every line of `body` have as many cells; the first `left` columns are text, the others numbers."""

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[Cell]]
    left: int = 1
    note: str = ""

    def to_text(self) -> str:
        """Aligned columns below the title."""
        head, *body = [[one_line(on_one_line(cell)) for cell in line] for line in (self.head, *self.body)]
        lines = number_lines(head, body, self.left, rule=True)
        return "\n".join([self.title, "", *lines, *([f"  {self.note}"] if self.note else [])])

    def to_markdown(self) -> str:
        """A table of GitHub's Markdown below its title in bold."""
        lines = [[in_markdown(on_one_line(cell)) for cell in line] for line in (self.head, *self.body)]
        sides = [":--" if at < self.left else "--:" for at in range(len(self.head))]
        lines.insert(1, sides)
        text = [f"**{in_markdown(self.title)}**", "", *(f"| {' | '.join(line)} |" for line in lines)]
        return "\n".join([*text, *(["", in_markdown(self.note)] if self.note else [])])

    def to_html(self) -> str:
        """A table with its title as caption, in a box that scrolls sideways."""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return html_table(self.head, self.body, self.title, left=self.left) + note


def html_table(
    head: Sequence[Any], body: Iterable[Sequence[Any]], caption: str = "", left: int = 1, height: str = "none"
) -> str:
    """A table in a box that scrolls sideways on a narrow page; the first `left` columns are text, and of a pair of
    texts the second stands below the first.

    Args:
        head: column titles.
        body: rows of cells, as many as titles; anything is turned into escaped text.
        height: CSS height past which the box scrolls.
    """

    def line(cells: Sequence[Any], tag: str) -> str:
        scope = " scope=col" if tag == "th" else ""
        # styles stand in the cell, since a widget and an exported page bring different sheets
        sides = ["text-align:left" if at < left else "text-align:right;white-space:nowrap" for at in range(len(cells))]
        styles = [f"{side};padding:3px 10px 3px 4px;line-height:1.4" for side in sides]
        texts = ["<br>".join(map(escape, cell)) if isinstance(cell, tuple) else escape(cell) for cell in cells]
        return "".join(
            f'<{tag}{scope} style="{style}">{text}</{tag}>' for text, style in zip(texts, styles, strict=True)
        )

    lines = "".join(f"<tr>{line(row, 'td')}</tr>" for row in body)
    # a caption is as wide as its table, and may lie outside the box in part: its lines are not
    words = f'<span style="display:block;max-width:46em">{escape(caption)}</span>'
    title = f'<caption style="text-align:left;font-weight:600">{words}</caption>' if caption else ""
    table = f"<table>{title}<thead><tr>{line(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>"
    return scrolling(table, plain(caption or "table"), height, "mtplab-table")
