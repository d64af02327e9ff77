"""What a study found, as a list: a line each, the topic in front where there is one, cases of one finding below it.

Gets sentences; knows no study. In text they are sentences one after the other; in HTML nothing in them is markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mtplab.report.palette import GREEN
from mtplab.report.text import escape

__all__ = ["Finding", "Findings"]

# a number and its sign or unit stay on one line
_TOGETHER = re.compile(r" (?=[%±×])|(?<=[±×]) ")


@dataclass(frozen=True)
class Finding:
    """One thing found. With `items`, what is true of several cases: `text` leads to them and `after` follows them."""

    text: str
    topic: str = ""
    items: tuple[str, ...] = ()
    after: str = ""

    def __str__(self) -> str:
        said = f"{self.text}: {'; '.join(self.items)}." if self.items else self.text
        return " ".join(filter(None, (said, self.after)))


class Findings:
    """Findings, or plain sentences, for the end of a page. Empty ones are left out.

    Args:
        found: what there is to say, in order.
        nothing: what stands there when there is nothing.
    """

    def __init__(self, found: Iterable[Finding | str | None], nothing: str = "There is nothing to say."):
        made = (each if isinstance(each, Finding) else Finding(each or "") for each in found)
        self.found = [each for each in made if each.text]
        self._nothing = nothing

    @property
    def sentences(self) -> list[str]:
        """One for each finding."""
        return [str(each) for each in self.found]

    def _repr_html_(self) -> str:
        lines = "".join(map(_line, self.found)) or _line(Finding(self._nothing))
        style = f"border-left:4px solid {GREEN};padding:10px 20px 10px 38px;max-width:50em"
        return f'<ul class="finding" style="{style}">{lines}</ul>'

    def __repr__(self) -> str:
        return " ".join(self.sentences) or self._nothing


def _line(found: Finding) -> str:
    topic = f"<b>{_escaped(found.topic)}.</b> " if found.topic else ""
    if not found.items:
        return f"<li>{topic}{_escaped(str(found))}</li>"
    items = "".join(f"<li>{_escaped(item)}</li>" for item in found.items)
    after = f"<div>{_escaped(found.after)}</div>" if found.after else ""
    return f"<li>{topic}{_escaped(found.text)}:<ul>{items}</ul>{after}</li>"


def _escaped(text: str) -> str:
    return _TOGETHER.sub("\u00a0", escape(text))
