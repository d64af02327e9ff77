"""The tables of a comparison: lengths, positions, quality, bytes, speed, what failed, what has no partner.

Every number comes from the `Comparison`; what a file does not have has no table. Says no sentences, draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mtplab.report.comparison import Against, Point
from mtplab.report.row_sizes import SIZES, Size
from mtplab.report.table import Table
from mtplab.report.text import human_bytes, one_line
from mtplab.study.fields import has_length
from mtplab.study.matching import AXES, Pair
from mtplab.study.numbers import fixed
from mtplab.study.row import ResultRow
from mtplab.study.soundness import COLUMNS, quality_numbers

__all__ = [
    "byte_pairs",
    "listed",
    "pair_words",
    "quality_lines",
    "setting_varies",
    "size_known",
    "speed_pairs",
    "tables",
    "with_error",
]

_LEGEND = (
    "* outside its own 95 % interval, which one in twenty is by chance alone, and depths of one setting together; "
    "** beyond chance with all of them looked at (Holm)"
)
NAME = 24  # characters of a file's name over a column
_LINES = 20  # settings without a partner that are listed
_MISSING = "–"


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


def pair_words(pair: Pair, axis: str) -> str:
    """A setting of a pair: its value, or `unquantised → int8` where the pair was matched across it."""
    read = AXES[axis][1]
    base, other = read(pair.base), read(pair.other)
    return base if base == other else f"{base} → {other}"


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
        body.append([*_cells(point.pair, columns), str(point.pair.depth), *lengths, with_error(point), *mark, *shares])
    base, other = _names(against)
    first = [f"draft 1, {name}" for name in (base, other)]
    head = [*columns, "depth", base, other, "difference", *([""] if marked else []), *first]
    return Table("Acceptance length (tokens per round)", head, body, len(columns), _LEGEND if marked else "")


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


def quality_lines(against: Against) -> list[Pair]:
    """A pair for each setting whose rows say what became of the target; it is the same at every depth."""
    return [
        pair
        for pair in _by_setting(against)
        if pair.base.perplexity is not None or pair.other.perplexity is not None
    ]


def _quality_table(against: Against) -> Table | None:
    lines = quality_lines(against)
    if not lines:
        return None
    columns = _columns(lines)
    blank = [("–", "–", "–")] * len(lines)
    before, now = (quality_numbers(getattr(pair, side) for pair in lines) or blank for side in ("base", "other"))
    base, other = _names(against)
    body = []
    for pair, mine, theirs in zip(lines, before, now, strict=True):
        body.append([*_cells(pair, columns), *(cell for both in zip(mine, theirs, strict=True) for cell in both)])
    head = [*columns, *(f"{title}{name}" for title in COLUMNS for name in (f", {base}", f", {other}"))]
    texts = {row.quality_text for pair in lines for row in (pair.base, pair.other) if row.quality_text}
    note = "over different texts, which do not compare" if len(texts) > 1 else ""
    return Table("The target itself, against the unquantised one", head, body, len(columns), note)


def size_known(against: Against, read: Size) -> bool:
    """Whether some pair has this size on both sides."""
    return any(read(point.pair.base) is not None and read(point.pair.other) is not None for point in against.points)


def byte_pairs(against: Against, read: Size) -> list[Pair]:
    """A pair for each setting that has this size on both sides, and not the same."""
    return [
        pair
        for pair in _by_setting(against)
        if read(pair.base) is not None and read(pair.other) is not None and read(pair.base) != read(pair.other)
    ]


def _byte_table(against: Against) -> Table | None:
    told = [(title, read) for title, read in SIZES if byte_pairs(against, read)]
    pairs = [pair for pair in _by_setting(against) if any(pair in byte_pairs(against, read) for _, read in told)]
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


def speed_pairs(against: Against) -> list[tuple[Pair, bool]]:
    return [
        (point.pair, busy)
        for point, busy in zip(against.points, against.busy, strict=True)
        if point.pair.base.tokens_per_second and point.pair.other.tokens_per_second
    ]


def _speed_table(against: Against) -> Table | None:
    timed = speed_pairs(against)
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
            if not has_length(row):
                why = "no rounds" if row.error is None else one_line(row.error, 160)
                body.append([*_cells(pair, columns), str(pair.depth), one_line(name, NAME), why])
    return Table("Failed", [*columns, "depth", "in", "error"], body, len(columns) + 3)


def _left_over(against: Against) -> Table:
    """Rows without a partner, one line for each setting."""
    sides = [
        (source, rows)
        for source, rows in ((against.base, against.matched.only_base), (against.other, against.matched.only_other))
        if rows
    ]
    # a column each: cut to one cell, settings would differ where they cannot be read
    columns = list(dict.fromkeys(each for source, _ in sides for each in _telling(source.rows)))
    body = []
    for source, rows in sides:
        settings: dict[tuple[str, ...], list[int]] = {}
        for row in rows:
            key = (one_line(source.name, NAME), *(one_line(read(row)) for _, read in columns))
            settings.setdefault(key, []).append(row.depth)
        body += [[*key, ", ".join(map(str, depths))] for key, depths in settings.items()]
    more = f"and {len(body) - _LINES} more settings" if len(body) > _LINES else ""
    head = ["in", *(title for title, _ in columns), "depths"]
    return Table("Without a partner", head, body[:_LINES], len(head), more)


# what the tables share


def _change(before: str, now: str) -> str:
    return before if before == now else f"{before} → {now}"


def _telling(rows: Iterable[ResultRow]) -> list[tuple[str, Callable]]:
    """The settings by which rows are told apart: exclusions, cache, and what else varies among them."""
    rows = list(rows)
    always = ("exclusions", "cache")
    return [each for name, each in AXES.items() if name in always or len({each[1](row) for row in rows}) > 1]


def setting_varies(pairs: Sequence[Pair], title: str) -> bool:
    return len({pair.settings[title] for pair in pairs}) > 1 or title in ("exclusions", "KV cache")


def _columns(pairs: Sequence[Pair]) -> list[str]:
    """Settings that a table has a column for."""
    return [title for title in (pairs[0].settings if pairs else ()) if setting_varies(pairs, title)]


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


def with_error(point: Point) -> str:
    said = fixed(point.difference, 2, sign=True)
    if point.change is None:
        return said
    return f"{said} ± {point.change.error:.2f}" if point.compared else "none"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
