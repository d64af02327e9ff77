"""A line chart as SVG, written by hand: drawn in milliseconds, so that it follows a slider, in the page's own colours.

Gets lines of numbers with their names; knows no study. matplotlib (`figures.py`) draws what need not be so quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtplab.report.palette import DASHES
from mtplab.report.text import escape

__all__ = ["Chart", "ChartLine"]

WIDTH, HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 52
_TEXT = 'font-family="system-ui,sans-serif" fill="currentColor"'
_SHAPES = {
    "circle": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "square": "M-3.6,-3.6h7.2v7.2h-7.2z",
    "up": "M0,-4.8L4.6,4H-4.6z",
    "diamond": "M0,-5.2L5.2,0L0,5.2L-5.2,0z",
    "down": "M0,4.8L4.6,-4H-4.6z",
    "plus": "M-1.6,-4.8h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2v-3.2h-3.2v-3.2h3.2z",
    "cross": "M-4,-4L0,-1.6L4,-4L1.6,0L4,4L0,1.6L-4,4L-1.6,0z",
}


@dataclass(frozen=True)
class ChartLine:
    """One line: points (None: a gap), their intervals, and its look.

    `thin` draws it thin, dotted and without marks, to compare with. `least` draws a bar from each point down to that x.
    `few` makes points hollow, `chosen` puts a ring around one. A line without a label has no place in the legend.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    few: Sequence[bool] = ()
    least: Sequence[float] = ()
    dash: int = 0
    marker: str = "circle"
    thin: bool = False
    chosen: int | None = None


class Chart:
    """Lines in one pair of axes; shows as HTML in Jupyter and in the report, in light and in dark.

    Args:
        lines: what to draw; lines at whole x are set side by side, so that equal ones can be told apart.
        alt: what the chart says, in a sentence or two, with its main numbers.
        share: y runs from 0 to 1 and is shown in per cent.
        note: a line below the chart.
    """

    def __init__(
        self,
        lines: Sequence[ChartLine],
        title: str,
        x_label: str,
        y_label: str,
        alt: str,
        share: bool = False,
        note: str = "",
    ):
        self.lines, self.title, self.alt, self.note = list(lines), title, " ".join(alt.split()), note
        self.x_label, self.y_label, self.share = x_label, y_label, share

    def to_html(self) -> str:
        """A `<figure>` with everything inside it."""
        keys = "".join(_key(line) for line in self.lines if line.label)
        note = f'<div style="font-size:12px;opacity:.8">{escape(self.note)}</div>' if self.note else ""
        return (
            f'<figure style="margin:8px 0;max-width:{WIDTH}px"><figcaption style="font-weight:600">{escape(self.title)}'
            f'</figcaption><div style="display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px">{keys}</div>'
            f'<svg role="img" aria-label="{escape(self.alt)}" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'style="width:100%;height:auto;display:block">{self._svg()}</svg>{note}</figure>'
        )

    _repr_html_ = to_html

    def __repr__(self) -> str:
        return f"[chart] {self.alt}"

    def _svg(self) -> str:
        xs = [x for line in self.lines for x in (*line.x, *line.least)]
        ys = [y for line in self.lines for y in _heights(line)]
        if not xs or not ys:
            return f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle" {_TEXT}>nothing to draw</text>'
        x_ticks, y_ticks = _ticks(min(xs), max(xs), 10), [0, 0.2, 0.4, 0.6, 0.8, 1.0]
        low_y, high_y = 0.0, 1.0
        if not self.share:
            low_y, high_y = min(1.0, *ys), max(1.5, *ys)
            y_ticks = _ticks(low_y, high_y, 7)
        pad = 0.03 * ((max(xs) - min(xs)) or 1.0)
        low_x, wide = min(xs) - pad, (max(xs) - min(xs) or 1.0) + 2 * pad
        tall = (high_y - low_y) * 1.04 or 1.0

        def at_x(x: float) -> float:
            return _LEFT + (x - low_x) / wide * (WIDTH - _LEFT - _RIGHT)

        def at_y(y: float) -> float:
            y = min(max(y, low_y), low_y + tall)  # a wide interval of a doubtful point may end at the edge
            return HEIGHT - _BOTTOM - (y - low_y) / tall * (HEIGHT - _TOP - _BOTTOM)

        # all with as many digits as the finest of them needs
        fine = max(len(f"{y:g}".partition(".")[2]) for y in y_ticks) if y_ticks else 0
        parts = []
        for y in y_ticks:
            words = f"{100 * y:.0f}" if self.share else f"{y:.{fine}f}"
            parts.append(
                f'<path d="M{_LEFT},{at_y(y):.1f}H{WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity=".18"/>'
                f'<text x="{_LEFT - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end" font-size="13" {_TEXT}>{words}</text>'
            )
        parts += [
            f'<text x="{at_x(x):.1f}" y="{HEIGHT - _BOTTOM + 20}" text-anchor="middle" font-size="13" {_TEXT}>'
            f"{x:g}</text>"
            for x in x_ticks
        ]
        middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
        parts.append(
            f'<text x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle" font-size="14" {_TEXT}>{escape(self.x_label)}'
            f'</text><text transform="translate(18,{middle_y}) rotate(-90)" text-anchor="middle" font-size="14" '
            f"{_TEXT}>{escape(self.y_label)}</text>"
        )
        beside = [line for line in self.lines if not line.thin]
        apart = min(5.0, 24 / max(1, len(beside)))
        for line in self.lines:
            shift = 0.0
            if not line.thin and not line.least and all(float(x).is_integer() for x in line.x):
                shift = (beside.index(line) - (len(beside) - 1) / 2) * apart
            parts.append(_drawn(line, at_x, at_y, shift))
        return "".join(parts)


def _heights(line: ChartLine) -> list[float]:
    """Every y that must be within the axes: intervals too, but of points over few."""
    spans = [end for ends in (line.low, line.high) for at, end in enumerate(ends) if not (line.few and line.few[at])]
    return [y for y in (*line.y, *spans) if y is not None]


def _drawn(
    line: ChartLine, at_x: Callable[[float], float], at_y: Callable[[float], float], shift: float
) -> str:
    found = enumerate(zip(line.x, line.y, strict=True))
    points = [(at_x(x) + shift, at_y(y), at) for at, (x, y) in found if y is not None]
    path = "".join(f"{'L' if at else 'M'}{x:.1f},{y:.1f}" for at, (x, y, _) in enumerate(points))
    if line.thin:
        look = 'stroke-width="1.8" stroke-dasharray="2 3"'
        return f'<path d="{path}" fill="none" stroke="{line.colour}" {look}/>'
    parts = [f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2" {_dash(line)}/>']
    bars = []
    for x, y, at in points:
        if line.low and line.low[at] is not None and line.high[at] is not None and line.low[at] != line.high[at]:
            bars.append(f"M{x:.1f},{at_y(line.low[at]):.1f}V{at_y(line.high[at]):.1f}")
        if line.least:
            bars.append(f"M{x:.1f},{y:.1f}H{at_x(line.least[at]) + shift:.1f}")
    look = f'fill="none" stroke="{line.colour}" stroke-opacity=".9" stroke-width="1"'
    parts.append(f'<path d="{"".join(bars)}" {look}/>')
    for x, y, at in points:
        where = f'transform="translate({x:.1f},{y:.1f})"'
        fill = "none" if line.few and line.few[at] else line.colour
        parts.append(f'<path d="{_SHAPES[line.marker]}" {where} fill="{fill}" stroke="{line.colour}"/>')
        if at == line.chosen:
            parts.append(f'<circle r="9" {where} fill="none" stroke="currentColor" stroke-width="2"/>')
    return "".join(parts)


def _dash(line: ChartLine) -> str:
    pattern = DASHES[line.dash % len(DASHES)]
    return f'stroke-dasharray="{" ".join(f"{part:g}" for part in pattern)}"' if pattern else ""


def _key(line: ChartLine) -> str:
    if line.thin:
        sample = f'<path d="M1,6H33" stroke="{line.colour}" stroke-width="1.8" stroke-dasharray="2 3"/>'
    else:
        sample = (
            f'<path d="M1,6H33" stroke="{line.colour}" stroke-width="2" {_dash(line)}/>'
            f'<path d="{_SHAPES[line.marker]}" transform="translate(17,6)" fill="{line.colour}"/>'
        )
    return (
        '<span style="white-space:nowrap"><svg aria-hidden="true" viewBox="0 0 34 12" width="34" height="12">'
        f"{sample}</svg> {escape(line.label)}</span>"
    )


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers from low to high, about as many as wanted."""
    raw = (high - low) / wanted or 1.0
    base = 10 ** math.floor(math.log10(raw))
    step = next(factor * base for factor in (1, 2, 2.5, 5, 10) if factor * base >= raw * (1 - 1e-9))
    if high - low >= wanted:
        step = max(1, round(step))  # whole tokens, positions and depths
    first = math.ceil(low / step - 1e-9)
    return [round(each * step, 9) for each in range(first, math.floor(high / step + 1e-9) + 1)]
