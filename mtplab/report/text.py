"""Untrusted text made inert: names in checkpoints, prompts and error messages may hold anything.

Knows nothing of where the text comes from. Each reader needs care of its own: HTML, a JSON island inside HTML,
Markdown, a matplotlib label, and a terminal or a table, where a line is a line.
"""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

from mtplab.checkpoint.text_table import as_bytes
from mtplab.errors import printable

__all__ = ["escape", "human_bytes", "in_markdown", "json_island", "one_line", "part_words", "plain", "plot_label"]

MOST = 44  # characters of a cell in a terminal

_MARKS = re.compile(r"([\\`*_\[\]<>|&#~$!])")
# every sign that can turn the reading direction of the text around it
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: object) -> str:
    """`text` without control characters but tab and newline, and without direction marks, each shown as its escape."""
    return printable(str(text), keep="\t\n")


def escape(text: object) -> str:
    """`text` for an HTML element or a quoted attribute: markup and control characters are shown, not obeyed."""
    return html.escape(plain(text), quote=True)


def one_line(text: object, most: int = MOST) -> str:
    """On one line of at most `most` characters, cut in the middle: names differ at their ends."""
    line = " ".join(plain(text).split())
    half = (most - 1) // 2
    return line if len(line) <= most else f"{line[:half]}…{line[-(most - 1 - half) :]}"


def in_markdown(text: object) -> str:
    """Text that Markdown takes as it is: no markup, no link, nobody mentioned."""
    line = _MARKS.sub(r"\\\1", one_line(text, 400))
    return line.replace("://", "\\://").replace("www.", "www\\.").replace("@", "@\u200b")


def plot_label(text: object, limit: int = 60) -> str:
    """`text` for a matplotlib label: a dollar sign must not start a formula; at most `limit` characters."""
    label = plain(text).replace("\n", " ")
    if len(label) > limit:
        label = label[: limit - 1] + "…"
    return label.replace("$", r"\$")


def json_island(value: Any) -> str:
    """`value` as JSON that may stand inside `<script>`: neither `</script>` nor `<!--` can end or change it.

    Numbers that JSON does not have (NaN, infinities) become null.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return _BIDI.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def part_words(part: str) -> str:
    """A plan's part in words: its "target" is the layers alone, embedding and head stand beside it."""
    return "target layers" if part == "target" else part


def human_bytes(count: float | None) -> str:
    """A number of bytes with a unit, in powers of 1000: `1.45 MB`; a dash where there is none."""
    return "–" if count is None else as_bytes(round(count))
