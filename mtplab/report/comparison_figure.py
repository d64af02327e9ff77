"""Figure: how far each file's acceptance length lies from the baseline's, by depth, with intervals.

Draws what a comparison found; compares nothing itself.
"""

from __future__ import annotations

from matplotlib.ticker import MaxNLocator

from mtplab.report.comparison import Against, Point
from mtplab.report.comparison_tables import pair_words
from mtplab.report.figures import Signs, new_figure, nothing_drawn, side_by_side, style_axes
from mtplab.report.palette import INK
from mtplab.report.picture import Picture
from mtplab.report.text import one_line, plain, plot_label
from mtplab.study.matching import AXES, Pair
from mtplab.study.numbers import fixed
from mtplab.study.words import DEPTH

__all__ = ["differences_by_depth"]

MOST = 12  # lines that can be told apart


def differences_by_depth(against: Against) -> Picture:
    """The difference in acceptance length against depth, one line per setting; a hollow point lies within chance.

    Of more than 12 settings, those are drawn that differ most.
    """
    lines = _lines(against)
    chosen = sorted(lines, key=lambda name: -max(abs(point.difference) for point in lines[name]))[:MOST]
    drawn = {name: found for name, found in lines.items() if name in chosen}
    of = "" if len(drawn) == len(lines) else f", the {len(drawn)} of {len(lines)} settings that differ most"
    title = f"{plot_label(against.other.name, 30)} less {plot_label(against.base.name, 30)}{of}"
    figure = new_figure(4.4)
    axes = figure.add_subplot()
    style_axes(axes, f"Difference in acceptance length\n{title}", DEPTH, "Difference (tokens per round)")
    if not drawn:
        return Picture(nothing_drawn(figure, axes), "Difference in acceptance length: no points with drafts matched.")
    axes.axhline(0, color=INK, linewidth=1)
    labels = {name: _labels(found[0].pair, against) for name, found in drawn.items()}
    signs = Signs(list(labels.values()))
    for index, (name, found) in enumerate(drawn.items()):
        x = [point.pair.depth + side_by_side(index, len(drawn)) for point in found]
        y = [point.difference for point in found]
        axes.plot(x, y, **signs.line(labels[name]))
        known = [at for at, point in enumerate(found) if point.change is not None]
        if known:
            errors = [found[at].change.error for at in known]
            signs.bars(axes, labels[name], [x[at] for at in known], [y[at] for at in known], errors)
        inside = [at for at, point in enumerate(found) if not point.beyond]
        axes.plot([x[at] for at in inside], [y[at] for at in inside], **signs.hollow(labels[name]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    signs.legend(figure)
    return Picture(figure, _alt(against, drawn))


def _lines(against: Against) -> dict[str, list[Point]]:
    """Setting in words -> its points with drafts, depths ascending."""
    found: dict[str, list[Point]] = {}
    for point in against.points:
        if point.pair.depth:
            found.setdefault(" · ".join(point.pair.settings.values()), []).append(point)
    return {name: sorted(points, key=lambda point: point.pair.depth) for name, points in found.items()}


def _labels(pair: Pair, against: Against) -> dict[str, str]:
    """What colour and marker say of a line."""
    titles = [title for name, (title, _) in AXES.items() if name not in ("cache", "exclusions")]
    pairs = against.matched.pairs
    telling = [title for title in titles if len({each.settings.get(title) for each in pairs}) > 1]
    also = [f"{title} {pair.settings[title]}" for title in telling]
    return {
        "policy_label": one_line(pair_words(pair, "cache")),
        "weights_label": " · ".join([one_line(pair_words(pair, "exclusions")), *map(one_line, also)]),
    }


def _alt(against: Against, drawn: dict[str, list[Point]]) -> str:
    parts = []
    for name, found in drawn.items():
        deepest = found[-1]
        said = fixed(deepest.difference, 2, sign=True)
        said += f" ± {deepest.change.error:.2f}" if deepest.change else ""
        parts.append(f"{one_line(name, 80)}: {said} at depth {deepest.pair.depth}")
    names = plain(against.other.name), plain(against.base.name)
    return f"Line chart, acceptance length of {names[0]} less that of {names[1]}, by draft depth. {'; '.join(parts)}."
