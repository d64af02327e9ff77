"""Figures of a cache study: what each policy saves and costs, how that goes with the context, and the draft's apart.

Draws what `mtplab.study.cache_study` measured; knows no cache and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from mtplab.report.figures import WIDTH, new_figure, style_axes, style_cells
from mtplab.report.palette import GRID, INK, MARKERS, PAPER, policy_colours
from mtplab.report.picture import Picture
from mtplab.report.text import plain, plot_label
from mtplab.study.cache_study import CacheLine, CacheStudy, context_edges
from mtplab.study.number_table import number_table, with_error
from mtplab.study.numbers import NATS, rounded
from mtplab.study.words import DEPTH, cache_words, signed

__all__ = ["MEASURES", "cache_bytes_and_cost", "cache_by_context", "cache_pictures", "cache_table", "draft_cache_grid"]

# key of `Quality.by_context` → (what an axis calls it, how a number of it is written)
MEASURES = {
    "kl": (f"KL from unquantised ({NATS})", "{:.2g}"),
    "top1_agreement": ("Same likeliest token (share)", "{:.3f}"),
    "perplexity": ("Perplexity of the text", "{:.2f}"),
}


class _Signs:
    """A colour and a marker for each target policy, the same in every figure of a study."""

    def __init__(self, study: CacheStudy):
        self.labels = {name: cache_words(name) for name in study.policies}
        self.colours = policy_colours(self.labels.values())

    def shift(self, policy: str) -> float:
        """−½ to ½: how far a policy's points stand aside, so that bars do not lie on each other."""
        count = len(self.labels)
        return 0.0 if count < 2 else list(self.labels).index(policy) / (count - 1) - 0.5

    def line(self, policy: str, **more: Any) -> dict[str, Any]:
        index = list(self.labels).index(policy)
        return {
            "color": self.colours[self.labels[policy]],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 6,
            "linewidth": 1.8,
            "label": plot_label(self.labels[policy], 26),
        } | more


def cache_bytes_and_cost(study: CacheStudy, depth: int) -> Picture:
    """What each policy saves (bytes a token, the target's cache) against what it costs: the target's KL, and the
    acceptance length with a draft that has the same policy. Bars are 95 % intervals over texts or prompts. Policies of
    as many bytes stand a little aside of them."""
    figure, signs = new_figure(4.0), _Signs(study)
    left, right = figure.subplots(1, 2)
    style_axes(left, "The target's own quality", "KV cache (bytes a token, target)", MEASURES["kl"][0])
    style_axes(right, f"Acceptance, depth {depth}", "KV cache (bytes a token, target)", "Tokens a round")
    said = []
    widest = max(line.nbytes for line in study.alike)
    for line in study.alike:
        style = signs.line(line.policy, linestyle="none", markersize=8)
        # policies of as many bytes stand side by side, where the later would hide the earlier
        equal = [other for other in study.alike if other.nbytes == line.nbytes]
        at = line.nbytes + 0.03 * widest * (equal.index(line) - (len(equal) - 1) / 2)
        kl, length = line.quality.mean_kl, line.acceptance.length(depth)
        words = f"{plain(signs.labels[line.policy])} {line.nbytes} bytes"
        if kl:
            _bars(left, [at], [kl], [line.quality.kl_interval() or 0.0], style)
            words += f", KL {rounded(kl)[0]}"
        if length is not None:
            _bars(right, [at], [length], [line.acceptance.half_interval(depth) or 0.0], style)
            words += f", {length:.2f} tokens a round"
        said.append(words)
    left.set_yscale("log")
    for axes in (left, right):
        axes.set_xlim(0, 1.06 * widest)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return Picture(figure, f"Bytes a token against KL and against acceptance at depth {depth}: {'; '.join(said)}.")


def cache_by_context(
    study: CacheStudy, depth: int, edges: Sequence[int] | None = None, measure: str = "kl", draft: str | None = None
) -> Picture:
    """The target's quality and acceptance by position in the context, a line for each target policy.

    `edges`: ranges of positions, doubling from 64 if None; `measure`: a key of MEASURES; `draft`: the draft's policy,
    each target's own if None. Raises ConfigError for a pair that was not measured.
    """
    figure = new_figure(4.2)
    left, right = figure.subplots(1, 2)
    lines = study.alike if draft is None else [study.line(policy, draft) for policy in study.policies]
    said = _contexts(left, right, study, lines, depth, edges or context_edges(study.longest), measure)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return Picture(figure, said)


def cache_pictures(
    study: CacheStudy, policies: Sequence[str], draft: str | None, depth: int, edges: Sequence[int], measure: str
) -> Picture:
    """Quality by context, acceptance by context and acceptance by depth of some policies, in one picture with fixed
    margins: quick enough to follow a control."""
    figure = Figure(figsize=(WIDTH, 3.7), facecolor=PAPER)
    figure.subplots_adjust(left=0.075, right=0.99, bottom=0.3, top=0.9, wspace=0.3)
    left, middle, right = figure.subplots(1, 3)
    lines = [study.line(policy, draft) for policy in policies]
    said = _contexts(left, middle, study, lines, depth, edges, measure, short=True)
    said += " " + _depths(right, study, lines)
    figure.legend(*right.get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False, fontsize=9)
    return Picture(figure, said, dpi=90)


def draft_cache_grid(study: CacheStudy, depth: int) -> Picture:
    """Acceptance length by the target's policy and the draft's, with its change from an unquantised draft's cache,
    which drafts for the same text; ± is half a 95 % interval over prompts, prompt by prompt. Bold: beyond chance."""
    targets = study.policies
    drafts = [name for name in study.draft_policies if sum((t, name) in study.lines for t in targets) == len(targets)]
    # a draft that follows its target has a column of its own
    columns: list[tuple[str, str | None]] = [("as the target's", None), *((cache_words(name), name) for name in drafts)]
    figure = new_figure(0.9 + 0.5 * len(targets))
    axes = figure.add_subplot()
    title = f"Tokens a round, depth {depth}; change from an unquantised draft's cache"
    drafted = [plot_label(words, 22) for words, _ in columns]
    served = [plot_label(cache_words(name), 26) for name in targets]
    style_cells(axes, title, "Draft's KV cache", drafted, "Target's KV cache", served)
    said = []
    for y, target in enumerate(targets):
        for x, (words, draft) in enumerate(columns):
            line = study.line(target, draft)
            change = study.change(line, depth, of_draft=True)
            length = line.acceptance.length(depth)
            text = "–" if length is None else f"{length:.2f}"
            beyond = False
            if change is not None and line.draft_policy != "none":
                half = change[1]
                text += f"  {signed(change[0])}" + ("" if half is None else f" ± {half:.2f}")
                beyond = half is not None and abs(change[0]) > half
            weight = "bold" if beyond else "normal"
            axes.text(x, y, text, ha="center", va="center", fontsize=10, color=INK, weight=weight)
            said.append(f"target {plain(cache_words(target))}, draft {plain(words)}: {text}")
    for y in range(1, len(targets)):
        axes.axhline(y - 0.5, color=GRID, linewidth=0.8)
    return Picture(figure, f"Acceptance length at depth {depth} by both caches. {'; '.join(said)}.")


def cache_table(study: CacheStudy, depth: int) -> str:
    """HTML: a line for each target policy with a draft that follows it."""
    head = ("KV cache", ("bytes", "a token"), "draft's", ("tokens", "a round"), "change", ("KL", NATS),
            ("same", "likeliest"), "perplexity")  # fmt: skip
    rows = []
    for line in study.alike:
        change, quality = study.change(line, depth), line.quality
        kl, error = rounded(quality.mean_kl or 0.0, quality.kl_interval())
        rows.append(
            (
                cache_words(line.policy, line.draft_policy),
                f"{line.nbytes:,}",
                f"{line.draft_nbytes:,}",
                with_error(line.acceptance.length(depth), line.acceptance.half_interval(depth)),
                "–" if change is None or line.policy == "none" else with_error(*change, sign=True),
                (kl, f"±{error}") if quality.mean_kl and error else kl,
                f"{100 * (quality.top1_agreement or 0):.2f} %",
                f"{quality.perplexity:.3f}",
            )
        )
    return number_table(head, rows, "Cache policies", left=1)


def _contexts(
    left: Axes,
    right: Axes,
    study: CacheStudy,
    lines: Sequence[CacheLine],
    depth: int,
    edges: Sequence[int],
    measure: str,
    short: bool = False,
) -> str:
    """Both axes by context; returns what they say. A point stands at the middle of its range."""
    signs, (name, form) = _Signs(study), MEASURES[measure]
    where = "Position in the context (tokens)"
    style_axes(left, "Quality" if short else "The target's own quality", where, name)
    style_axes(right, f"Acceptance, depth {depth}", where, "Tokens a round")
    said = []
    for line in lines:
        records = study.by_context(line, depth, edges)
        style = signs.line(line.policy)
        middle = [_middle(record) * 2 ** (0.3 * signs.shift(line.policy)) for record in records]
        halves = [record["kl_half_interval"] or 0.0 if measure == "kl" else 0.0 for record in records]
        # an unquantised cache has no KL to stand on a log axis
        shown = [(x, record[measure], half) for x, record, half in zip(middle, records, halves, strict=True)
                 if record[measure] is not None and (measure != "kl" or record["kl"] > 0)]  # fmt: skip
        if shown:
            x, y, half = zip(*shown, strict=True)
            _bars(left, x, y, half, style)
            each = ", ".join(f"{form.format(v)} around {at:.0f}" for at, v in zip(x, y, strict=True))
            said.append(f"{plain(signs.labels[line.policy])}: {each}")
        pairs = zip(middle, records, strict=True)
        seen = [(x, record) for x, record in pairs if record["acceptance_length"] is not None]
        y, half = ([record[key] or 0.0 for _, record in seen] for key in ("acceptance_length", "half_interval"))
        _bars(right, [x for x, _ in seen], y, half, style)
    if measure == "kl" and said:
        left.set_yscale("log")
        left.yaxis.set_minor_locator(NullLocator())
    reached = [
        max(edge for edge in edges if edge == edges[1] or edge / 2 < one)
        for one in (_last(study, "quality"), _last(study, "trace"))
    ]
    for axes, end in zip((left, right), reached, strict=True):
        axes.set_xscale("log", base=2)
        ticks = [edge for edge in edges if 0 < edge <= end]
        axes.set_xlim(ticks[0] / 2.6, ticks[-1])
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(edge) for edge in ticks])
    return f"{name} by position in the context. {'; '.join(said) or 'No line has any.'}."


def _bars(axes: Axes, x: Sequence[float], y: Sequence[float], half: Sequence[float], style: dict[str, Any]) -> None:
    """A line with vertical intervals: two artists, where error bars would be four and slow to draw. An end below a
    tenth of the value stays there, for a log axis has no zero."""
    axes.plot(x, y, **style)
    low = [max(value - one, 0.1 * value) for value, one in zip(y, half, strict=True)]
    axes.vlines(x, low, [value + one for value, one in zip(y, half, strict=True)], colors=style["color"], linewidth=1.1)


def _last(study: CacheStudy, what: str) -> int:
    """The largest position that quality, or a round of a trace, stands at."""
    lines = study.lines.values()
    if what == "quality":
        return max(int(line.quality.position.max()) for line in lines)
    return max(int((line.trace.prompt_lengths + line.trace.output_lengths).max()) for line in lines)


def _depths(axes: Axes, study: CacheStudy, lines: Sequence[CacheLine]) -> str:
    """Acceptance by depth, all contexts together; returns what it says."""
    signs = _Signs(study)
    style_axes(axes, "By depth", DEPTH, "Tokens a round")
    said = []
    for line in lines:
        depths = [depth for depth in range(study.max_depth + 1) if line.acceptance.length(depth) is not None]
        lengths = [line.acceptance.length(depth) for depth in depths]
        halves = [line.acceptance.half_interval(depth) or 0.0 for depth in depths]
        at = [depth + 0.3 * signs.shift(line.policy) for depth in depths]
        _bars(axes, at, lengths, halves, signs.line(line.policy))
        if lengths:
            said.append(f"{plain(signs.labels[line.policy])} {lengths[-1]:.2f}")
    axes.set_ylim(bottom=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return f"Tokens a round at depth {study.max_depth}: {', '.join(said)}."


def _middle(record: dict[str, Any]) -> float:
    """Where a range stands on an axis of doublings."""
    low, high = record["from"], record["to"]
    return (low * high) ** 0.5 if low else high / 2**0.5
