"""Charts of traced acceptance: colour says the temperature, mark and dash the domain.

Draws a `View`; works out nothing.
"""

from __future__ import annotations

from mtplab.report.chart import Chart, ChartLine
from mtplab.report.palette import MARKER_NAMES, SERIES
from mtplab.report.text import plain
from mtplab.study.acceptance_views import Line, View

__all__ = ["acceptance_chart"]

_FIXED = "fixed depths"


def acceptance_chart(view: View) -> Chart:
    """The chart of a view: `found.view("gate")`, or at once `found.plot("gate")`."""
    temperatures = list(dict.fromkeys(line.temperature for line in view.lines))
    domains = list(dict.fromkeys(line.domain for line in view.lines))
    drawn, said = [], []
    for line in view.lines:
        temperature, domain = temperatures.index(line.temperature), domains.index(line.domain)
        # with one temperature, colour helps to tell domains apart
        hue = temperature if len(temperatures) > 1 else domain
        colour = SERIES[hue % len(SERIES)]
        if line.kind == "fixed":
            drawn.append(ChartLine("", line.x, line.y, colour, thin=True))
            continue
        name = _name(line, len(temperatures) > 1, len(domains) > 1)
        look = {"dash": domain, "marker": MARKER_NAMES[domain % len(MARKER_NAMES)], "chosen": line.chosen}
        drawn.append(
            ChartLine(name, line.x, line.y, colour, line.low, line.high, line.few, line.least or (), **look)
        )
        said.append(_said(line, name, view.share))
    if any(line.kind == "fixed" for line in view.lines):
        drawn.append(ChartLine(_FIXED, (), (), "currentColor", thin=True))
    more = f", and {len(said) - 8} more lines" if len(said) > 8 else ""
    alt = f"Line chart. {view.title}: {view.y_label.lower()} by {view.x_label.lower()}. {'; '.join(said[:8])}{more}."
    return Chart(drawn, view.title, view.x_label, view.y_label, alt, view.share, view.note)


def _name(line: Line, temperature: bool, domain: bool) -> str:
    parts = [f"temperature {line.temperature:g}"] if temperature or not domain else []
    if domain or line.domain is not None:
        parts.append("all prompts" if line.domain is None else plain(line.domain) or "no domain")
    return " · ".join(parts)


def _said(line: Line, name: str, share: bool) -> str:
    at = [index for index, value in enumerate(line.y) if value is not None]
    if not at:
        return f"{name}: nothing"
    if line.chosen is not None:
        at = [line.chosen]

    def told(index: int) -> str:
        value = line.y[index]
        number = "–" if value is None else f"{100 * value:.0f} %" if share else f"{value:.2f}"
        return f"{number} at {line.x[index]:.3g}"

    return f"{name}: {told(at[0])}" + (f" to {told(at[-1])}" if len(at) > 1 else "")
