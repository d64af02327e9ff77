"""One table, three ways to show it: aligned text for a terminal, Markdown for a page of CI, HTML for a report.

Cells may hold anything that a file brought along; in all three it is shown and not obeyed. Knows nothing of what
stands in them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtplab.report.tables import html_table
from mtplab.report.text import escape, plain
from mtplab.study.number_table import number_lines

__all__ = ["Table", "in_markdown", "one_line"]

MOST = 44  # characters of a cell in a terminal, where a line is a line
_MARKS = re.compile(r"([\\`*_\[\]<>|&#~$!])")


@dataclass(frozen=True)
class Table:
    """`head` and every line of `body` have as many cells; the first `left` columns are text, the others numbers."""

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    left: int = 1
    note: str = ""

    def to_text(self) -> str:
        """Aligned columns below the title."""
        head, *body = [[one_line(cell) for cell in line] for line in (self.head, *self.body)]
        lines = number_lines(head, body, self.left, rule=True)
        return "\n".join([self.title, "", *lines, *([f"  {self.note}"] if self.note else [])])

    def to_markdown(self) -> str:
        """A table of GitHub's Markdown below its title in bold."""
        lines = [[in_markdown(cell) for cell in line] for line in (self.head, *self.body)]
        sides = [":--" if at < self.left else "--:" for at in range(len(self.head))]
        lines.insert(1, sides)
        text = [f"**{in_markdown(self.title)}**", "", *(f"| {' | '.join(line)} |" for line in lines)]
        return "\n".join([*text, *(["", in_markdown(self.note)] if self.note else [])])

    def to_html(self) -> str:
        """A table with its title as caption, in a box that scrolls sideways."""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return html_table(self.head, self.body, self.title, left=self.left) + note


def one_line(text: object, most: int = MOST) -> str:
    """On one line of at most `most` characters, cut in the middle: names differ at their ends."""
    line = " ".join(plain(text).split())
    half = (most - 1) // 2
    return line if len(line) <= most else f"{line[:half]}…{line[-(most - 1 - half) :]}"


def in_markdown(text: object) -> str:
    """Text that Markdown takes as it is: no markup, no link, nobody mentioned."""
    line = _MARKS.sub(r"\\\1", one_line(text, 400))
    return line.replace("://", "\\://").replace("www.", "www\\.").replace("@", "@\u200b")
