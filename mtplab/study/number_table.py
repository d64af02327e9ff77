"""Numbers in a table: as HTML, in a box that scrolls where it is too wide (from the keyboard too, and with a name), and
as aligned text.

In HTML every cell is escaped. Knows nothing of what stands in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mtplab.checkpoint.text_table import in_columns, scrolling
from mtplab.study.numbers import fixed

__all__ = ["Cell", "number_lines", "number_table", "on_one_line", "with_error"]

# text, or a number and what stands below it: nine numbers side by side fit a page, and with their intervals do not
Cell = str | tuple[str, str]


def with_error(value: float | None, error: float | None, sign: bool = False) -> Cell:
    """To two places, with its ± below where there is one; a dash for no value."""
    if value is None:
        return "–"
    number = fixed(value, 2, sign)
    return (number, f"±{fixed(error, 2)}") if error else number


def on_one_line(cell: Cell) -> str:
    """A cell where a line is a line: `4.67 ±0.22`."""
    return cell if isinstance(cell, str) else " ".join(cell)


def number_table(head: Sequence[Cell], lines: Iterable[Sequence[Cell]], name: str, left: int = 0) -> str:
    """Lines as long as `head`; the first `left` columns are text, which is set to the left. `name` is what the box is
    called where it is read aloud."""

    def row(cells: Sequence[Cell], tag: str) -> str:
        sides = ["left" if at < left else "right" for at in range(len(cells))]
        texts = [escape(cell) if isinstance(cell, str) else "<br>".join(map(escape, cell)) for cell in cells]
        return "".join(
            f'<{tag} style="text-align:{side};white-space:nowrap;padding:3px 8px 3px 3px">{text}</{tag}>'
            for side, text in zip(sides, texts, strict=True)
        )

    body = "".join(f"<tr>{row(line, 'td')}</tr>" for line in lines)
    return scrolling(f"<table><thead><tr>{row(head, 'th')}</tr></thead><tbody>{body}</tbody></table>", name)


def number_lines(
    head: Sequence[Cell], lines: Iterable[Sequence[Cell]], left: int = 0, rule: bool = False
) -> list[str]:
    """The same as text, a line each; with `rule` there is one below the head."""
    rows = [[on_one_line(cell) for cell in line] for line in (head, *lines)]
    return in_columns(rows, [at >= left for at in range(len(head))], rule)
