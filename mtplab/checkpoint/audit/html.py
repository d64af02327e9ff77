"""An audit as HTML for a notebook or a report: no script, every text from the file escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from mtplab.checkpoint.audit.text import MODULE_COLUMNS, module_rows, size_rows, title, verdict
from mtplab.checkpoint.lenses.looks import COLUMNS
from mtplab.checkpoint.text_table import folder_name, html_table, printable, scrolling

if TYPE_CHECKING:
    from mtplab.checkpoint.audit.audit import Audit
    from mtplab.checkpoint.audit.finding import Finding

__all__ = ["as_html", "engines_html", "findings_html"]

MAX_ROWS = 400
# of the bar before the word, which is there as well: no colour of a text is readable both on white and on a dark page
_COLOURS = {"error": "#D55E00", "warning": "#E69F00", "note": "#56B4E9"}


def as_html(audit: Audit) -> str:
    """Title, sizes, head, findings, and the modules folded away."""
    columns, rows = size_rows(audit)
    sizes = html_table(columns, rows, columns[1:], caption="Bytes by part and storage dtype")
    head = f"<p>MTP head: {escape(printable(audit.head or 'none', 1500))}</p>"
    modules = module_rows(audit)
    more = f"<p>{len(modules) - MAX_ROWS} modules more are not shown</p>" if len(modules) > MAX_ROWS else ""
    table = html_table(MODULE_COLUMNS, modules[:MAX_ROWS], ("bytes",), caption="Modules, and the rule that decided")
    named = escape(title(audit, folder_name(audit.path)))
    return (
        f'<div class="mtplab-audit"><p><strong>{named}</strong><br>{escape(verdict(audit))}</p>'
        f"{findings_html(audit.findings)}{engines_html(audit)}{sizes}{head}"
        f"<details><summary>{len(modules)} modules</summary>"
        f"{scrolling(table + more, 'Modules', '32em')}</details></div>"
    )


def engines_html(audit: Audit) -> str:
    """The engines side by side, the sentence that compares them, what it leaves open, and what each does."""
    looks = audit.looks
    if looks is None:
        return ""
    title = "How engines read its list"
    caveats = "<br>".join(escape(printable(text, 1500)) for text in looks.caveats())
    told = "".join(f"<li>{escape(printable(item.summary, 1500))}</li>" for item in looks.looks)
    return (
        f"{scrolling(html_table(COLUMNS, looks.rows(), caption=title), title)}"
        f"<p>{escape(printable(audit.reading, 3000))}</p><p>{caveats}</p>"
        f"<details><summary>engine by engine</summary><ul>{told}</ul></details>"
    )


def findings_html(findings: tuple[Finding, ...]) -> str:
    """A list of findings, errors first: what, why, what to do."""
    items = []
    for finding in findings:
        tag = (
            f'<strong style="border-left:4px solid {_COLOURS[finding.severity]};padding-left:6px">'
            f"{finding.severity}</strong> "
            f"<code>{escape(finding.kind)}</code>"
        )
        told = [f"{tag} {escape(printable(finding.message, 1500))}"]
        for label, text in (("why", finding.why), ("fix", finding.fix)):
            told += [f"{label}: {escape(printable(text, 1500))}"] if text else []
        items.append(f"<li>{'<br>'.join(told)}</li>")
    return f'<ul class="mtplab-findings">{"".join(items)}</ul>' if items else ""
