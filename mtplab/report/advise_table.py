"""Tables of advice: a line for each depth, and the cost model against published measurements.

Strings of HTML, escaped; knows no widget and works nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtplab.report.table import html_table
from mtplab.study.advice import Advice
from mtplab.study.published import Compared

__all__ = ["advice_table", "published_table"]


def advice_table(advice: Advice) -> str:
    """Tokens, time, speed and what binds, by depth."""
    rows = []
    for line in advice.lines:
        most = line.cost.words(line.cost.binds) + ("" if line.fits else "; does not fit")
        numbers = (f"{line.length:.2f}", f"{line.ratio:.2f}", f"{line.tokens_per_second:.0f}", f"{line.speedup:.2f}")
        rows.append([line.depth, *numbers, most])
    head = ["Depth", "Tokens a round", "Takes, in plain rounds", "Tokens/s", "Speed-up", "Most of it is"]
    return html_table(head, rows, "Times are a model's, tokens a round as given")


def published_table(compared: Sequence[Compared]) -> str:
    """Published and modelled numbers of every point, and the reason where they are far apart."""
    rows = []
    for one in compared:
        point = one.point
        where = (
            f"{point.model}, {point.weights}, {point.tp} × {point.gpu}, batch {point.batch}, context {point.context:,}"
        )
        rows.append([where, point.depth, *one.cells, "explained" if point.why else ""])
    head = ["Where", "Depth", "Published", "Model", "Off by", "Why"]
    return html_table(head, rows, "The model against published measurements", height="28em")
