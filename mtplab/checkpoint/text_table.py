"""Tables as aligned text and as HTML, of cells nobody vouches for: control characters shown, markup escaped.

Knows nothing of what stands in them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from html import escape

__all__ = ["aligned", "as_bytes", "counted", "folder_name", "html_table", "in_columns", "printable", "scrolling"]


def printable(text: object, limit: int = 200) -> str:
    """The text on one line of at most `limit` characters, escaped where it holds what a terminal would obey."""
    plain = str(text)
    plain = plain if len(plain) <= limit else plain[: limit - 1] + "…"
    return plain if plain.isprintable() else ascii(plain)[1:-1]


def folder_name(path: str | os.PathLike[str]) -> str:
    """The last part of a path, which names a checkpoint on a page that leaves this machine."""
    return os.path.basename(os.path.normpath(path)) or str(path)


def as_bytes(count: int) -> str:
    """1234567 as "1.23 MB"; powers of ten, as disks and checkpoints are sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """A line for the columns' names and one for each row; columns named in `right` are set to the right."""
    return in_columns((columns, *rows), [name in right for name in columns])


def in_columns(rows: Sequence[Sequence[str]], right: Sequence[bool], rule: bool = False) -> list[str]:
    """A line for each row, cells below each other; `right` says of each column whether it is set to the right. With
    `rule` there is a rule below the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    if rule:
        lines.insert(1, "  ".join("─" * width for width in widths))
    return lines


def counted(number: int, word: str) -> str:
    """A number with the word for what it counts, in the plural where it is not 1."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def html_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = (), caption: str = ""
) -> str:
    """The same as a table; every cell escaped, header cells with their scope."""
    # styles stand in the cells: in a widget no sheet keeps columns apart
    sides = [f"padding:3px 10px 3px 4px;text-align:{'right' if name in right else 'left'}" for name in columns]
    head = "".join(
        f'<th scope="col" style="{side}">{escape(name)}</th>' for name, side in zip(columns, sides, strict=True)
    )
    align = [f'<td style="{side}">' for side in sides]
    body = "".join(
        "<tr>" + "".join(f"{tag}{escape(cell)}</td>" for tag, cell in zip(align, row, strict=True)) + "</tr>"
        for row in rows
    )
    style = "text-align:left;font-weight:600"
    title = f'<caption style="{style}">{escape(caption)}</caption>' if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def scrolling(content: str, name: str, height: str = "none", kind: str = "mtplab-scrolling") -> str:
    """HTML in a box that scrolls where it is too wide, or higher than `height`: also from the keyboard, with a name."""
    style = f"overflow:auto;max-width:100%;max-height:{height}"
    return f'<div class="{kind}" style="{style}" tabindex="0" role="region" aria-label="{escape(name)}">{content}</div>'
