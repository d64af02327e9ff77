"""A comparison in sentences and tables, and those as text for a terminal and as Markdown.

Every number comes from the `Comparison`; what a file does not have has no table. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from typing import Any

from mtplab.report.comparison import QUALITY, Against, Comparison, Point
from mtplab.report.table import Table, in_markdown, one_line
from mtplab.report.text import human_bytes
from mtplab.study.matching import AXES, Difference, Pair
from mtplab.study.row import ResultRow

__all__ = ["LEGEND", "markdown_of", "pair_words", "sentences", "signed", "tables", "text_of"]

LEGEND = (
    "* outside its own 95 % interval, which one in twenty is by chance alone; ** beyond chance with all of them looked "
    "at (Holm)"
)
WIDTH = 110  # columns of a sentence in a terminal
NAME = 24  # characters of a file's name over a column
_SHOWN = 12  # differences that are told one by one
_LINES = 20  # settings without a partner, likewise
_MISSING = "–"


def sentences(against: Against) -> list[str]:
    """What was matched, what differs, how it was compared and what came out."""
    parts = (_matched(against), _differences(against), _how(against), _verdict(against), _quality(against))
    return [sentence for sentence in (*parts, _bytes(against), _speed(against)) if sentence]


def tables(against: Against, positions: bool = True) -> list[Table]:
    """Lengths, positions, quality, bytes, speed, what failed and what has no partner: those that have something."""
    found = [
        _lengths(against),
        _positions(against) if positions else None,
        _quality_table(against),
        _byte_table(against),
        _speed_table(against),
        _failed_table(against),
        _left_over(against),
    ]
    return [table for table in found if table is not None and table.body]


def text_of(comparison: Comparison, positions: bool = False) -> str:
    """Everything as text, one part for each file that is compared with the baseline."""
    parts = []
    for against in comparison.against:
        parts.append("\n".join(fill(sentence, WIDTH, subsequent_indent="  ") for sentence in sentences(against)))
        parts += [table.to_text() for table in tables(against, positions)]
    return "\n\n".join(parts)


def markdown_of(comparison: Comparison, positions: bool = False) -> str:
    """The same as Markdown, a heading for each file that is compared with the baseline."""
    parts = []
    for against in comparison.against:
        parts.append(f"### {in_markdown(against.other.name)} against {in_markdown(against.base.name)}")
        parts.append("\n".join(f"- {in_markdown(sentence)}" for sentence in sentences(against)))
        parts += [table.to_markdown() for table in tables(against, positions)]
    return "\n\n".join(parts) + "\n"


def pair_words(pair: Pair, axis: str) -> str:
    """A setting of a pair: its value, or `unquantised → int8` where the pair was matched across it."""
    read = AXES[axis][1]
    base, other = read(pair.base), read(pair.other)
    return base if base == other else f"{base} → {other}"


def signed(value: float, digits: int = 2) -> str:
    """With its sign, and no sign before nothing."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{digits}f}"


# sentences


def _matched(against: Against) -> str:
    found, base, other = against.matched, against.base.name, against.other.name
    on = ["depth", *(AXES[name][0] for name in found.on if _varies(found.pairs, AXES[name][0]))]
    count = len(found.pairs)
    text = f"{other} against {base}: {count} point{'s' * (count != 1)} matched on {_listed(on)}"
    left = [(len(found.only_base), base), (len(found.only_other), other)]
    missing = [f"{n} row{'s' * (n != 1)} of {name}" for n, name in left if n]
    if missing:
        text += f"; {' and '.join(missing)} {'have' if sum(n for n, _ in left) > 1 else 'has'} no partner"
    if not count:
        text += f". {_why_nothing(against)}"
    return text.rstrip(".") + "."


def _why_nothing(against: Against) -> str:
    """Settings on which the two files have no value in common."""
    apart = []
    for name in against.matched.on:
        title, read = AXES[name]
        mine, theirs = ({read(row): None for row in side.rows} for side in (against.base, against.other))
        if not mine.keys() & theirs.keys():
            apart.append(f"{title} ({_some(mine)} against {_some(theirs)})")
    if not apart:
        return "They have no combination of settings and depth in common"
    return f"They have nothing in common in {_listed(apart)}: say what to match by, such as depth alone"


def _differences(against: Against) -> str:
    settings = [d for d in against.differences if d.setting]
    others = [d for d in against.differences if not d.setting]
    if not against.matched.pairs:
        return ""
    if not settings and not others:
        return "Settings, checkpoint, versions and machine are the same, as far as the rows say."
    said = []
    if settings:
        said.append(f"What is compared: {'; '.join(_instead(d, against) for d in settings)}.")
    if others:
        more = f"; and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        said.append(f"Also different: {'; '.join(_instead(d, against) for d in others[:_SHOWN])}{more}.")
    return " ".join(said)


def _instead(difference: Difference, against: Against) -> str:
    every = difference.pairs == len(against.matched.pairs)
    of = "" if every else f" (in {difference.pairs} of {len(against.matched.pairs)} points)"
    return f"{difference.name} {one_line(difference.other)} instead of {one_line(difference.base)}{of}"


def _how(against: Against) -> str:
    if not any(point.pair.depth for point in against.points):
        return ""
    told = [point.change.paired for point in against.points if point.change is not None]
    if not told:
        return "No interval can be told: it takes counts by prompt, of two prompts or more, in both files."
    if all(told):
        how = "Both ran the same prompts, so they are compared prompt by prompt"
    elif not any(told):
        how = "They did not run the same prompts: each file's own spread counts, and only large differences show"
    else:
        how = f"{sum(told)} of {len(told)} points ran the same prompts in both and are compared prompt by prompt"
    return f"{how}; ± is half a 95 % interval."


def _verdict(against: Against) -> str:
    compared = against.compared
    same = sum(point.change is not None and not point.compared and point.pair.depth > 0 for point in against.points)
    alike = f" {same} further points are equal, prompt by prompt." if same and compared else ""
    if not compared:
        return f"Acceptance length: all {same} points with drafts are equal, prompt by prompt." if same else ""
    beyond = [point for point in compared if point.beyond]
    count, outside = len(compared), len(beyond)
    if not beyond:
        whole = "the difference lies" if count == 1 else f"all {count} differences lie"
        return f"Acceptance length: {whole} within chance.{alike}"
    holds = [point for point in beyond if point.holds]
    lie = "lies" if outside == 1 else "lie"
    still = f"{len(holds)} still {'does' if len(holds) == 1 else 'do'}" if holds else "none still does"
    where = f": {_extremes(holds)}" if holds else ""
    return (
        f"Acceptance length: {outside} of {count} difference{'s' * (count > 1)} {lie} outside chance one by "
        f"one, where about {0.05 * count:.2g} would by chance alone; {still} with all looked at{where}.{alike}"
    )


def _extremes(points: Sequence[Point]) -> str:
    """The largest loss and the largest gain."""
    low = min(points, key=lambda point: point.difference)
    high = max(points, key=lambda point: point.difference)
    chosen = [("largest loss", low)] if low.difference < 0 else []
    chosen += [("largest gain", high)] if high.difference > 0 else []
    return "; ".join(f"{what} {_with_error(p)} at depth {p.pair.depth}{_where(p.pair)}" for what, p in chosen)


def _where(pair: Pair) -> str:
    words = ", ".join(one_line(pair.settings[title]) for title in ("exclusions", "KV cache") if title in pair.settings)
    return f" ({words})" if words else ""


def _quality(against: Against) -> str:
    lines = _quality_lines(against)
    if not lines:
        return ""
    parts = []
    for name, title, show in _QUALITY:
        both = [(_get(p.base, name), _get(p.other, name)) for p in lines]
        both = [(a, b) for a, b in both if a is not None and b is not None]
        if both:
            a, b = max(both, key=lambda values: abs(values[1] - values[0]))
            parts.append(f"{title} {show(a)} and now {show(b)}" if a != b else f"{title} unchanged")
    settings = "where it differs most: " if len(lines) > 1 else ""
    return f"The target's own text, {settings}{'; '.join(parts)}." if parts else ""


def _bytes(against: Against) -> str:
    if not against.points:
        return ""
    same = [name for name, read in _SIZES if _known(against, read) and not _byte_pairs(against, read)]
    return f"The same in both: {_listed(same)}." if same else ""


def _speed(against: Against) -> str:
    if not _speed_pairs(against):
        return ""
    apart = [d.name for d in against.differences if d.name in ("CPU", "device", "threads", "torch", "platform")]
    if apart:
        return f"Tokens per second were measured with another {_listed(apart)}: the ratio is of that too."
    return "Tokens per second have no interval: one run each."


# tables


def _lengths(against: Against) -> Table:
    # plain decoding gives one token a round, whatever else: there is nothing to compare
    points = [point for point in against.points if point.pair.depth or point.difference]
    columns = _columns([point.pair for point in points])
    marked = any(point.beyond for point in points)
    body = []
    for point in points:
        a, b = point.pair.base, point.pair.other
        lengths = [f"{a.acceptance_length:.2f}", f"{b.acceptance_length:.2f}"]
        mark = ["**" if point.holds else "*" if point.beyond else ""] if marked else []
        shares = [_first(a), _first(b)]
        body.append([*_cells(point.pair, columns), str(point.pair.depth), *lengths, _with_error(point), *mark, *shares])
    base, other = _names(against)
    head = [*columns, "depth", base, other, "difference", *([""] if marked else []), f"draft 1, {base}", other]
    return Table("Acceptance length (tokens per round)", head, body, len(columns), LEGEND if marked else "")


def _first(row: ResultRow) -> str:
    share = row.per_position[0] if row.per_position else None
    return _MISSING if share is None else f"{100 * share:.1f} %"


def _positions(against: Against) -> Table | None:
    deepest = _by_setting(against, deepest=True)
    deepest = [pair for pair in deepest if pair.depth]
    if not deepest:
        return None
    columns = _columns(deepest)
    longest = max(pair.depth for pair in deepest)
    body = []
    for pair in deepest:
        shares = []
        for a, b in zip(pair.base.per_position, pair.other.per_position, strict=True):
            shares.append(_MISSING if a is None or b is None else _change(f"{100 * a:.0f}", f"{100 * b:.0f}"))
        body.append([*_cells(pair, columns), *shares, *[""] * (longest - len(shares))])
    head = [*columns, *(f"j = {j}" for j in range(1, longest + 1))]
    return Table("Rounds in which drafts 1…j were all accepted, in %, at the deepest depth", head, body, len(columns))


_QUALITY: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("kl", "KL from the unquantised target (nats)", lambda value: f"{value:.4g}"),
    ("top1_agreement", "top-1 agreement with it", lambda value: f"{100 * value:.2f} %"),
    ("perplexity", "perplexity", lambda value: f"{value:.4g}"),
)


def _quality_lines(against: Against) -> list[Pair]:
    """A pair for each setting whose rows say what became of the target; it is the same at every depth."""
    return [
        pair
        for pair in _by_setting(against)
        if any(_get(row, name) is not None for row in (pair.base, pair.other) for name in QUALITY)
    ]


def _quality_table(against: Against) -> Table:
    lines = _quality_lines(against)
    columns = _columns(lines)
    body = []
    for pair in lines:
        cells = _cells(pair, columns)
        for name, _, show in _QUALITY:
            a, b = _get(pair.base, name), _get(pair.other, name)
            cells += [_MISSING if value is None else show(value) for value in (a, b)]
        body.append(cells)
    base, other = _names(against)
    head = [*columns]
    for title in ("KL", "top-1", "perplexity"):
        head += [f"{title}, {base}", f"{title}, {other}"]
    title = "The target's own text against the unquantised target's (KL in nats a token)"
    return Table(title, head, body, len(columns))


def _sum(*names: str) -> Callable[[ResultRow], float | None]:
    def read(row: ResultRow) -> float | None:
        values = [getattr(row, name) for name in names]
        return None if None in values else sum(values)

    return read


_SIZES: tuple[tuple[str, Callable[[ResultRow], float | None]], ...] = (
    ("weights", _sum("target_weight_bytes", "draft_weight_bytes")),
    ("KV a token", _sum("kv_bytes_per_token", "draft_kv_bytes_per_token")),
    ("state a sequence", _sum("state_bytes")),
)


def _known(against: Against, read: Callable) -> bool:
    return any(read(point.pair.base) is not None and read(point.pair.other) is not None for point in against.points)


def _byte_pairs(against: Against, read: Callable) -> list[Pair]:
    return [
        pair
        for pair in _by_setting(against)
        if read(pair.base) is not None and read(pair.other) is not None and read(pair.base) != read(pair.other)
    ]


def _byte_table(against: Against) -> Table | None:
    told = [(title, read) for title, read in _SIZES if _byte_pairs(against, read)]
    pairs = [pair for pair in _by_setting(against) if any(pair in _byte_pairs(against, read) for _, read in told)]
    if not pairs:
        return None
    columns = _columns(pairs)
    base, other = _names(against)
    head, body = list(columns), []
    for title, _ in told:
        head += [f"{title}, {base}", other, "share"]
    for pair in pairs:
        cells = _cells(pair, columns)
        for _, read in told:
            a, b = read(pair.base), read(pair.other)
            share = f"{100 * b / a:.0f} %" if a and b is not None else _MISSING
            cells += [human_bytes(a), human_bytes(b), share]
        body.append(cells)
    return Table("Bytes as deployed", head, body, len(columns))


def _speed_pairs(against: Against) -> list[tuple[Pair, bool]]:
    return [
        (point.pair, busy)
        for point, busy in zip(against.points, against.busy, strict=True)
        if point.pair.base.tokens_per_second and point.pair.other.tokens_per_second
    ]


def _speed_table(against: Against) -> Table | None:
    timed = _speed_pairs(against)
    columns = _columns([pair for pair, _ in timed])
    body = []
    for pair, odd in timed:
        a, b = pair.base.tokens_per_second, pair.other.tokens_per_second
        ratio = f"{b / a:.2f}" + (" (busy)" if odd else "")
        body.append([*_cells(pair, columns), str(pair.depth), f"{a:.0f}", f"{b:.0f}", ratio])
    busy = "busy: rounds more than 3 times off the others' trend, not to be believed"
    note = busy if any(odd for _, odd in timed) else ""
    head = [*columns, "depth", *_names(against), "times"]
    return Table("Tokens per second, all prompts at once", head, body, len(columns), note)


def _failed_table(against: Against) -> Table:
    columns = _columns(against.failed)
    body = []
    for pair in against.failed:
        for name, row in ((against.base.name, pair.base), (against.other.name, pair.other)):
            if row.error is not None or row.acceptance_length is None:
                why = "no rounds" if row.error is None else one_line(row.error, 160)
                body.append([*_cells(pair, columns), str(pair.depth), one_line(name, NAME), why])
    return Table("Failed", [*columns, "depth", "in", "error"], body, len(columns) + 3)


def _left_over(against: Against) -> Table:
    """Rows without a partner, one line for each setting."""
    body = []
    for source, rows in ((against.base, against.matched.only_base), (against.other, against.matched.only_other)):
        settings: dict[tuple[str, ...], list[int]] = {}
        for row in rows:
            words = [f"{title} {one_line(read(row))}" for title, read in _telling(source.rows)]
            settings.setdefault((one_line(source.name, NAME), " · ".join(words) or "all"), []).append(row.depth)
        body += [[*key, ", ".join(map(str, depths))] for key, depths in settings.items()]
    more = f"and {len(body) - _LINES} more settings" if len(body) > _LINES else ""
    return Table("Without a partner", ["in", "settings", "depths"], body[:_LINES], 3, more)


# what the tables share


def _change(before: str, now: str) -> str:
    return before if before == now else f"{before} → {now}"


def _telling(rows: Iterable[ResultRow]) -> list[tuple[str, Callable]]:
    """The settings by which rows are told apart: exclusions, cache, and what else varies among them."""
    rows = list(rows)
    always = ("exclusions", "cache")
    return [each for name, each in AXES.items() if name in always or len({each[1](row) for row in rows}) > 1]


def _varies(pairs: Sequence[Pair], title: str) -> bool:
    return len({pair.settings[title] for pair in pairs}) > 1 or title in ("exclusions", "KV cache")


def _columns(pairs: Sequence[Pair]) -> list[str]:
    """Settings that a table has a column for."""
    return [title for title in (pairs[0].settings if pairs else ()) if _varies(pairs, title)]


def _cells(pair: Pair, columns: Sequence[str]) -> list[str]:
    return [one_line(pair.settings[title]) for title in columns]


def _by_setting(against: Against, deepest: bool = False) -> list[Pair]:
    """One pair for each setting: the first with a draft, for what does not depend on the depth, or the deepest."""
    found: dict[tuple[str, ...], Pair] = {}
    for point in against.points:
        key = tuple(point.pair.settings.values())
        if deepest or key not in found:
            found[key] = point.pair
    return list(found.values())


def _names(against: Against) -> list[str]:
    return [one_line(source.name, NAME) for source in (against.base, against.other)]


def _with_error(point: Point) -> str:
    if point.change is None:
        return signed(point.difference)
    return f"{signed(point.difference)} ± {point.change.error:.2f}" if point.compared else "none"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _some(values: Iterable[str]) -> str:
    words = [one_line(value, 30) for value in values]
    return ", ".join(words[:3]) + (", …" if len(words) > 3 else "")


def _get(row: ResultRow, name: str) -> Any:
    return getattr(row, name, None)
