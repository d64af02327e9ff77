"""Sentences set off from the page by a bar beside them: what a study or a comparison says.

Knows nothing of what they say; whatever they quote is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtplab.report.palette import GREEN
from mtplab.report.text import escape

__all__ = ["finding_html"]


def finding_html(sentences: Iterable[str]) -> str:
    """A paragraph, a line for each sentence."""
    text = "<br>".join(map(escape, sentences))
    return f'<p class="finding" style="border-left:4px solid {GREEN};padding:8px 16px;max-width:50em">{text}</p>'
